import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flows.cli.main import execute
from qualification.errors import ConfigurationError
from qualification.execution import launch
from qualification.execution.attempt import Attempt
from qualification.execution.environment import child_environment
from qualification.execution.supervision import Command, Ending, Limits
from qualification.execution.supervisor import TRUSTED
from qualification.execution.worker import CONTRACT_VERSION, Job
from qualification.providers import docker as provider
from qualification.providers.docker import DockerProvider, probe_containers
from qualification.providers.docker_keeper import Keeper
from qualification.providers.protocol import Place
from qualification.records import Ground, ProbeStatus, ReceiptStatus
from tests.docker_engine import Engine
from tests.scripted_nvml import GPUS, ScriptedNvml

pytestmark = pytest.mark.docker

LIMITS = Limits(wall_seconds=60, terminate_seconds=12)


@pytest.fixture
def engine(docker_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setenv("DOCKER_HOST", docker_engine.host)
    yield docker_engine
    assert docker_engine.containers() == []


def attempt(engine: Engine, folder: Path, **bounds: int) -> Attempt:
    made = Attempt(run="r", attempt=1, folder=folder, recorded=False, provider=DockerProvider(engine.image, **bounds))
    made.begin()
    return made


def meanwhile(action: Callable[[], object]) -> threading.Thread:
    helper = threading.Thread(target=action)
    helper.start()
    return helper


def containers(made: Attempt) -> Any:
    receipt = made.take_receipt()
    return receipt, next(probe for probe in receipt.probes if probe.name == "containers")


def test_a_container_runs_without_privilege_and_is_gone_by_id_and_label(engine: Engine, tmp_path: Path) -> None:
    made = attempt(engine, tmp_path)
    script = "id -u; touch /here; ls /var/run/docker.sock; cat /proc/1/comm; cat /proc/self/status; exit 7"
    outcome = made.execute(["sh", "-c", script], "command", limits=LIMITS)
    assert (outcome.ending, outcome.exit_code) == (Ending.EXITED, 7)
    output = (tmp_path / "command/rank-0.stdout.log").read_text()
    errors = (tmp_path / "command/rank-0.stderr.log").read_text()
    assert output.startswith("10001\ntini\n")
    assert "CapEff:\t0000000000000000" in output
    assert "NoNewPrivs:\t1" in output
    assert "Read-only file system" in errors
    assert "docker.sock" in errors
    receipt, probe = containers(made)
    assert (receipt.status, receipt.provider, probe.status) == (ReceiptStatus.CLEAN, "docker", ProbeStatus.CLEAN)
    assert "exited exit code 7" in probe.values["containers"][0]


def test_the_trusted_worker_runs_inside_and_its_events_come_out(engine: Engine, tmp_path: Path) -> None:
    subject = tmp_path / "subject" / "trainer_rank"
    subject.mkdir(parents=True)
    (subject / "__init__.py").touch()
    (subject / "contract.py").write_text(
        f"""CONTRACT_VERSION = {CONTRACT_VERSION}\nimport os\n"""
        """os.write(int(os.environ["QUALIFY_EVENTS_FD"]), b'{"event":"inside"}\\n')\n"""
    )
    made = attempt(engine, tmp_path / "attempt")
    job = Job(
        run="r",
        attempt=1,
        workload="unheard_of",
        ground=Ground.REHEARSAL,
        policy="none",
        subject=str(subject.parent),
        output=str(tmp_path / "attempt" / "work" / "output"),
    )
    Path(job.output).mkdir(parents=True)
    path = tmp_path / "attempt" / "job.json"
    path.write_bytes(msgspec.json.encode(job))
    launched = made.launch(path, "work", limits=LIMITS)
    said = [msgspec.json.decode(stamped.event)["event"] for stamped in launched.events()]
    assert (launched.outcome.exit_code, said) == (2, ["inside", "failure"])


def created(engine: Engine, folder: Path, gpu: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Create a container for one leased GPU, as its keeper does; return the engine's own record and its environment."""
    folder.mkdir(parents=True)
    made = Attempt(run="r", attempt=1, folder=folder, provider=DockerProvider(engine.image))
    place = Place(
        run="r",
        token=folder.name,
        folder=str(folder),
        name="rank-0",
        gpus=(gpu,),
        reads=(str(TRUSTED),),
        writes=(str(folder),),
    )
    made.provider.command(Command(words=("true",), environment=child_environment(folder, [gpu])), place)
    keep = msgspec.json.decode((folder / "rank-0.container.json").read_bytes(), type=provider.Keep)
    with provider.engine() as client:
        container = client.api.create_container(**Keeper(keep, client).settings())
        inspected: dict[str, Any] = client.api.inspect_container(container["Id"])
    return inspected, dict(item.split("=", 1) for item in inspected["Config"]["Env"])


def test_each_container_is_given_its_leased_gpu_by_uuid_and_no_other(engine: Engine, tmp_path: Path) -> None:
    """Without an NVIDIA runtime the engine still records the request; starting it is what it refuses here."""
    for gpu, token in zip(GPUS, ("first", "second"), strict=True):
        inspected, environment = created(engine, tmp_path / token, gpu)
        host = inspected["HostConfig"]
        (request,) = host["DeviceRequests"]
        assert (request["DeviceIDs"], request["Count"], request["Capabilities"]) == ([gpu], 0, [["gpu"]])
        assert (environment["NVIDIA_VISIBLE_DEVICES"], environment["CUDA_VISIBLE_DEVICES"]) == (gpu, gpu)
        assert inspected["Config"]["Labels"].items() >= {"qualify.token": token, "qualify.run": "r"}.items()
        assert (host["ReadonlyRootfs"], host["NetworkMode"], host["CapDrop"]) == (True, "none", ["ALL"])
        assert (host["Privileged"], host["SecurityOpt"]) == (False, ["no-new-privileges"])
        assert not any("docker.sock" in bind for bind in host["Binds"])
        assert probe_containers(token, [])[0].status is ProbeStatus.CLEAN


def test_a_gpu_that_the_engine_cannot_give_ends_before_the_workload_and_is_free_again(
    engine: Engine, nvml: ScriptedNvml, private: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = execute(["exec", "--json", "--gpu", GPUS[0], "--image", engine.image, "--", "touch", "/started"])
    receipt = json.loads(capsys.readouterr().out)
    assert (code, receipt["status"], receipt["provider"]) == (3, "CLEAN", "docker")
    (log,) = private.glob("runs/*/1/command/rank-0.stderr.log")
    assert "could not select device driver" in log.read_text()
    assert execute(["exec", "--gpu", GPUS[0], "--", "true"]) == 0


@pytest.mark.parametrize("image", ["debian", "debian:bookworm", "sha256:abc", "name@sha256:" + "g" * 64])
def test_only_a_digest_names_an_image(image: str) -> None:
    with pytest.raises(ConfigurationError, match="digest"):
        DockerProvider(image)


def test_out_of_memory_is_told(engine: Engine, tmp_path: Path) -> None:
    made = attempt(engine, tmp_path, memory_bytes=64 << 20)
    outcome = made.execute(["python3", "-c", "bytearray(1 << 30)"], "command", limits=LIMITS)
    receipt, probe = containers(made)
    assert (outcome.exit_code, receipt.status) == (137, ReceiptStatus.CLEAN)
    assert "OOM-killed" in probe.values["containers"][0]


def test_a_paused_container_is_ended_and_the_receipt_says_it_was_paused(engine: Engine, tmp_path: Path) -> None:
    made = attempt(engine, tmp_path)
    helper = meanwhile(lambda: engine.docker("pause", engine.wait_for_container()))
    outcome = made.execute(["sleep", "60"], "command", limits=Limits(wall_seconds=3, terminate_seconds=12))
    helper.join()
    receipt, probe = containers(made)
    assert (outcome.ending, receipt.status) == (Ending.TIMED_OUT, ReceiptStatus.CLEAN)
    assert "was paused" in probe.values["containers"][0]


def test_a_renamed_container_whose_keeper_was_killed_is_found_by_label(engine: Engine, tmp_path: Path) -> None:
    def disturb() -> None:
        engine.docker("rename", engine.wait_for_container(), "another")
        keeper = subprocess.run(
            ["pgrep", "-f", f"docker_keeper {tmp_path}"], capture_output=True, text=True, check=True
        )
        os.kill(int(keeper.stdout.split()[0]), signal.SIGKILL)

    made = attempt(engine, tmp_path)
    helper = meanwhile(disturb)
    outcome = made.execute(["sleep", "60"], "command", limits=LIMITS)
    helper.join()
    receipt, probe = containers(made)
    assert (outcome.ending, outcome.exit_code) == (Ending.PROVIDER_FAILED, -signal.SIGKILL)
    assert receipt.status is ReceiptStatus.CLEAN
    assert len(probe.values["removed"]) == 1


def test_a_container_that_somebody_removes_ends_its_run_at_once(engine: Engine, tmp_path: Path) -> None:
    def remove() -> None:
        engine.docker("rm", "--force", engine.wait_for_container())

    made = attempt(engine, tmp_path)
    helper = meanwhile(remove)
    outcome = made.execute(["sleep", "60"], "command", limits=LIMITS)
    helper.join()
    receipt, _ = containers(made)
    assert outcome.ending in (Ending.EXITED, Ending.PROVIDER_FAILED)
    assert outcome.exit_code not in (0, None)
    assert receipt.status is ReceiptStatus.CLEAN
    assert "somebody else removed it" in (tmp_path / "command/rank-0.stderr.log").read_text()


def test_a_restarted_engine_gives_a_truthful_end(engine: Engine, tmp_path: Path) -> None:
    def restart() -> None:
        engine.wait_for_container()
        engine.stop()
        engine.start()

    made = attempt(engine, tmp_path)
    helper = meanwhile(restart)
    outcome = made.execute(["sleep", "60"], "command", limits=LIMITS)
    helper.join()
    receipt, probe = containers(made)
    assert outcome.exit_code not in (0, None)
    assert receipt.status is ReceiptStatus.CLEAN
    assert "exited" in probe.values["containers"][0]


def test_a_silent_engine_is_unverified_and_a_later_look_is_clean(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider, "CALL_SECONDS", 2)

    def silence() -> None:
        engine.wait_for_container()
        engine.process.send_signal(signal.SIGSTOP)

    made = attempt(engine, tmp_path)
    helper = meanwhile(silence)
    started = time.monotonic()
    made.execute(["sleep", "60"], "command", limits=Limits(wall_seconds=4, terminate_seconds=2, kill_seconds=2))
    helper.join()
    receipt, probe = containers(made)
    try:
        assert time.monotonic() - started < 30
        assert (receipt.status, probe.status) == (ReceiptStatus.UNVERIFIED, ProbeStatus.UNREADABLE)
        assert [process.command for process in receipt.swept][-1] == "sleep"
    finally:
        engine.process.send_signal(signal.SIGCONT)
    again, found = containers(made)
    assert (again.status, found.status) == (ReceiptStatus.CLEAN, ProbeStatus.CLEAN)
    assert len(found.values["removed"]) == 1


def test_an_engine_that_is_not_there_is_unverified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    made = Attempt(run="r", attempt=1, folder=tmp_path, provider=DockerProvider("sha256:" + "a" * 64))
    made.begin()
    outcome = made.execute([sys.executable, "-V"], "command", limits=LIMITS)
    receipt = made.take_receipt()
    assert (outcome.ending, outcome.exit_code) == (Ending.PROVIDER_FAILED, 125)
    assert "the engine does not answer" in (outcome.reason or "")
    assert receipt.status is ReceiptStatus.UNVERIFIED
    assert "the engine did not answer" in (receipt.reason or "")


def test_several_ranks_share_one_container_and_keep_their_own_logs_and_events(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "TORCHRUN", "tests.data.starting_ranks")
    monkeypatch.setattr(launch, "WORKER", "tests.data.reporting_rank")
    made = attempt(engine, tmp_path / "attempt")
    (tmp_path / "subject").mkdir()
    (tmp_path / "output").mkdir()
    places = {"subject": str(tmp_path / "subject"), "output": str(tmp_path / "output")}
    job = Job(run="r", attempt=1, workload="w", ground=Ground.REHEARSAL, policy="p", **places)
    path = tmp_path / "attempt" / "job.json"
    path.write_bytes(msgspec.json.encode(job))
    launched = made.launch(path, "work", limits=LIMITS, ranks=2)
    assert launched.outcome.succeeded, (tmp_path / "attempt/work/torchrun.stderr.log").read_text()
    assert sorted(event.rank for event in launched.events()) == [0, 1]
    for rank in range(2):
        assert (tmp_path / f"attempt/work/rank-{rank}.stdout.log").read_text() == f"out {rank}\n"
    assert containers(made)[0].status is ReceiptStatus.CLEAN
