"""``qualify evidence`` as a process: every question in words and as a versioned document."""

import json
from pathlib import Path

import pytest

from qualification.records import Ground, Verdict
from tests.databases import Workplace, sqlite_workplace
from tests.recorded import SOURCE, Recorded, recorded_here

__all__ = ["Workplace", "recorded_here", "sqlite_workplace"]


@pytest.fixture
def book(recorded_here: Recorded) -> Recorded:
    recorded_here.run("run-1", started_at="2026-11-28T10:00:00Z")
    recorded_here.run("run-2", verdict=Verdict.FAILED, reason="step 2 ran out of memory", ground=Ground.REHEARSAL)
    recorded_here.append(recorded_here.examine("run-2").decision(), source=SOURCE)
    return recorded_here


def test_every_question_has_an_answer_in_words_and_a_versioned_document(book: Recorded) -> None:
    questions = {
        ("list",): "run-2",
        ("list", "--verdict", "failed"): "run-2",
        ("show", "run-1"): "allocated_worst_error",
        ("why",): "full_step FAILED (step 2 ran out of memory)",
        ("latest", "forecast", "full_step"): "run-2",
        ("trend", "allocated_worst_error"): "0.125 %",
        ("diff", "run-1", "run-2"): "FAILED",
        ("device", "gpu-0"): "run-1",
        ("approvals",): "no approval expires in that time",
    }
    for question, expected in questions.items():
        words = book.command("evidence", *question)
        assert (words.returncode, words.stderr) == (0, ""), question
        assert expected in words.stdout, question
        document = json.loads(book.command("evidence", *question, "--json").stdout)
        assert document["schema"] == f"qualify.evidence.{question[0]}/1"


def test_lines_in_a_pipe_are_never_cut(book: Recorded) -> None:
    shown = book.command("evidence", "show", "run-1").stdout
    assert book.result().artifacts[0].sha256 in shown
    assert all(SOURCE.commit[:12] in line for line in book.command("evidence", "list").stdout.splitlines()[1:])


@pytest.mark.parametrize(
    "arguments",
    [
        ("list", "--commit", "abc"),
        ("list", "--verdict", "fine"),
        ("list", "--since", "yesterday"),
        ("list", "--limit", "0"),
        ("show", "run-9"),
        ("latest", "forecast", "pressure"),
        ("diff", "run-1", "run-9"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_one_line(book: Recorded, arguments: tuple[str, ...]) -> None:
    refused = book.command("evidence", *arguments)
    assert (refused.returncode, refused.stdout, len(refused.stderr.splitlines())) == (2, "", 1)


def test_a_page_is_written_once_and_never_over_another_file(book: Recorded, tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    assert book.command("evidence", "show", "run-1", "--html", str(path)).returncode == 0
    assert path.read_text().startswith("<!doctype html>")
    again = book.command("evidence", "show", "run-1", "--html", str(path))
    assert (again.returncode, "is there already" in again.stderr) == (2, True)
