"""The reference model on a real card: the numbers of the host, and nothing left behind."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.trainer_rank.models.batches import HOST, gradients, packed
from trainer_rank.devices.cuda import CudaDevice
from trainer_rank.models.reference import SMALL, TINY, build_reference

pytestmark = pytest.mark.gpu
LENGTHS = [300, 1, 17, 640, 66]


@pytest.fixture
def cuda() -> Iterator[CudaDevice]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; run on a GPU host")
    device = CudaDevice()
    gc.collect()
    yield device


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.1)])
def test_outputs_and_gradients_equal_the_hosts(dtype: torch.dtype, tolerance: float, cuda: CudaDevice) -> None:
    results = []
    for device in (HOST, cuda):
        reference = build_reference(TINY, device, rank=4, dtype=dtype if device is cuda else torch.float32)
        batch = packed(LENGTHS, TINY, device.torch_device)
        outputs = reference.forward(batch, slot="policy", gradients=True).log_probabilities
        outputs.mean().backward()
        results.append((outputs.detach().cpu(), gradients(reference)))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=0, atol=tolerance)
    for name, expected in results[0][1].items():
        error = (results[1][1][name].float() - expected).norm() / expected.norm()
        assert error < 10 * tolerance, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_linear_in_the_tokens_and_all_of_it_returns(dtype: torch.dtype, cuda: CudaDevice) -> None:
    reference = build_reference(SMALL, cuda, rank=1, dropout=0.1, dtype=dtype)
    baseline = cuda.allocated()
    peaks = []
    for tokens in (8192, 16384, 32768):
        for _ in range(2):
            cuda.reset_peaks()
            batch = packed([tokens], SMALL, cuda.torch_device)
            reference.forward(batch, slot="policy", gradients=True).log_probabilities.sum().backward()
            for parameter in reference.adapter_parameters("policy").values():
                parameter.grad = None
        peaks.append(cuda.peak_allocated() - baseline)
        del batch
    assert peaks[2] - peaks[1] < 2.2 * (peaks[1] - peaks[0])
    assert cuda.allocated() - baseline <= 64 << 20
    reference.close()


def test_equal_runs_are_equal_bit_for_bit(cuda: CudaDevice) -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        reference = build_reference(SMALL, cuda, rank=4, dropout=0.1, dtype=torch.bfloat16)
        batch = packed(LENGTHS, SMALL, cuda.torch_device)
        outputs = reference.forward(batch, slot="policy", gradients=True).log_probabilities
        outputs.sum().backward()
        found.append(outputs.detach().cpu())
    assert torch.equal(found[0], found[1])


def test_the_virtual_device_and_the_card_live_in_one_process(cuda: CudaDevice) -> None:
    from trainer_rank.devices.virtual import VirtualDevice

    virtual = VirtualDevice("h200")
    leaf = torch.ones(100, device=virtual.torch_device, requires_grad=True)
    (leaf * 2).cpu().to(cuda.torch_device).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2] * 100
    virtual.close()
