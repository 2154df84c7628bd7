import contextlib
import signal
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from qualification.execution import launch as module
from qualification.execution.capture import Stamped
from qualification.execution.launch import Launched, launch, read_events
from qualification.execution.probes.host import listening
from qualification.execution.supervision import Ending, Limits


@pytest.fixture(autouse=True)
def _reporting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WORKER", "tests.data.reporting_rank")


def start(folder: Path, **changes: Any) -> Launched:
    return launch(folder / "job.json", run="r", token="launch-test", folder=folder / "work", **changes)


def told(stamped: Stamped) -> dict[str, Any]:
    assert isinstance(stamped.event, msgspec.Raw)
    said: dict[str, Any] = msgspec.json.decode(stamped.event)
    return said


def test_a_single_rank_hears_of_no_others(tmp_path: Path) -> None:
    heard: list[Stamped] = []
    launched = start(tmp_path, on_event=heard.append, gpus=("GPU-1",))
    assert launched.outcome.succeeded
    assert launched.ports == ()
    (event,) = heard
    assert told(event)["job"] == str(tmp_path / "job.json")
    assert (told(event)["RANK"], told(event)["WORLD_SIZE"], told(event)["CUDA_VISIBLE_DEVICES"]) == (
        None,
        None,
        "GPU-1",
    )


def test_torchrun_starts_the_ranks_and_each_has_its_own_logs_and_events(tmp_path: Path) -> None:
    launched = start(tmp_path, ranks=3, gpus=("GPU-1", "GPU-2", "GPU-3"))
    assert launched.outcome.succeeded
    (port,) = launched.ports
    assert listening(launched.ports) == ()
    events = launched.events()
    assert sorted(event.rank for event in events) == [0, 1, 2]
    assert [event.sequence for event in events] == [0, 1, 2]
    for event in events:
        said = told(event)
        assert (said["RANK"], said["LOCAL_RANK"], said["WORLD_SIZE"]) == (str(event.rank), str(event.rank), "3")
        assert (said["MASTER_ADDR"], said["MASTER_PORT"]) == ("127.0.0.1", str(port))
    for rank in range(3):
        assert (tmp_path / f"work/rank-{rank}.stdout.log").read_text() == f"out {rank}\n"
        assert (tmp_path / f"work/rank-{rank}.stderr.log").read_text() == f"err {rank}\n"
    assert not list((tmp_path / "work/streams").rglob("*.log"))


@pytest.mark.parametrize(("how", "code"), [("failed", 5), ("killed", 128 + signal.SIGKILL)])
def test_a_rank_that_dies_ends_the_others_that_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, code: int
) -> None:
    monkeypatch.setattr(module, "WORKER", "tests.data.dying_rank")
    job = tmp_path / f"{how}.json"
    launched = launch(job, run="r", token=f"dying-{how}", folder=tmp_path / "work", ranks=2)
    assert (launched.outcome.ending, launched.outcome.exit_code) == (Ending.EXITED, code)
    assert "rank 1 failed first" in (tmp_path / "work/torchrun.stderr.log").read_text()
    events = launched.events()
    assert sorted(event.rank for event in events) == [0, 1]
    assert not any(psutil.pid_exists(told(event)["pid"]) for event in events)


def test_ranks_whose_torchrun_is_killed_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WORKER", "tests.data.dying_rank")

    def kill_torchrun(stamped: Stamped) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(told(stamped)["pid"]).parent().kill()  # type: ignore[union-attr]

    launched = start(tmp_path, ranks=2, on_event=kill_torchrun, limits=Limits(terminate_seconds=0))
    assert (launched.outcome.ending, launched.outcome.exit_code) == (Ending.EXITED, -signal.SIGKILL)
    assert not any(psutil.pid_exists(told(event)["pid"]) for event in launched.events())
    assert launched.outcome.leftovers == ()


def test_a_line_that_is_still_being_written_is_not_read(tmp_path: Path) -> None:
    whole = b'{"sequence":0,"monotonic_ns":1,"rank":0,"event":{"event":"a"}}\n'
    (tmp_path / "events.jsonl").write_bytes(whole + whole[:20])
    assert [event.sequence for event in read_events(tmp_path)] == [0]
    assert read_events(tmp_path / "nowhere") == []
