"""Late and repeated schedules: a commit, policy and rules are qualified once a day; a moved head never runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flows.cli.main import execute
from qualification.errors import RefusedError
from qualification.git import git
from tests.flows.subjects import Trainer

Permit = Callable[[str], None]


def test_late_nightly_runs_collapse_to_one(with_server: Path, permit: Permit, trainer: Trainer) -> None:
    from flows.qualify import qualify

    permit(trainer.head("raise RuntimeError('stop')"))
    request = {"repository": str(trainer.folder), "reference": "refs/heads/main", "once_a_day": True}
    first = qualify(**request, return_state=True)
    (run,) = (path.name for path in (with_server / "runs").iterdir())
    assert first.name == "Completed"
    for _ in range(3):
        again = qualify(**request, return_state=True)
        assert (again.name, again.message) == ("Duplicate", f"answered by run {run}")
    permit(trainer.head("raise RuntimeError('another commit')"))
    assert qualify(**request, return_state=True).name == "Completed"
    assert len(list((with_server / "runs").iterdir())) == 2


def test_a_head_that_was_pushed_over_does_not_run_and_its_evidence_is_held(
    with_server: Path, permit: Permit, trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    from flows.qualify import qualify

    head = trainer.head("raise RuntimeError('stop')")
    permit(head)
    git(trainer.folder, "update-ref", "refs/pull/7/head", head)
    request = {"head": head, "repository": str(trainer.folder), "reference": "refs/pull/7/head"}
    summary = qualify(**request)
    assert summary["subject"]["reference"] == "refs/pull/7/head"
    pushed = trainer.head("raise RuntimeError('pushed over it')")
    git(trainer.folder, "update-ref", "refs/pull/7/head", pushed)
    with pytest.raises(RefusedError, match=f"refs/pull/7/head names {pushed} now"):
        qualify(**request)
    assert len(list((with_server / "runs").iterdir())) == 1
    capsys.readouterr()
    assert execute(["gate", "explain", summary["run"], "--repo", str(trainer.folder)]) == 0
    assert "no longer the head" in capsys.readouterr().out
