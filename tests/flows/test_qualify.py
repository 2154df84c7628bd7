"""The flow on a real Prefect server: whatever the worker does, results, receipt and a closed lease are recorded."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from db.engine import open_for_reading
from db.leases import DatabaseLeaseStore
from flows.cli.main import execute
from tests.flows.subjects import Trainer
from tests.qualification.wheels import make_wheel

Permit = Callable[[str], None]


def _qualify(
    capsys: pytest.CaptureFixture[str], trainer: Trainer, head: str, *options: str
) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = execute(["run", "--head", head, "--repo", str(trainer.folder), "--json", *options])
    return code, json.loads(capsys.readouterr().out)


def _assert_settled(home: Path) -> None:
    """Every lease is closed, no worktree is left, and the evidence verifies."""
    engine = open_for_reading()
    store = DatabaseLeaseStore(engine)
    assert store.holdings() == ()
    assert [resource.quarantine for resource in store.resources()] == [None] * len(store.resources())
    engine.dispose()
    assert list((home / "worktrees").iterdir()) == []
    assert execute(["verify"]) == 0


@pytest.mark.parametrize(
    ("body", "exit_code", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, "exit_code is -9"),
        ("raise RuntimeError('no such kernel')", 1, "RuntimeError: no such kernel"),
        ("sys.exit(0)", 0, ""),
        ("os._exit(0)", 0, ""),
    ],
    ids=["killed", "raised", "left early", "left at once"],
)
def test_a_worker_that_does_not_do_its_work_never_passes_and_is_recorded(
    with_server: Path,
    permit: Permit,
    trainer: Trainer,
    capsys: pytest.CaptureFixture[str],
    body: str,
    exit_code: int,
    words: str,
) -> None:
    head = trainer.head(body)
    permit(head)
    code, summary = _qualify(capsys, trainer, head)
    (result,) = summary["workloads"]
    assert result["verdict"] != "PASSED"
    assert result["exit_code"] == exit_code
    assert words in result["reason"]
    assert code == (3 if result["verdict"] == "FAILED" else 4)
    assert result["card"] == "virtual"
    assert summary["subject"]["commit"] == head
    assert summary["receipt"]["status"] == "CLEAN"
    assert summary["decision"]["decision"] != "adopted"
    _assert_settled(with_server)


def test_a_child_in_a_session_of_its_own_is_swept_and_named(
    with_server: Path, permit: Permit, trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    child = "trap '' TERM; while :; do sleep 1; done"
    head = trainer.head(f"subprocess.Popen(['sh', '-c', {child!r}], start_new_session=True)\nos._exit(7)")
    permit(head)
    _, summary = _qualify(capsys, trainer, head, "--grace", "1")
    assert summary["receipt"]["status"] == "CLEAN"
    assert "sh" in [process["command"] for process in summary["receipt"]["swept"]]
    _assert_settled(with_server)


def test_a_worker_that_ignores_termination_is_ended_by_the_time_limit(
    with_server: Path, permit: Permit, trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    head = trainer.head("signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)")
    permit(head)
    code, summary = _qualify(capsys, trainer, head, "--timeout", "3", "--grace", "1")
    assert code == 3
    assert summary["receipt"]["timed_out"]
    assert "still running after 3 s" in summary["workloads"][0]["reason"]
    _assert_settled(with_server)


def test_a_head_that_edits_its_own_judge_is_judged_by_the_installed_one(
    with_server: Path, permit: Permit, trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    easy = "from qualification.records import Criterion\n\n\ndef judge(observation):\n    return []\n"
    lying = (
        "import qualification.criteria.full_step as judge\n"
        "judge.judge = lambda observation: []\n"
        "for name, text in {'forecast': '{\"event\": \"forecast\"}', 'end': '{\"event\": \"end\"}'}.items():\n"
        "    os.write(int(os.environ['QUALIFY_EVENTS_FD']), text.encode() + b'\\n')\n"
        "os._exit(0)"
    )
    files = {
        "qualification/__init__.py": "",
        "qualification/criteria/full_step.py": easy,
        "qualification/workloads/full_step.py": "def run(context):\n    pass\n",
        "qualification/rules/standard.toml": "workloads = []\n",
    }
    head = trainer.head(lying, **files)
    permit(head)
    code, summary = _qualify(capsys, trainer, head)
    (result,) = summary["workloads"]
    assert code != 0
    assert result["verdict"] != "PASSED"
    assert {criterion["name"]: criterion["verdict"] for criterion in result["criteria"]}["backwards"] == "INCOMPLETE"
    _assert_settled(with_server)


def test_nothing_secret_reaches_the_worker(
    with_server: Path,
    permit: Permit,
    trainer: Trainer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    head = trainer.head("Path(given['recordings'], 'environment.txt').write_text(repr(dict(os.environ)))\nos._exit(1)")
    permit(head)
    _, summary = _qualify(capsys, trainer, head)
    (artifact,) = [one for one in summary["workloads"][0]["artifacts"] if one["name"] == "environment.txt"]
    seen = (with_server / "blobs/sha256" / artifact["sha256"]).read_text()
    assert "QUALIFY_RUN_TOKEN" in seen
    assert "hunter2" not in seen
    assert "QUALIFY_TRUST" not in seen
    assert "PREFECT" not in seen


def test_a_head_s_own_lock_names_the_packages_of_its_worker(
    with_server: Path,
    permit: Permit,
    trainer: Trainer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    lock = make_wheel(tmp_path / "wheels", "shiny", "1.5", "NAME = 'from the lock'\n")
    head = trainer.head("import shiny\nraise RuntimeError(shiny.NAME)", **{"requirements.lock": lock})
    permit(head)
    _, summary = _qualify(capsys, trainer, head)
    (result,) = summary["workloads"]
    assert "RuntimeError: from the lock" in result["reason"]
    environment = json.loads((with_server / "blobs/sha256" / result["environment_sha256"]).read_bytes())
    assert environment["lock"]["packages"] == {"shiny": "1.5"}
    _assert_settled(with_server)


def test_a_head_that_nobody_permitted_does_not_run(
    with_server: Path, trainer: Trainer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    head = trainer.head(f"Path({str(tmp_path / 'executed')!r}).touch()")
    assert execute(["run", "--head", head, "--repo", str(trainer.folder)]) == 7
    assert f"nobody permitted {head}" in capsys.readouterr().err
    assert not (tmp_path / "executed").exists()
    engine = open_for_reading()
    assert DatabaseLeaseStore(engine).resources() == ()
    engine.dispose()


def test_what_prefect_says_afterwards_changes_nothing(
    with_server: Path, permit: Permit, trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    from prefect.client.orchestration import get_client
    from prefect.states import Crashed

    head = trainer.head("raise RuntimeError('stop')")
    permit(head)
    _, summary = _qualify(capsys, trainer, head)
    with get_client(sync_client=True) as client:
        newest = client.read_flow_runs(limit=1)[0]
        client.set_flow_run_state(newest.id, Crashed(), force=True)
    assert execute(["gate", "check", summary["run"], "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["decision"] == summary["decision"]["decision"]


def test_the_summary_is_an_artifact_on_the_server(
    with_server: Path, permit: Permit, trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    from prefect.client.orchestration import get_client

    head = trainer.head("raise RuntimeError('stop')")
    permit(head)
    _, summary = _qualify(capsys, trainer, head)
    with get_client(sync_client=True) as client:
        kinds = {artifact.key: artifact.type for artifact in client.read_artifacts()}
    assert kinds[f"qualify-{summary['run']}"] == "markdown"
    assert kinds[f"qualify-{summary['run']}-table"] == "table"
