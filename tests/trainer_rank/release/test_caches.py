"""A release trims what its scope says, declares what shrank, and leaves values, current device and streams alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from trainer_rank.devices.cards import Card, Outside
from trainer_rank.devices.virtual import VirtualDevice
from trainer_rank.errors import UnsupportedError
from trainer_rank.policies import Scope
from trainer_rank.release.caches import release, segment_nanoseconds, without_unused

MIB = 1 << 20
SMALL = Card("small", "made for this test", 200 * MIB, "made for this test", (Outside("context", 4 * MIB, "here"),))


@pytest.fixture
def two() -> Iterator[tuple[VirtualDevice, VirtualDevice]]:
    devices = VirtualDevice(SMALL, 0), VirtualDevice(SMALL, 1)
    yield devices
    for device in devices:
        device.close()


def cached(device: VirtualDevice, *sizes: int) -> None:
    for tensor in [torch.empty(size * MIB, dtype=torch.uint8, device=device.torch_device) for size in sizes]:
        del tensor


@pytest.mark.parametrize(("scope", "other"), [(Scope.PROCESS, 30 * MIB), (Scope.DEVICE, 0)])
def test_what_shrank_is_declared_and_nothing_else_changes(
    two: tuple[VirtualDevice, VirtualDevice], scope: Scope, other: int
) -> None:
    kept = [torch.full((1000,), 3.0, device=each.torch_device, requires_grad=True) for each in two]
    for tensor in kept:
        (tensor * tensor).sum().backward()
    for device in two:
        cached(device, 30)
    with two[1].activate(), two[1].stream(7):
        done = release(two[0], scope)
        assert torch.empty(1, device="lazy").device == two[1].torch_device
        assert two[1].current_stream == 7
        assert two[0].current_stream == 0
    assert done.shrunk == {"virtual:0": 30 * MIB if scope is Scope.PROCESS else 28 * MIB, "virtual:1": other}
    assert (done.returned, done.segments) == (done.shrunk["virtual:0"], 1)
    assert done.nanoseconds > 0
    assert [(tensor.sum().item(), tensor.grad.sum().item()) for tensor in kept if tensor.grad is not None] == [
        (3000, 6000)
    ] * 2
    assert two[0].cap() is None


def test_one_device_is_trimmed_again_and_again_without_an_out_of_memory(
    two: tuple[VirtualDevice, VirtualDevice],
) -> None:
    for _ in range(40):
        cached(two[0], 20, 40)
        before = two[0].reserved()
        assert release(two[0], Scope.DEVICE).returned >= 60 * MIB - 2 * MIB
        assert two[0].reserved() <= before - 58 * MIB
    assert two[0].out_of_memory_count() == 0
    assert release(two[1], Scope.DEVICE).shrunk == {"virtual:0": 0, "virtual:1": 0}
    assert two[1].out_of_memory_count() == 0


def test_a_callers_cap_survives_a_release(two: tuple[VirtualDevice, VirtualDevice]) -> None:
    two[0].set_cap(100 * MIB)
    cached(two[0], 30)
    release(two[0], Scope.DEVICE)
    assert two[0].cap() == 100 * MIB


@pytest.mark.parametrize("scope", Scope)
def test_no_release_under_expandable_segments(two: tuple[VirtualDevice, VirtualDevice], scope: Scope) -> None:
    cached(two[0], 30)
    with pytest.raises(UnsupportedError, match="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"):
        release(two[0], scope, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    assert two[0].reserved() == 30 * MIB


def test_the_snapshot_without_unused_segments_is_what_a_release_leaves(
    two: tuple[VirtualDevice, VirtualDevice],
) -> None:
    kept = torch.ones(3 * MIB, dtype=torch.uint8, device=two[0].torch_device)
    cached(two[0], 30, 5)
    foreseen = without_unused(two[0].snapshot())
    release(two[0])
    assert two[0].snapshot() == foreseen
    assert kept.sum().item() == 3 * MIB


def test_a_fresh_segment_is_timed_at_the_driver(two: tuple[VirtualDevice, VirtualDevice]) -> None:
    before = two[0].driver_allocations()
    assert (segment_nanoseconds(two[0]) or 0) > 0
    assert two[0].driver_allocations() == before + 3
