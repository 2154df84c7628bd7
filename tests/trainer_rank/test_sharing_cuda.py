"""Shared prefixes on a real card: the results of the host and of separate runs, and forecasts that hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.trainer_rank.models.batches import HOST, gradients, packed
from trainer_rank.devices.cuda import CudaDevice
from trainer_rank.models.protocol import PackedBatch
from trainer_rank.models.reference import SMALL, TINY, build_reference
from trainer_rank.policies import load_policy
from trainer_rank.rank import TrainerRank
from trainer_rank.requests import Request

pytestmark = pytest.mark.gpu
LENGTHS, PARENTS = [300, 17, 1, 640, 66, 90, 5], (-1, 0, 0, -1, 3, 4, 4)


@pytest.fixture
def cuda() -> CudaDevice:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; run on a GPU host")
    return CudaDevice()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.1)])
def test_outputs_and_gradients_equal_the_hosts(dtype: torch.dtype, tolerance: float, cuda: CudaDevice) -> None:
    results = []
    for device in (HOST, cuda):
        reference = build_reference(TINY, device, rank=4, dtype=dtype if device is cuda else torch.float32)
        plain = packed(LENGTHS, TINY, device.torch_device)
        batch = PackedBatch(plain.tokens, plain.targets, plain.lengths, plain.boundaries, PARENTS)
        outputs = reference.forward(batch, slot="policy", gradients=True).log_probabilities
        outputs.mean().backward()
        results.append((outputs.detach().cpu(), gradients(reference)))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=0, atol=tolerance)
    for name, expected in results[0][1].items():
        error = (results[1][1][name].float() - expected).norm() / expected.norm()
        assert error < 10 * tolerance, name


def _families() -> list[Request]:
    """Three prompts of 50, 180 and 700 tokens with six continuations each."""
    generator = torch.Generator().manual_seed(21)
    found = []
    for prompt in (50, 180, 700):
        start = torch.randint(0, SMALL.vocabulary, (prompt,), generator=generator)
        for length in (3, 40, 90, 200, 310, 11):
            tail = torch.randint(0, SMALL.vocabulary, (length,), generator=generator)
            tokens = torch.cat([start, tail])
            found.append(Request(tokens[:-1], tokens[1:], group="families"))
    return found


def _outputs(rank: TrainerRank, requests: list[Request]) -> list[torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    for micro_batch in rank.forward_micro_batches(requests):
        losses = [each.log_probabilities.sum() for each in micro_batch.outputs.values()]
        rank.backward(micro_batch, -torch.stack(losses).sum())
        found |= {index: each.log_probabilities.detach().cpu() for index, each in micro_batch.outputs.items()}
    return [found[index] for index in range(len(requests))]


def test_families_run_once_with_the_results_of_separate_runs(cuda: CudaDevice) -> None:
    events: list[Mapping[str, Any]] = []
    reference = build_reference(SMALL, cuda, rank=4, dtype=torch.float32)
    probes = ((16,), (500, 400, 60), (900, 800, 700, 600, 300, 40, 9) * 3, (333, 120, 64, 25))
    policy = replace(load_policy("forecast"), probe_lengths=probes)
    rank, requests = TrainerRank(reference, policy, on_event=events.append), _families()
    _outputs(rank, requests)
    rank.discard_gradients()
    events.clear()
    together = _outputs(rank, requests)
    (forecast,) = [each for each in events if each["event"] == "forecast"]
    (observed,) = [each for each in events if each["event"] == "observed"]
    shared = gradients(reference)
    rank.discard_gradients()
    apart = [_outputs(rank, [each])[0] for each in requests]
    for ours, theirs in zip(together, apart, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)
    for name, expected in gradients(reference).items():
        assert (shared[name] - expected).norm() < 1e-2 * expected.norm(), name
    logical = sum(each.tokens.shape[0] for each in requests)
    assert sum(forecast["packed_tokens"]) == logical - 5 * (49 + 179 + 699)  # targets differ where continuations begin
    assert observed["peak_allocated"] <= forecast["bound_allocated"]
    assert observed["peak_reserved"] <= forecast["bound_reserved"]
    grown = observed["peak_allocated"] - cuda.allocated()
    assert abs(forecast["peak_allocated"] - observed["peak_allocated"]) < 0.02 * grown
    rank.close()
