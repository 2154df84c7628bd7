import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flows.cli.main import execute
from qualification.execution import recovery
from qualification.execution.environment import CACHES
from qualification.execution.inventory import virtual_devices
from tests.scripted_nvml import GPUS, IDLE, LOST, NO_PERMISSION, TOTAL, ScriptedNvml

GHOST = 10_644_094_976
DATA = Path(__file__).parents[1] / "data"
QUALIFY = str(Path(sys.executable).with_name("qualify"))
MIG = "MIG-00000000-0000-0000-0000-00000000000a"


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUALIFY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("QUALIFY_TRUST", str(tmp_path / "trust"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def receipt_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = execute(["exec", "--json", "--grace", "1", "--reclaim-wait", "1", *arguments])
    return code, json.loads(capsys.readouterr().out)


def probes(receipt: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [probe for probe in receipt["probes"] if probe["name"] == name]


def devices(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    assert execute(["gpus", "--json"]) == 0
    return {device["uuid"]: device for device in json.loads(capsys.readouterr().out)["devices"]}


@pytest.mark.parametrize(("script", "code", "exit_code"), [("true", 0, 0), ("exit 7", 3, 7), ("kill -9 $$", 3, -9)])
def test_a_clean_receipt_and_the_commands_own_end(
    capsys: pytest.CaptureFixture[str], script: str, code: int, exit_code: int
) -> None:
    answered, receipt = receipt_of(capsys, "--", "sh", "-c", script)
    assert (answered, receipt["status"], receipt["exit_code"]) == (code, "CLEAN", exit_code)


def test_the_time_limit_fails_the_command_and_the_receipt_stays_clean(capsys: pytest.CaptureFixture[str]) -> None:
    code, receipt = receipt_of(capsys, "--timeout", "1", "--", "sleep", "60")
    assert (code, receipt["status"], receipt["timed_out"]) == (3, "CLEAN", True)


def test_a_command_that_cannot_be_started_is_a_usage_error_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert execute(["exec", "--reclaim-wait", "1", "--", "/nonexistent"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "not started" in line]
    assert len(lines) == 1
    assert "/nonexistent" in lines[0]
    (tmp_path / "plain.txt").write_text("no program")
    assert execute(["exec", "--reclaim-wait", "1", "--", str(tmp_path / "plain.txt")]) == 2


def test_without_json_the_output_passes_through_and_the_receipt_follows(capfd: pytest.CaptureFixture[str]) -> None:
    assert execute(["exec", "--", "sh", "-c", "echo to-out; echo to-err >&2"]) == 0
    shown = capfd.readouterr()
    assert shown.out.startswith("to-out\nCLEAN: exit code 0\n")
    assert "to-err\n" in shown.err


def test_an_engine_that_outlives_its_server_is_swept_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, receipt = receipt_of(capsys, "--", sys.executable, str(DATA / "orphan_engine.py"))
    assert (code, receipt["status"], receipt["exit_code"]) == (3, "CLEAN", -9)
    assert len(receipt["swept"]) == 3
    assert not any("SRV" in path.read_text() for path in Path("/proc").glob("[0-9]*/comm"))


def test_caches_are_private_to_each_run_and_gone_afterwards(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "user/.cache/torch_extensions/x/lock"
    own.parent.mkdir(parents=True)
    own.touch()
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    script = "d=${TORCH_EXTENSIONS_DIR:?}; mkdir -p $d/x; touch $d/x/lock; kill -9 $$"
    _, first = receipt_of(capsys, "--", "sh", "-c", script)
    _, second = receipt_of(capsys, "--", "true")
    listed = [probes(receipt, "caches")[0]["values"]["retired"] for receipt in (first, second)]
    assert len(listed[0]) == len(listed[1]) == len(CACHES)
    assert not set(listed[0]) & set(listed[1])
    assert not any(Path(path).exists() for path in (*listed[0], *listed[1]))
    assert own.exists()


@pytest.mark.parametrize("processes", ["", "4194299:10000000000"])
def test_ghost_memory_is_dirty_quarantined_and_refused(
    capsys: pytest.CaptureFixture[str], nvml: ScriptedNvml, monkeypatch: pytest.MonkeyPatch, processes: str
) -> None:
    monkeypatch.setattr(recovery, "RECLAIM_SECONDS", 0.5)
    late = nvml.script.with_name("ghost.txt")
    late.write_text(f"gpu {GPUS[0]} {TOTAL}\nat 0 0 {GHOST} 100 0 {processes}\n")
    code, receipt = receipt_of(capsys, "--gpu", GPUS[0], "--", "cp", str(late), str(nvml.script))
    assert (code, receipt["status"]) == (6, "DIRTY")
    (memory,) = probes(receipt, "gpu_memory")
    assert (memory["values"]["used_bytes"], memory["values"]["baseline_bytes"]) == (GHOST, IDLE)
    device = devices(capsys)[GPUS[0]]
    assert str(GHOST) in device["quarantine"]
    assert device["holder"] is None
    assert execute(["sweep", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["attempts"] == []  # still dirty: nothing new, and nothing lifted
    assert execute(["exec", "--gpu", GPUS[0], "--", "true"]) == 3
    refused = capsys.readouterr().err
    assert "in quarantine" in refused
    assert str(GHOST) in refused
    nvml.idle()
    assert receipt_of(capsys, "--gpu", GPUS[0], "--", "true")[1]["status"] == "CLEAN"
    assert devices(capsys)[GPUS[0]]["quarantine"] is None


def test_a_lost_card_is_unverified_and_alone_in_quarantine(
    capsys: pytest.CaptureFixture[str], nvml: ScriptedNvml
) -> None:
    nvml.idle(GPUS)
    late = nvml.script.with_name("lost.txt")
    cards = "".join(f"gpu {uuid} {TOTAL}\n" for uuid in GPUS)
    late.write_text(f"{cards}at 0 0 {IDLE} 0 0\nat 0 1 0 0 {LOST}\n")
    arguments = ("--gpu", GPUS[0], "--gpu", GPUS[1], "--", "cp", str(late), str(nvml.script))
    code, receipt = receipt_of(capsys, *arguments)
    assert (code, receipt["status"]) == (6, "UNVERIFIED")
    assert GPUS[1] in receipt["reason"]
    figures = {probe["values"]["gpu"]: probe["values"]["used_bytes"] for probe in probes(receipt, "gpu_memory")}
    assert figures == {GPUS[0]: IDLE, GPUS[1]: None}
    shown = devices(capsys)
    assert shown[GPUS[0]]["quarantine"] is None
    assert "GPU is lost" in shown[GPUS[1]]["quarantine"]


def test_mig_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], nvml: ScriptedNvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvml.say(f"0 0 0 0 {NO_PERMISSION}", gpus=(MIG,), mark="mig")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", MIG)
    code, receipt = receipt_of(capsys, "--", "touch", str(tmp_path / "started"))
    assert (code, receipt["status"], receipt["exit_code"]) == (6, "UNVERIFIED", None)
    assert "MIG" in receipt["reason"]
    assert not (tmp_path / "started").exists()
    device = devices(capsys)[MIG]
    assert (device["used_bytes"], device["total_bytes"], device["holder"]) == (None, None, None)


def test_a_broken_nvml_is_unverified(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("no library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    code, receipt = receipt_of(capsys, "--gpu", GPUS[0], "--", "true")
    assert (code, receipt["status"]) == (6, "UNVERIFIED")


def test_an_unknown_device_is_a_usage_error(capsys: pytest.CaptureFixture[str], nvml: ScriptedNvml) -> None:
    assert execute(["exec", "--gpu", "GPU-nobody", "--", "true"]) == 2
    assert GPUS[0] in capsys.readouterr().err
    assert execute(["exec", "--gpu", GPUS[0], "--gpu", GPUS[0], "--", "true"]) == 2


def test_only_the_leased_card_is_visible(capfd: pytest.CaptureFixture[str], nvml: ScriptedNvml) -> None:
    script = "echo $CUDA_VISIBLE_DEVICES $NVIDIA_VISIBLE_DEVICES"
    assert execute(["exec", "--gpu", GPUS[0], "--", "sh", "-c", script]) == 0
    assert capfd.readouterr().out.startswith(f"{GPUS[0]} {GPUS[0]}\n")
    assert execute(["exec", "--", "sh", "-c", script]) == 0
    assert capfd.readouterr().out.startswith("none\n")


def test_a_second_run_waits_for_the_first(tmp_path: Path) -> None:
    (device, _) = virtual_devices()
    command = [QUALIFY, "exec", "--json", "--gpu", device, "--"]
    starts = tmp_path / "starts"
    script = f"echo in >> {starts}; sleep 1; echo out >> {starts}"
    runs = [subprocess.Popen([*command, "sh", "-c", script], stdout=subprocess.PIPE) for _ in range(2)]
    receipts = [json.loads(run.communicate(timeout=60)[0]) for run in runs]
    assert [receipt["status"] for receipt in receipts] == ["CLEAN", "CLEAN"]
    assert starts.read_text().split() == ["in", "out", "in", "out"]
    assert sorted(receipt["leases"][0]["token"] for receipt in receipts) == [1, 2]


def test_termination_ends_the_run_with_a_receipt_and_a_closed_lease(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (device, _) = virtual_devices()
    started = tmp_path / "started"
    command = [QUALIFY, "exec", "--json", "--grace", "1", "--gpu", device]
    run = subprocess.Popen(
        [*command, "--", "sh", "-c", f"touch {started}; trap '' TERM; sleep 60"], stdout=subprocess.PIPE
    )
    while not started.exists():
        time.sleep(0.05)
    os.kill(run.pid, signal.SIGTERM)
    receipt = json.loads(run.communicate(timeout=30)[0])
    assert run.returncode == 130
    assert (receipt["status"], len(receipt["swept"])) == ("CLEAN", 2)
    assert devices(capsys)[device]["holder"] is None
