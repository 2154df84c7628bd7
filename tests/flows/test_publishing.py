"""``qualify gate publish``: what is shown is recorded once, and changes neither decision nor evidence."""

from collections.abc import Iterator

import pytest
from sqlalchemy import select

from db.engine import reading
from db.models import publications
from tests.databases import Workplace, sqlite_workplace
from tests.recorded import COMMIT, Recorded, recorded_here
from tests.statuses import Statuses, statuses_api

__all__ = ["Workplace", "recorded_here", "sqlite_workplace"]

TOKEN = "token-that-must-not-be-seen"
ARGUMENTS = ("gate", "publish", "--repository", "example/trainer")


@pytest.fixture
def statuses(monkeypatch: pytest.MonkeyPatch) -> Iterator[Statuses]:
    with statuses_api(limit=2) as held:
        monkeypatch.setenv("QUALIFY_STATUS_API", held.address)
        monkeypatch.setenv("QUALIFY_STATUS_TOKEN", TOKEN)
        yield held


def published(recorded: Recorded) -> list[tuple[str, bool, str | None]]:
    columns = (publications.c.state, publications.c.published, publications.c.reason)
    with reading(recorded.workplace.engine) as connection:
        return [tuple(row) for row in connection.execute(select(*columns).order_by(publications.c.sequence))]


def test_ten_nights_on_one_commit_are_one_status_and_one_entry(recorded_here: Recorded, statuses: Statuses) -> None:
    for night in range(10):
        recorded_here.run(f"run-{night}", duration_ms=night)
        answer = recorded_here.command(*ARGUMENTS)
        assert (answer.returncode, answer.stdout) == (0, "shown already\n" if night else "published\n")
    assert len(statuses.posted[COMMIT]) == 1
    assert published(recorded_here) == [("pending", True, None)]
    assert {token for _, _, token in statuses.asked} == {f"Bearer {TOKEN}"}
    assert recorded_here.command("verify").returncode == 0


def test_the_limit_is_recorded_once_and_the_decision_stays(recorded_here: Recorded, statuses: Statuses) -> None:
    statuses.limit = 0
    recorded_here.run("run-1")
    for _ in range(2):
        answer = recorded_here.command(*ARGUMENTS)
        assert (answer.returncode, answer.stdout) == (1, "not published: the API answered 422 to POST\n")
    assert published(recorded_here) == [("pending", False, "the API answered 422 to POST")]
    assert recorded_here.command("gate", "check").returncode == 4


def test_a_changed_decision_is_shown_and_the_token_is_nowhere(recorded_here: Recorded, statuses: Statuses) -> None:
    recorded_here.run("run-1")
    answers = [recorded_here.command(*ARGUMENTS)]
    recorded_here.command("reject", "--key", str(recorded_here.keys / "bo"))
    answers.append(recorded_here.command(*ARGUMENTS))
    assert [one["state"] for one in statuses.posted[COMMIT]] == ["pending", "failure"]
    assert TOKEN not in str(answers)
    for path in recorded_here.workplace.home.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes()


def test_a_source_that_is_not_on_github_needs_a_name(recorded_here: Recorded, statuses: Statuses) -> None:
    recorded_here.run("run-1")
    refused = recorded_here.command("gate", "publish")
    assert (refused.returncode, "name the repository with --repository" in refused.stderr) == (2, True)
    assert statuses.asked == []
