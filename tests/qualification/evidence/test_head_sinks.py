"""Tree heads also go where the environment says, and a place that cannot take them is an error, not a log line."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from qualification.errors import ConfigurationError
from qualification.evidence.authentic import authenticate
from qualification.evidence.head_sinks import TreeHeadSinkError
from tests import facts
from tests.databases import Workplace


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    _git(folder, "init", "--quiet")
    _git(folder, "commit", "--quiet", "--allow-empty", "--message=first")
    return folder


def test_heads_become_git_notes(sqlite_workplace: Workplace, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sqlite_workplace.record(facts.receipt("run-0"))
    monkeypatch.setenv("QUALIFY_TREE_HEAD_SINKS", f"qualification.evidence.git_note:{repository}")
    sqlite_workplace.ledger.sign_head()
    sqlite_workplace.record(facts.receipt("run-1"))
    head = sqlite_workplace.ledger.sign_head()
    shown = _git(repository, "notes", f"--ref=qualify/{sqlite_workplace.ledger.identity}", "show")
    envelopes = [line for line in shown.splitlines() if line]
    facts_shown = [authenticate(line.encode(), sqlite_workplace.ledger.trust).read.fact for line in envelopes]
    assert [getattr(fact, "size", None) for fact in facts_shown] == [1, 2]
    assert facts_shown[-1] == head


def test_a_place_that_cannot_take_a_head_is_an_error_and_the_head_is_kept(
    sqlite_workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sqlite_workplace.record(facts.receipt())
    monkeypatch.setenv("QUALIFY_TREE_HEAD_SINKS", f"qualification.evidence.git_note:{tmp_path / 'absent'}")
    with pytest.raises(TreeHeadSinkError, match="tree head 1 is signed and kept, but not brought to"):
        sqlite_workplace.ledger.sign_head()
    monkeypatch.delenv("QUALIFY_TREE_HEAD_SINKS")
    assert sqlite_workplace.verify().head == 1


@pytest.mark.parametrize("given", ["no.such.module:x", "qualification.evidence.chain:x", ":"])
def test_a_sink_that_is_none_is_named(sqlite_workplace: Workplace, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    sqlite_workplace.record(facts.receipt())
    monkeypatch.setenv("QUALIFY_TREE_HEAD_SINKS", given)
    with pytest.raises(ConfigurationError, match="QUALIFY_TREE_HEAD_SINKS names"):
        sqlite_workplace.ledger.sign_head()
