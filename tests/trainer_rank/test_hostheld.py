"""Graphs in host memory are exact and counted, within a measured budget; without host memory a rerun does the work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.trainer_rank.test_rank import WIDE, _Bench, _loss, _requests
from trainer_rank import sampling
from trainer_rank.hostheld import HostStore

LADDER = ("whole", "host-held", "rerun")
TIGHT = 51 << 20


@pytest.fixture
def bench() -> Iterator[Callable[..., _Bench]]:
    made: list[_Bench] = []

    def make(**options: Any) -> _Bench:
        made.append(_Bench(len(made), **options))
        return made[-1]

    yield make
    for each in made:
        each.rank.close()
        each.device.close()


def _memory(monkeypatch: pytest.MonkeyPatch, size: int | None) -> None:
    """The hardware's edge: how much host memory there is."""
    monkeypatch.setattr(sampling, "available_host_memory", lambda: size)


@pytest.mark.parametrize("available", [0, None, 1000])
def test_without_host_memory_a_rerun_does_the_same_work(
    bench: Callable[..., _Bench], monkeypatch: pytest.MonkeyPatch, available: int | None
) -> None:
    _memory(monkeypatch, available)
    requests = _requests([300] * 12)
    roomy, tight = bench(ladder=("whole",), **WIDE), bench(ladder=LADDER, room=TIGHT, **WIDE)
    expected, found = roomy.train(requests), tight.train(requests)
    assert tight.of("forecast")[0]["rung"] == "rerun"
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-5)
    assert tight.device.out_of_memory_count() == 0


def test_the_share_of_the_policy_bounds_what_graphs_take(
    bench: Callable[..., _Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    ladder = ("whole", "host-held")
    found = bench(ladder=ladder, room=TIGHT, host_per_million=500_000, **WIDE)
    _memory(monkeypatch, 1 << 34)
    iterator = found.rank.forward_micro_batches(_requests([300] * 12))
    micro_batch = next(iterator)
    demand, run = micro_batch.choice.demand, micro_batch._run
    assert micro_batch.choice.decision.rung == "host-held"
    assert micro_batch.choice.budget.host == 1 << 33
    assert demand is not None
    assert run is not None
    assert 0 < run.host_bytes <= demand.host < 1.1 * run.host_bytes
    found.rank.backward(micro_batch, _loss(micro_batch.outputs))
    iterator.close()
    _memory(monkeypatch, 2 * demand.host - 2)
    narrow = list(found.rank.forward_micro_batches(_requests([300] * 6)))
    assert {each.choice.decision.rung for each in narrow} <= {"whole", "host-held"}
    with pytest.raises(Exception, match="refused"):
        next(found.rank.forward_micro_batches(_requests([300] * 12)))


def test_what_is_saved_comes_back_exactly_and_small_or_frozen_tensors_stay(bench: Callable[..., _Bench]) -> None:
    device = bench().device.torch_device
    source = torch.randn(64, 64, generator=torch.Generator().manual_seed(2)).to(device)
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(3)).to(device)
    gradients = []
    stores = [None, HostStore()]
    for store in stores:
        rows = source.clone().requires_grad_()
        with store.hooks() if store is not None else torch.enable_grad():
            total = ((rows * 2) @ weight).exp().sum()
        total.backward()
        assert rows.grad is not None
        gradients.append(rows.grad.cpu())
    assert torch.equal(*gradients)
    held = stores[1]
    assert held is not None
    assert held.bytes == 64 * 64 * 4, "the exponential's result alone: weights are frozen, leaves stay"
