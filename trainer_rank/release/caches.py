"""Give unused cached memory back to the driver, and measure what that did: which caches shrank, by how much, how long.

``torch.cuda.empty_cache`` walks the caches of every device of the process; its C++ argument selects a memory pool, not
a device. One device's cache alone can be emptied all the same: an allocation that the device's cap refuses makes that
device's allocator, and no other, return its unused segments and ask again. Both ways set the device as current, wait
for it, and restore the caller's device and stream. Neither can return a part of what is unused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING

import torch

from trainer_rank.allocator.rules import SMALL_SEGMENT
from trainer_rank.allocator.settings import unsupported_settings
from trainer_rank.allocator.snapshot import INACTIVE, Snapshot
from trainer_rank.errors import UnsupportedError
from trainer_rank.policies import Scope

if TYPE_CHECKING:
    from trainer_rank.devices.protocol import Device

_SIDE_STREAMS, _MEASURED = 32, 3


@dataclass(frozen=True)
class Released:
    """What one release did. ``shrunk``: bytes returned by device name, every device of the process, zeros included.

    ``segments``: how many of the selected device were unused before; ``nanoseconds`` of all of it, waiting included.
    """

    selected: str
    scope: Scope
    shrunk: Mapping[str, int]
    segments: int
    nanoseconds: int

    @property
    def returned(self) -> int:
        """Bytes that the selected device returned."""
        return self.shrunk[self.selected]


def without_unused(snapshot: Snapshot) -> Snapshot:
    """Return what a release would leave: the segments with a block in use."""
    return Snapshot(tuple(each for each in snapshot.segments if any(block.state != INACTIVE for block in each.blocks)))


def release(device: Device, scope: Scope = Scope.PROCESS, environment: Mapping[str, str] = os.environ) -> Released:
    """Return unused cached segments of ``device`` (``scope`` DEVICE) or of all devices of the process.

    Raises UnsupportedError under expandable segments and every other allocator setting that the model does not cover:
    there a release with another device current has unmapped live memory (PyTorch issue 196258).
    """
    if settings := unsupported_settings(environment):
        raise UnsupportedError(f"no cache release under {', '.join(settings)}; unset it")
    begun = perf_counter_ns()
    before = device.process_reserved()
    found = device.snapshot()
    segments = len(found.segments) - len(without_unused(found).segments)
    with device.activate():
        device.synchronize()
        if scope is Scope.PROCESS:
            device.empty_cache()
        elif segments:
            _empty_alone(device)
    after = device.process_reserved()
    shrunk = {name: held - after.get(name, held) for name, held in before.items()}
    return Released(device.name, scope, shrunk, segments, perf_counter_ns() - begun)


def segment_nanoseconds(device: Device) -> int | None:
    """Measure what one fresh segment costs: the refill of a release is paid in these. Leaves up to 6 MiB cached.

    The least of three, since the driver is slow once after a large release. None when every side stream had a cached
    block left, so that nothing could be measured.
    """
    found: list[int] = []
    for _ in range(_SIDE_STREAMS):
        with device.activate(), device.side_stream():
            before, begun = device.driver_allocations(), perf_counter_ns()
            torch.empty(1, dtype=torch.uint8, device=device.torch_device)
            spent = perf_counter_ns() - begun
        if device.driver_allocations() > before:
            found.append(spent)
        if len(found) == _MEASURED:
            break
    return min(found, default=None)


def _empty_alone(device: Device) -> None:
    """Have the device's own allocator return its cache: refuse it one small segment once, then let it have that."""
    caller = device.cap()
    try:
        for _ in range(_SIDE_STREAMS):
            before = device.driver_allocations()
            device.set_cap(device.reserved() + SMALL_SEGMENT // 2)
            with device.side_stream():
                torch.empty(1, dtype=torch.uint8, device=device.torch_device)
            if device.driver_allocations() > before:
                return
    finally:
        device.set_cap(caller)
