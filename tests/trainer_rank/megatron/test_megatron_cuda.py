"""The Megatron model on a real card: adapters by rank, repeats under a seed, and a batch that is memorised."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from bench.native.batches import packed_batch
from bench.native.learning import LENGTHS, Pass, difference, memorise, one_pass, wake
from bench.native.lora import adapters, uneven_ends
from bench.native.megatron import built, without_hooks
from trainer_rank.devices.cuda import CudaDevice
from trainer_rank.errors import UnsupportedError
from trainer_rank.models.adapters import Adapters
from trainer_rank.models.megatron.block import require_megatron
from trainer_rank.models.megatron.runtime import MegatronRuntime

pytestmark = pytest.mark.gpu
BOUND = 0.01
"""Largest difference of a repeated gradient, as a share of its norm, where a kernel adds in no fixed order."""


@pytest.fixture(scope="module")
def cuda() -> CudaDevice:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; run on a GPU host")
    return CudaDevice(0)


@pytest.fixture(scope="module")
def runtime(cuda: CudaDevice) -> Iterator[MegatronRuntime]:
    try:
        require_megatron()
    except UnsupportedError as error:
        pytest.skip(str(error))
    with built(cuda, 4) as model:
        wake(model)
        yield model


def grouped(given: Adapters, rows: torch.Tensor, base: torch.Tensor, ends: torch.Tensor) -> list[torch.Tensor]:
    result = given.add_grouped("map", rows, base, ends)
    result.backward(torch.ones_like(result))
    return [result.detach(), rows.grad, *(each.grad for each in given.parameters().values())]  # type: ignore[list-item]


def by_expert(given: Adapters, rows: torch.Tensor, base: torch.Tensor, ends: torch.Tensor) -> list[torch.Tensor]:
    """The same in float64, one expert after the other."""
    wide = rows.detach().double().requires_grad_()
    down, up = (side["map"].detach().double().requires_grad_() for side in (given.down, given.up))
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    parts = [part @ down[e].mT @ up[e] * given.settings.scale for e, part in enumerate(wide.split(counts))]
    result = base.double() + torch.cat(parts)
    result.backward(torch.ones_like(result))
    return [result.detach(), wide.grad, down.grad, up.grad]  # type: ignore[list-item]


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("rank", [1, 2, 8, 16])
def test_grouped_adapters_of_any_rank_agree_with_float64(rank: int) -> None:
    torch.manual_seed(rank)
    given = adapters(rank, 512, 1024, 256)
    rows = torch.randn(4096, 512, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    base = torch.randn(4096, 1024, dtype=torch.bfloat16, device="cuda")
    ends = uneven_ends(4096)
    for found, expected in zip(grouped(given, rows, base, ends), by_expert(given, rows, base, ends), strict=True):
        assert (found.double() - expected).norm() / expected.norm() < 0.01


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("rank", [1, 16])
def test_zero_adapters_change_nothing_on_the_card(rank: int) -> None:
    given = adapters(rank, 512, 1024, 256)
    with torch.no_grad():
        given.up["map"].zero_()
    rows = torch.randn(4096, 512, dtype=torch.bfloat16, device="cuda")
    base = torch.randn(4096, 1024, dtype=torch.bfloat16, device="cuda")
    assert torch.equal(given.add_grouped("map", rows, base, uneven_ends(4096)), base)


def assert_repeats(first: Pass, again: Pass) -> None:
    """Outputs equal bit for bit; gradients too, or their first difference in backward order is named and bounded."""
    found = difference(first, again)
    assert found["outputs"] == 0
    shares = found["gradients"]
    if shares:
        warnings.warn(f"{len(shares)} of {found['of']} gradients differ, first {next(iter(shares))}", stacklevel=2)
    assert max(shares.values(), default=0.0) < BOUND, shares


def test_equal_passes_repeat(runtime: MegatronRuntime) -> None:
    assert_repeats(one_pass(runtime), one_pass(runtime))


def test_zero_adapters_give_the_base_models_outputs(runtime: MegatronRuntime) -> None:
    with torch.no_grad():
        for name, parameter in runtime.adapter_parameters("adversary").items():
            assert not name.endswith(".up") or not parameter.any(), "an adapter adds nothing until it has trained"
    batch = packed_batch(LENGTHS, runtime.geometry.vocabulary, runtime.device.torch_device)
    adapted = runtime.forward(batch, slot="adversary", gradients=False).log_probabilities
    with without_hooks(runtime, dispatchers=False):
        base = runtime.forward(batch, slot="adversary", gradients=False).log_probabilities
    assert torch.equal(adapted, base)


def test_a_model_built_again_from_its_seed_repeats(runtime: MegatronRuntime, cuda: CudaDevice) -> None:
    first = one_pass(runtime)
    with built(cuda, 4) as again:
        wake(again)
        assert_repeats(first, one_pass(again))


def test_a_batch_is_memorised(runtime: MegatronRuntime) -> None:
    losses = memorise(runtime)
    assert all(torch.tensor(losses).isfinite())
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 0.05
