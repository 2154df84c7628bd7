"""A virtual card runs out of memory where a real one would, and gives everything back."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from trainer_rank.devices import open_device
from trainer_rank.devices.cards import Card, Outside
from trainer_rank.devices.virtual import VirtualDevice
from trainer_rank.devices.virtual_memory import LibraryDemand
from trainer_rank.errors import InvalidInputError, UnsupportedError

MIB = 1 << 20


def small_card(capacity: int = 64 * MIB, backward: int = 0) -> Card:
    outside = [Outside("context", 4 * MIB, "made for this test")]
    if backward:
        outside.append(Outside("first_backward", 4 * MIB + backward, "made for this test"))
    return Card("small", "made for this test", capacity, "made for this test", tuple(outside))


@pytest.fixture
def small() -> Iterator[VirtualDevice]:
    device = VirtualDevice(small_card())
    yield device
    device.close()


def test_figures_follow_births_and_deaths(small: VirtualDevice) -> None:
    assert small.memory_info() == (60 * MIB, 64 * MIB)
    tensor = torch.ones(1000, device=small.torch_device)
    large = torch.empty(3 * MIB, dtype=torch.uint8, device=small.torch_device)
    assert small.allocated() == 4096 + 3 * MIB
    assert small.reserved() == 2 * MIB + 20 * MIB
    assert small.memory_info().free == 38 * MIB
    assert [(segment.total, segment.pool) for segment in small.snapshot().segments] == [
        (20 * MIB, "large"),
        (2 * MIB, "small"),
    ]
    del tensor, large
    assert small.allocated() == 0
    assert small.reserved() == 22 * MIB
    assert small.empty_cache() == 22 * MIB
    assert small.memory_info().free == 60 * MIB
    assert small.peak_allocated() == 4096 + 3 * MIB
    small.reset_peaks()
    assert small.peak_allocated() == small.peak_reserved() == 0


def test_a_magnified_storage_is_charged_so_many_times_its_size_and_given_back_whole() -> None:
    device = VirtualDevice(small_card(), 1, magnification=1024)
    tensor = torch.ones(1000, device=device.torch_device)
    assert device.allocated() == 4000 * 1024
    assert device.reserved() == 20 * MIB
    del tensor
    assert (device.allocated(), device.empty_cache()) == (0, 20 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 16, dtype=torch.uint8, device=device.torch_device)
    device.close()
    with pytest.raises(InvalidInputError, match="magnification is 0"):
        VirtualDevice(small_card(), 1, magnification=0)


def test_out_of_memory_reads_as_pytorchs_own(small: VirtualDevice) -> None:
    held = torch.empty(30 * MIB, dtype=torch.uint8, device=small.torch_device)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(40 * MIB, dtype=torch.uint8, device=small.torch_device)
    assert str(caught.value) == (
        "CUDA out of memory. Tried to allocate 40.00 MiB. GPU 0 has a total capacity of 64.00 MiB of which 30.00 MiB "
        "is free. Including non-PyTorch memory, this process has 34.00 MiB memory in use. Of the allocated memory "
        "30.00 MiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated."
    )
    assert small.out_of_memory_count() == 1
    assert small.allocator_retries() == 1
    assert held.numel() == small.allocated()


def test_more_than_the_host_has_is_out_of_memory_where_the_card_has_no_room_either(virtual: VirtualDevice) -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 16777216\.00 GiB\. GPU 0 has"):
        torch.empty(1 << 54, dtype=torch.uint8, device=virtual.torch_device)
    column = torch.ones(1 << 30, 1, dtype=torch.uint8, device=virtual.torch_device)[: 1 << 20]
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        column.expand(-1, 1 << 34).contiguous()
    assert virtual.out_of_memory_count() == 2
    roomy = VirtualDevice("h200", 1, capacity=1 << 60)
    with pytest.raises(UnsupportedError, match="virtual:1 has room for 18014398509481984 B, but the host"):
        torch.empty(1 << 54, dtype=torch.uint8, device=roomy.torch_device)
    assert roomy.allocated() == 0
    roomy.close()


@pytest.mark.parametrize("where", ["forward", "backward", "recompute"])
def test_out_of_memory_anywhere_unwinds_and_a_smaller_step_follows(where: str) -> None:
    device = VirtualDevice(small_card(400 * MIB))
    weight = torch.full((256, 256), 0.01, device=device.torch_device, requires_grad=True)
    baseline = device.allocated()

    def layer(inputs: torch.Tensor) -> torch.Tensor:
        if where == "recompute" and torch._C._current_graph_task_id() != -1:
            torch.empty(400 * MIB, dtype=torch.uint8, device=device.torch_device)
        return (inputs @ weight).tanh()

    def step(rows: int) -> None:
        inputs = torch.ones(rows, 256, device=device.torch_device)
        outputs = checkpoint(layer, inputs, use_reentrant=False)
        if where == "backward":
            outputs.register_hook(lambda gradient: gradient.repeat(40, 40)[:rows, :256])
        outputs.sum().backward()

    def overrun() -> None:
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            step(500_000 if where == "forward" else 256)

    overrun()
    weight.grad = None
    gc.collect()
    assert device.allocated() == baseline
    assert device.out_of_memory_count() == 1
    where = "nowhere"
    step(256)
    assert weight.grad is not None
    weight.grad = None
    assert device.allocated() == baseline
    device.close()


def test_a_cap_is_met_by_the_allocator_and_named() -> None:
    device = VirtualDevice(small_card(100 * MIB), 1, memory_fraction=0.5)
    torch.empty(30 * MIB, dtype=torch.uint8, device=device.torch_device)
    torch.empty(45 * MIB, dtype=torch.uint8, device=device.torch_device)
    assert device.allocator_retries() == 1
    assert device.reserved() == 46 * MIB
    with pytest.raises(torch.OutOfMemoryError, match=r"50\.00 MiB allowed"):
        torch.empty(51 * MIB, dtype=torch.uint8, device=device.torch_device)
    device.close()


def product(device: VirtualDevice, backward: bool = False) -> None:
    left = torch.ones(8, 8, device=device.torch_device, requires_grad=backward)
    result = (left @ torch.ones(8, 8, device=device.torch_device)).sum()
    if backward:
        result.backward()


def test_library_demand_appears_with_its_phase_and_counts_as_used(virtual: VirtualDevice) -> None:
    card = virtual.card
    assert virtual.memory_info().free == card.capacity - card.held_outside("context")
    torch.ones(10, device=virtual.torch_device).sum().item()
    assert not virtual.library_bytes()
    product(virtual)
    assert virtual.memory_info().free + virtual.reserved() == card.capacity - card.held_outside("first_forward")
    product(virtual, backward=True)
    assert virtual.memory_info().free + virtual.reserved() == card.capacity - card.held_outside("first_backward")
    assert sum(virtual.library_bytes().values()) == card.held_outside("first_backward") - card.context


def test_the_first_backward_fails_as_cublas_does_when_the_cache_holds_everything() -> None:
    device = VirtualDevice(small_card(64 * MIB, backward=8 * MIB))
    torch.empty(54 * MIB, dtype=torch.uint8, device=device.torch_device)
    with pytest.raises(RuntimeError) as caught:
        product(device, backward=True)
    assert not isinstance(caught.value, torch.OutOfMemoryError)
    assert str(caught.value) == "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    assert device.empty_cache() >= 54 * MIB
    product(device, backward=True)
    device.close()


def test_a_communicator_built_anew_needs_its_memory_anew() -> None:
    demand = LibraryDemand("gradient norm reduction", "reduction", 8_388_608, "nccl")
    device = VirtualDevice(small_card(), demands=[demand])
    device.require("reduction")
    assert device.library_bytes() == {"gradient norm reduction": 8_388_608}
    device.require("reduction")
    assert device.memory_info().free == 52 * MIB
    assert device.give_up("reduction") == 8_388_608
    held = torch.empty(56 * MIB, dtype=torch.uint8, device=device.torch_device)
    with pytest.raises(torch.distributed.DistBackendError, match="Failed to CUDA malloc 8388608 bytes"):
        device.require("reduction")
    assert device.library_bytes() == {}
    del held
    device.empty_cache()
    device.require("reduction")
    assert device.memory_info().free == 52 * MIB
    device.close()


def test_raw_memory_and_other_processes_take_what_pytorch_cannot_have(small: VirtualDevice) -> None:
    small.take_raw(40 * MIB)
    small.set_elsewhere(10 * MIB)
    assert small.memory_info().free == 10 * MIB
    with pytest.raises(torch.OutOfMemoryError, match="this process has 44"):
        torch.empty(20 * MIB, dtype=torch.uint8, device=small.torch_device)
    with pytest.raises(torch.OutOfMemoryError, match="raw"):
        small.take_raw(11 * MIB)
    with pytest.raises(InvalidInputError, match="only 41943040 B"):
        small.give_back_raw(41 * MIB)
    small.give_back_raw(40 * MIB)
    assert torch.empty(20 * MIB, dtype=torch.uint8, device=small.torch_device).numel() == 20 * MIB


def test_a_release_trims_every_device_and_leaves_the_callers_place(
    virtual: VirtualDevice, second: VirtualDevice
) -> None:
    kept = [torch.full((1000,), 7.0, device=device.torch_device) for device in (virtual, second)]
    for device in (virtual, second):
        torch.empty(30 * MIB, dtype=torch.uint8, device=device.torch_device)
    with second.activate(), second.stream(3):
        assert virtual.empty_cache() == 30 * MIB
        assert virtual.reserved() == second.reserved() == 2 * MIB
        assert torch.empty(1, device="lazy").device == second.torch_device
        assert second.current_stream == 3
        assert virtual.current_stream == 0
    assert torch.empty(1, device="lazy").device == virtual.torch_device
    assert [tensor.sum().item() for tensor in kept] == [7000, 7000]


def test_streams_have_pools_of_their_own(small: VirtualDevice) -> None:
    torch.empty(3 * MIB, dtype=torch.uint8, device=small.torch_device)
    with small.stream(7):
        other = torch.empty(3 * MIB, dtype=torch.uint8, device=small.torch_device)
    assert small.reserved() == 40 * MIB
    assert sorted(segment.stream for segment in small.snapshot().segments) == [0, 7]
    del other
    torch.empty(3 * MIB, dtype=torch.uint8, device=small.torch_device)
    assert small.reserved() == 40 * MIB


def test_threads_share_a_card_without_losing_a_byte(small: VirtualDevice) -> None:
    def work() -> None:
        for size in range(1, 300):
            torch.ones(size, device=small.torch_device).mul_(2).sum().item()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert small.allocated() == 0


def test_garbage_collected_in_the_middle_of_an_allocation_is_counted_once(small: VirtualDevice) -> None:
    class Knot:
        def __init__(self) -> None:
            self.tensor = torch.ones(100, device=small.torch_device)
            self.me = self

    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(50):
            Knot()
            torch.ones(10, device=small.torch_device)
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert small.allocated() == 0


def test_devices_open_by_name_once() -> None:
    device = open_device("virtual:0", card="h200")
    assert device.name == "virtual:0"
    with pytest.raises(UnsupportedError, match="virtual:0 is already open"):
        open_device("virtual:0", card="h200")
    assert isinstance(device, VirtualDevice)
    device.close()
    for name in ("virtual", "gpu:0", "virtual:-1", "virtual:x"):
        with pytest.raises(InvalidInputError, match="not known"):
            open_device(name, card="h200")


def test_a_card_that_cannot_hold_its_context_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="cannot hold a context"):
        VirtualDevice("h200", elsewhere=150_000_000_000)
    with pytest.raises(InvalidInputError, match="memory fraction"):
        VirtualDevice("h200", memory_fraction=1.5)
