"""The real device's figures are those of torch.cuda, and its settings are checked before anything is planned."""

from __future__ import annotations

import pytest
import torch

from trainer_rank.allocator.trace import Event
from trainer_rank.devices.cuda import CudaDevice, _event, _positions
from trainer_rank.errors import UnsupportedError

MIB = 1 << 20


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_allocator_settings_that_are_not_modelled_are_refused_by_name(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "expandable_segments:True,max_split_size_mb:128")
    with pytest.raises(
        UnsupportedError, match=f"{variable}=expandable_segments:True, {variable}=max_split_size_mb:128"
    ):
        CudaDevice()


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="cuda:64 is not there: PyTorch sees"):
        CudaDevice(64)


def test_history_rows_become_events_and_marks_find_their_place() -> None:
    rows = [
        {"action": "segment_alloc", "addr": 10, "size": 2 * MIB, "stream": 0},
        {"action": "alloc", "addr": 10, "size": 100, "stream": 0},
        {"action": "alloc", "addr": 522, "size": 100, "stream": 0},
        {"action": "free_requested", "addr": 10, "size": 100, "stream": 0},
        {"action": "free_completed", "addr": 10, "size": 100, "stream": 0},
        {"action": "oom", "device_free": 77, "size": 900, "stream": 0},
    ]
    events = [_event(row) for row in rows]
    assert events[1] == Event("alloc", 10, 100, 0)
    assert events[5] == Event("oom", 77, 900, 0)
    assert _positions(events) == [0, 2, 3, 5]


@pytest.fixture
def cuda() -> CudaDevice:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; run on a GPU host")
    return CudaDevice()


@pytest.mark.gpu
def test_figures_are_those_of_torch(cuda: CudaDevice) -> None:
    cuda.empty_cache()
    cuda.reset_peaks()
    before = cuda.allocated()
    tensor = torch.empty(30 * MIB, dtype=torch.uint8, device=cuda.torch_device)
    assert cuda.allocated() - before == 30 * MIB
    assert cuda.peak_allocated() >= cuda.allocated()
    assert cuda.peak_allocated() == torch.cuda.max_memory_allocated(cuda.torch_device)
    assert cuda.peak_reserved() == torch.cuda.max_memory_reserved(cuda.torch_device)
    assert cuda.reserved() == cuda.snapshot().reserved
    assert cuda.allocated() == cuda.snapshot().allocated
    assert cuda.memory_info() == torch.cuda.mem_get_info(cuda.torch_device)
    assert cuda.card.capacity == cuda.memory_info().total
    del tensor
    assert cuda.empty_cache() >= 30 * MIB


@pytest.mark.gpu
def test_out_of_memory_is_counted_sighted_and_raised(cuda: CudaDevice) -> None:
    before, seen = cuda.out_of_memory_count(), []
    too_much = cuda.memory_info().total + 20 * MIB
    with cuda.watch_out_of_memory(seen.append), pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        torch.empty(too_much, dtype=torch.uint8, device=cuda.torch_device)
    assert cuda.out_of_memory_count() == before + 1
    assert len(seen) == 1
    assert seen[0].allocated == cuda.allocated()


@pytest.mark.gpu
def test_an_out_of_memory_is_in_the_recording(cuda: CudaDevice) -> None:
    with cuda.record() as recording, pytest.raises(torch.OutOfMemoryError):
        torch.empty(cuda.memory_info().total + 20 * MIB, dtype=torch.uint8, device=cuda.torch_device)
    assert [event.action for event in recording.trace().events][-1] == "oom"


@pytest.mark.gpu
def test_workspaces_that_a_product_left_can_be_dropped(cuda: CudaDevice) -> None:
    rows = torch.randn(256, 256, device=cuda.torch_device)
    before = cuda.allocated()
    product = rows @ rows
    del product
    cuda.synchronize()
    cuda.drop_workspaces()
    assert cuda.allocated() <= before
