"""On a real card: one device's cache is emptied alone, the caller's place stays, and reports say what happened."""

from __future__ import annotations

import pytest
import torch

from trainer_rank.allocator.replay import replay
from trainer_rank.devices.cuda import CudaDevice
from trainer_rank.events import Announcer
from trainer_rank.policies import Scope, load_policy
from trainer_rank.release.caches import release, segment_nanoseconds, without_unused
from trainer_rank.release.headroom import Headroom

MIB = 1 << 20
pytestmark = pytest.mark.gpu


@pytest.fixture
def cuda() -> CudaDevice:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; run on a GPU host")
    device = CudaDevice()
    device.empty_cache()
    return device


@pytest.mark.parametrize("scope", Scope)
def test_a_release_returns_what_was_unused_and_restores_the_callers_place(cuda: CudaDevice, scope: Scope) -> None:
    kept = torch.full((1000,), 3.0, device=cuda.torch_device)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    kept.sum().item()  # the first streams and kernels take driver memory that no release returns
    torch.empty(64 * MIB, dtype=torch.uint8, device=cuda.torch_device)
    unused = cuda.reserved() - without_unused(cuda.snapshot()).reserved
    failures, free = cuda.out_of_memory_count(), cuda.memory_info().free
    with torch.cuda.stream(stream):
        done = release(cuda, scope)
        assert cuda.current_stream == stream.cuda_stream
    assert unused - 2 * MIB <= done.returned <= unused
    assert cuda.memory_info().free - free >= 60 * MIB
    assert cuda.out_of_memory_count() == failures
    assert cuda.cap() is None
    assert kept.sum().item() == 3000


@pytest.mark.parametrize("scope", Scope)
def test_the_allocator_model_replays_a_release_to_the_byte(cuda: CudaDevice, scope: Scope) -> None:
    with cuda.record() as recording:
        kept = [torch.empty(size * MIB, dtype=torch.uint8, device=cuda.torch_device) for size in (30, 64, 5)]
        del kept[1]
        done = release(cuda, scope)
        kept.append(torch.empty(40 * MIB, dtype=torch.uint8, device=cuda.torch_device))
    result = replay(recording.trace())
    assert done.returned >= 60 * MIB
    assert result.exact, result.divergence
    assert len(kept) == 3


def test_a_headroom_takes_the_streams_memory_before_it_is_short(cuda: CudaDevice) -> None:
    Headroom(cuda, load_policy("forecast"), Announcer(lambda _: None))
    torch.empty(64 * MIB, dtype=torch.uint8, device=cuda.torch_device)
    free, reserved = cuda.memory_info().free, cuda.reserved()
    done = release(cuda, Scope.DEVICE)
    assert (segment_nanoseconds(cuda) or 0) > 0
    assert done.returned > 60 * MIB
    assert cuda.memory_info().free - free >= reserved - cuda.reserved()


def test_a_fresh_segment_is_timed_at_the_driver(cuda: CudaDevice) -> None:
    before = cuda.driver_allocations()
    assert (segment_nanoseconds(cuda) or 0) > 1000
    assert cuda.driver_allocations() == before + 3


def test_a_cap_is_met_by_the_allocator(cuda: CudaDevice) -> None:
    cuda.set_cap(cuda.reserved() + 100 * MIB)
    try:
        torch.empty(90 * MIB, dtype=torch.uint8, device=cuda.torch_device)
        torch.empty(95 * MIB, dtype=torch.uint8, device=cuda.torch_device)
        with pytest.raises(torch.OutOfMemoryError, match="allowed"):
            torch.empty(200 * MIB, dtype=torch.uint8, device=cuda.torch_device)
    finally:
        cuda.set_cap(None)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices; run on a host with two")
def test_the_other_devices_cache_is_left_alone_or_trimmed_as_the_scope_says() -> None:
    first, second = CudaDevice(0), CudaDevice(1)
    for scope, expected in ((Scope.DEVICE, 0), (Scope.PROCESS, 64 * MIB)):
        first.empty_cache()
        for device in (first, second):
            torch.empty(64 * MIB, dtype=torch.uint8, device=device.torch_device)
        with second.activate():
            done = release(first, scope)
            assert torch.cuda.current_device() == 1
        assert done.shrunk["cuda:1"] == expected
        assert done.shrunk["cuda:0"] >= 60 * MIB


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices; run on a host with two")
def test_two_devices_are_recorded_at_once() -> None:
    devices = CudaDevice(0), CudaDevice(1)
    with devices[0].record() as first:
        torch.empty(30 * MIB, dtype=torch.uint8, device=devices[0].torch_device)
        with devices[1].record() as second:
            for device in devices:
                torch.empty(50 * MIB, dtype=torch.uint8, device=device.torch_device)
        torch.empty(70 * MIB, dtype=torch.uint8, device=devices[0].torch_device)
    sizes = [[each.size for each in one.trace().events if each.action == "alloc"] for one in (first, second)]
    assert sizes == [[30 * MIB, 50 * MIB, 70 * MIB], [50 * MIB]]
    assert all(replay(each.trace()).exact for each in (first, second))
