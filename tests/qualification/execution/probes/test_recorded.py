"""The probes and the scripted NVML against recordings of a real H200 (``bench/recordings/h200-nvml.json``)."""

import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from qualification.execution.probes.gpus import SLACK_BYTES, GpuReader, GpuWatch, _settle
from qualification.execution.receipt import fold
from qualification.records import ProbeStatus, Receipt, ReceiptStatus
from tests.scripted_nvml import GPUS, IDLE, TOTAL, ScriptedNvml

RECORDING: dict[str, Any] = json.loads((Path(__file__).parents[4] / "bench/recordings/h200-nvml.json").read_text())
KILLED = {round(killed["held_gib"]): killed for killed in RECORDING["killed"]}
SLOWER = 10
"""The recorded reclaim takes 0.13 s; played this much slower, the polls fall into every part of it."""


def test_the_scripted_card_is_the_recorded_one() -> None:
    assert RECORDING["total"] == TOTAL
    assert abs(RECORDING["idle"] - IDLE) < SLACK_BYTES


@pytest.mark.parametrize("held", KILLED)
def test_a_recorded_reclaim_is_clean_at_its_end_and_not_before(nvml: ScriptedNvml, held: int) -> None:
    killed = KILLED[held]
    baseline = killed["baseline"]
    (pid, _) = killed["listed"][0]
    pid = 4194299 if Path(f"/proc/{pid}").exists() else pid
    nvml.say(f"0 0 {baseline} 0 0")
    with GpuReader() as reader:
        watch = GpuWatch.begin(reader, GPUS[:1])
        nvml.say(
            *(
                f"{moment * SLOWER / 1e9:.6f} 0 {used} 0 0" + (f" {pid}:{used - baseline}" if pids else "")
                for moment, used, pids in killed["samples"]
            )
        )
        early = {probe.name: probe.status for probe in watch.probes(0.2)}
        assert early["gpu_memory"] is ProbeStatus.LEFTOVER
        started = time.monotonic()
        (settled,) = _settle(reader, watch.baselines, 10)
        assert settled.clean
        assert settled.reading.used_bytes == baseline
        assert time.monotonic() - started < 10


def test_the_recorded_receipts_are_clean_by_todays_rules() -> None:
    receipts = [msgspec.convert(entry["receipt"], Receipt) for entry in RECORDING["receipts"]]
    assert len(receipts) == 2
    for receipt in receipts:
        assert fold(receipt.probes) == (ReceiptStatus.CLEAN, None)
    assert [receipt.timed_out for receipt in receipts] == [False, True]
