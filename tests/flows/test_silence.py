"""A worker that silently waits says nothing about the policy: the result names what it waits on and is INCOMPLETE."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from flows import pipeline
from flows.cli.exits import ExitCode
from flows.cli.main import execute
from tests.flows.subjects import Trainer

WAIT = """folder = Path(os.environ["TORCH_EXTENSIONS_DIR"], "x")
folder.mkdir()
(folder / "lock").touch()
time.sleep(600)"""


def test_a_stale_build_lock_is_named_and_not_blamed_on_the_head(
    with_server: Path,
    permit: Callable[[str], None],
    trainer: Trainer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(pipeline, "SILENCE_SECONDS", 8)
    head = trainer.head(WAIT)
    permit(head)
    capsys.readouterr()
    options = ["--head", head, "--repo", str(trainer.folder), "--workload", "full_step", "--grace", "1", "--json"]
    assert execute(["run", *options]) == ExitCode.HELD
    (result,) = json.loads(capsys.readouterr().out)["workloads"]
    assert result["verdict"] == "INCOMPLETE"
    assert "silent for 8 s, and waits on" in result["reason"]
    assert "torch_extensions/x/lock" in result["reason"]
