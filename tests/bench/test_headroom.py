"""The picture of a step: on a virtual card and over driver memory, the bands make up the card at every event."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench import headroom
from bench.native.headroom import scene
from bench.native.release import LIBRARY_BYTES, Ground
from tests.bench.modelled import Driver
from trainer_rank.allocator.trace import Trace, load_trace, save_trace
from trainer_rank.devices.virtual import VirtualDevice
from trainer_rank.models.reference import TINY


@pytest.fixture
def narrowed() -> Iterator[Trace]:
    device = VirtualDevice("h200")
    ground = Ground(device, Driver(device), TINY, torch.float32, ((16,), (96, 33), (300, 40, 5), (200, 131, 77)))
    made, close = scene(ground, tokens=400)
    yield headroom.record_step(made)
    close()
    device.close()


def test_a_card_narrowed_by_driver_memory_is_drawn_from_its_file(narrowed: Trace, tmp_path: Path) -> None:
    save_trace(narrowed, tmp_path / "step.trace.json.gz")
    trace = load_trace(tmp_path / "step.trace.json.gz")
    check(trace)
    assert trace.features["capacity"] < 4_000_000_000
    headroom.draw(trace, tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def check(trace: Trace) -> None:
    rows = headroom.bands(trace)
    assert len(rows) == len(trace.events) > 100
    assert {sum(row) for row in rows} == {trace.features["capacity"]}
    assert min(min(row) for row in rows) >= 0
    libraries, claims, free = (
        [row[headroom.BANDS.index(name)] for row in rows] for name in ("libraries", "headroom", "free")
    )
    assert max(libraries) > min(libraries), "the backward's library took its memory"
    assert max(claims) > LIBRARY_BYTES, "the room for it was kept until then"
    assert headroom._filled(trace)[-1] < headroom.LEFT_FREE + (2 << 20) < max(free)
