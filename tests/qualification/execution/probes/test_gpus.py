import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from qualification.execution.probes import gpus
from qualification.execution.probes.gpus import SLACK_BYTES, GpuReader, GpuWatch, occupancy, reading_problem
from qualification.records import Probe, ProbeStatus
from tests.scripted_nvml import GPUS, IDLE, LOST, NO_PERMISSION, TOTAL, UNKNOWN, ScriptedNvml

GHOST = 10_644_094_976
CLEAN, LEFTOVER, UNREADABLE = ProbeStatus.CLEAN, ProbeStatus.LEFTOVER, ProbeStatus.UNREADABLE


@pytest.fixture
def reader(nvml: ScriptedNvml) -> Iterator[GpuReader]:
    with GpuReader() as opened:
        yield opened


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(gpus, "UNREADABLE_SECONDS", 0.3)


def probe_after(nvml: ScriptedNvml, reader: GpuReader, *lines: str, seconds: float = 1.0) -> dict[str, Probe]:
    nvml.idle()
    watch = GpuWatch.begin(reader, GPUS[:1])
    nvml.say(*lines)
    return {probe.name: probe for probe in watch.probes(seconds)}


@pytest.mark.parametrize(
    ("lines", "memory", "processes", "health"),
    [
        ((f"0 0 {IDLE} 0 0",), CLEAN, CLEAN, CLEAN),
        ((f"0 0 {IDLE + SLACK_BYTES} 0 0",), CLEAN, CLEAN, CLEAN),
        ((f"0 0 {IDLE + SLACK_BYTES + 1} 0 0",), LEFTOVER, CLEAN, CLEAN),
        ((f"0 0 {GHOST} 100 0",), LEFTOVER, CLEAN, CLEAN),
        ((f"0 0 {GHOST} 100 0 4194299:10000000000",), LEFTOVER, LEFTOVER, CLEAN),
        ((f"0 0 {IDLE} 0 0 4194299:0",), CLEAN, LEFTOVER, CLEAN),
        ((f"0 0 0 0 {LOST}",), UNREADABLE, UNREADABLE, UNREADABLE),
        ((f"0 0 0 0 {UNKNOWN}",), UNREADABLE, UNREADABLE, UNREADABLE),
        ((f"0 0 0 0 {NO_PERMISSION}",), UNREADABLE, UNREADABLE, UNREADABLE),
        ((f"0 0 {GHOST} 0 0", f"0.5 0 {IDLE} 0 0"), CLEAN, CLEAN, CLEAN),
        ((f"0 0 {GHOST} 0 0", f"60 0 {IDLE} 0 0"), LEFTOVER, CLEAN, CLEAN),
        ((f"0 0 {IDLE} 0 {UNKNOWN}", f"0.1 0 {IDLE} 0 0"), CLEAN, CLEAN, CLEAN),
    ],
)
def test_what_nvml_shows_after_a_run_is_called_by_its_name(
    nvml: ScriptedNvml,
    reader: GpuReader,
    lines: tuple[str, ...],
    memory: ProbeStatus,
    processes: ProbeStatus,
    health: ProbeStatus,
) -> None:
    probes = probe_after(nvml, reader, *lines)
    found = tuple(probes[name].status for name in ("gpu_memory", "gpu_processes", "gpu_health"))
    assert found == (memory, processes, health)


def test_a_leftover_gives_both_readings_and_never_a_pid_as_remedy(nvml: ScriptedNvml, reader: GpuReader) -> None:
    probes = probe_after(nvml, reader, f"0 0 {GHOST} 100 0 4194299:10000000000")
    assert probes["gpu_memory"].values["used_bytes"] == GHOST
    assert probes["gpu_memory"].values["baseline_bytes"] == IDLE
    assert str(GHOST) in (probes["gpu_memory"].reason or "")
    assert "which this system does not know" in (probes["gpu_processes"].reason or "")
    assert "kill" not in (probes["gpu_processes"].reason or "")


def test_a_lost_card_hides_no_other(nvml: ScriptedNvml, reader: GpuReader) -> None:
    nvml.idle(GPUS)
    watch = GpuWatch.begin(reader, GPUS)
    nvml.say(f"0 0 {IDLE} 0 0", f"0 1 0 0 {LOST}", gpus=GPUS)
    statuses = {(probe.name, probe.values["gpu"]): probe.status for probe in watch.probes(1)}
    assert statuses[("gpu_memory", GPUS[0])] is CLEAN
    assert statuses[("gpu_memory", GPUS[1])] is UNREADABLE
    assert len(statuses) == 6


def test_a_card_unreadable_before_the_run_is_not_clean_after_it(nvml: ScriptedNvml, reader: GpuReader) -> None:
    nvml.say(f"0 0 0 0 {UNKNOWN}")
    watch = GpuWatch.begin(reader, GPUS[:1])
    nvml.idle()
    assert {probe.status for probe in watch.probes(1)} == {UNREADABLE}


def test_a_watch_that_was_interrupted_knows_no_health(nvml: ScriptedNvml, reader: GpuReader) -> None:
    watch = GpuWatch.resume(reader, [reader.read(GPUS[0])])
    statuses = {probe.name: probe.status for probe in watch.probes(1)}
    assert statuses == {"gpu_memory": CLEAN, "gpu_processes": CLEAN, "gpu_health": UNREADABLE}


def test_a_reader_that_hangs_is_given_up_in_time(nvml: ScriptedNvml) -> None:
    with GpuReader(call_seconds=0.5) as reader:
        assert reader.read(GPUS[0]).used_bytes == IDLE
        process = reader._process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        reading = reader.read(GPUS[0])
        assert reading.used_bytes is None
        assert "no answer within 0.5 s" in reading.errors["device"]
        assert process.poll() is not None


def test_a_file_that_is_no_library_is_unreadable_not_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("no library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    with GpuReader() as reader:
        assert reader.ask("list").error
        assert "Library Not Found" in reader.read(GPUS[0]).errors["device"]


def test_mig_is_refused_by_its_word_and_shows_no_figure(nvml: ScriptedNvml, reader: GpuReader) -> None:
    nvml.say(f"0 0 0 0 {NO_PERMISSION}", gpus=("MIG-00000000-0000-0000-0000-00000000000a",), mark="mig")
    (reading,) = reader.ask("list").gpus
    assert (reading.used_bytes, reading.total_bytes) == (None, None)
    assert "MIG" in (reading_problem(reading) or "")
    assert "Insufficient Permissions" in (occupancy(reading, IDLE) or "")


def test_a_card_that_was_never_idle_is_not_leased_with_somebodys_memory(nvml: ScriptedNvml, reader: GpuReader) -> None:
    assert occupancy(reader.read(GPUS[0]), None) is None
    nvml.say(f"0 0 {GHOST} 0 0")
    assert f"{GHOST} B used with no process listed" in (occupancy(reader.read(GPUS[0]), None) or "")
    assert f"against a baseline of {IDLE} B" in (occupancy(reader.read(GPUS[0]), IDLE) or "")
    nvml.say(f"0 0 {IDLE} 0 0 {os.getpid()}:1")
    assert f"in use by pid {os.getpid()}" in (occupancy(reader.read(GPUS[0]), IDLE) or "")


def test_the_total_is_the_cards_own(nvml: ScriptedNvml, reader: GpuReader) -> None:
    assert reader.read(GPUS[0]).total_bytes == TOTAL
