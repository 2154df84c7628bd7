"""Recordings with adapters, head and optimizer: unseen shapes, and unseen layer counts by repeating two periods."""

from __future__ import annotations

from functools import cache

import pytest

from trainer_rank.allocator.replay import replay
from trainer_rank.allocator.trace import Trace, load_trace
from trainer_rank.tapes import Status, fit
from trainer_rank.tapes.check import Comparison, compare
from trainer_rank.tapes.shipped import RECORDINGS, load_shipped, shipped_tapes

ALLOCATED, RESERVED = 0.05, 0.5
"""Largest errors allowed, in percent of what was observed."""
LORA = {name: shipped for name, shipped in shipped_tapes().items() if shipped.unseen}


@cache
def recording(file: str) -> Trace:
    return load_trace(RECORDINGS / file)


FILES = [file for shipped in LORA.values() for file in (*shipped.recordings, *shipped.unseen)]
UNSEEN = [(name, file) for name, shipped in LORA.items() for file in shipped.unseen]
LEFT_OUT = [("qwen3_6-35b-a3b-lora-h200", number) for number in range(4)] + [("qwen3_6-35b-a3b-lora-rerun-h200", 3)]


def check(compared: Comparison) -> None:
    assert compared.allocated_error is not None and compared.reserved_error is not None
    assert abs(compared.allocated_error) <= ALLOCATED and abs(compared.reserved_error) <= RESERVED
    assert compared.bound_holds


@pytest.mark.parametrize("file", FILES)
def test_each_recording_replays_byte_for_byte(file: str) -> None:
    assert replay(recording(file)).exact


@pytest.mark.parametrize(("name", "file"), UNSEEN)
def test_steps_of_four_layers_are_forecast_from_recordings_of_eight(name: str, file: str) -> None:
    compared = compare(load_shipped(name), recording(file))
    check(compared)
    assert compared.forecast.status is Status.EXTRAPOLATED
    assert any("4 layers from recordings of 8" in note for note in compared.forecast.notes)


@pytest.mark.parametrize(("name", "number"), LEFT_OUT)
def test_each_shape_of_eight_layers_is_forecast_from_the_others(name: str, number: int) -> None:
    files = LORA[name].recordings
    check(compare(fit([recording(file) for file in files if file != files[number]]), recording(files[number])))


def test_one_period_of_layers_is_not_repeated() -> None:
    four = [file for file in LORA["qwen3_6-35b-a3b-lora-h200"].unseen if "L4" in file]
    tape = fit([recording(file) for file in four])
    compared = compare(tape, recording(LORA["qwen3_6-35b-a3b-lora-h200"].recordings[0]))
    assert compared.forecast.status is Status.UNKNOWN
    assert "8 layers, recorded with 4" in compared.forecast.uncovered[0]
