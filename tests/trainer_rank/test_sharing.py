"""Requests that begin alike run once where they do, with the results and gradients of separate runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.trainer_rank.test_rank import _Bench
from trainer_rank.forecasting import PlanForecaster
from trainer_rank.models.reference import TINY
from trainer_rank.requests import Request


def _family(lengths: list[int], prompt: int, slot: str = "policy") -> list[Request]:
    """Continuations of one prompt, each of its own length; the first request is the prompt alone."""
    generator = torch.Generator().manual_seed(21)
    start = torch.randint(0, TINY.vocabulary, (prompt,), generator=generator)
    tails = [torch.randint(0, TINY.vocabulary, (length + 1,), generator=generator) for length in lengths]
    sequences = [start, *(torch.cat([start, tail]) for tail in tails)]
    return [Request(each[:-1], each[1:], slot, group="family") for each in sequences]


@pytest.fixture
def pair() -> Iterator[tuple[_Bench, _Bench]]:
    shared, apart = _Bench(11, ladder=("whole", "split", "rerun")), _Bench(12)
    type(apart.model).shares_prefixes = property(lambda model: model.device.name == "virtual:11")  # type: ignore[assignment,method-assign]
    yield shared, apart
    for each in (shared, apart):
        each.rank.close()
        each.device.close()


@pytest.fixture(autouse=True)
def _timed_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the layout of the fewest rows be the cheapest: what probes took on a busy machine may say another."""
    monkeypatch.setattr(PlanForecaster, "cost_ns", lambda _, plan: sum(plan.packed_tokens))


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    from trainer_rank.models.reference import ReferenceModel

    before = ReferenceModel.shares_prefixes
    yield
    ReferenceModel.shares_prefixes = before  # type: ignore[method-assign]


def test_shared_execution_equals_separate_execution(pair: tuple[_Bench, _Bench]) -> None:
    shared, apart = pair
    requests = [*_family([12, 30, 7], 40), *_family([9], 25, "adversary")]
    first, second = shared.train(requests), apart.train(requests)
    for index, request in enumerate(requests):
        assert first[index].shape == request.tokens.shape
        assert torch.allclose(first[index], second[index], atol=1e-5)
    for slot in ("policy", "adversary"):
        parameters = zip(*(each.model.adapter_parameters(slot).items() for each in pair), strict=True)
        for (name, ours), (_, theirs) in parameters:
            assert ours.grad is not None
            assert theirs.grad is not None
            assert torch.allclose(ours.grad.cpu(), theirs.grad.cpu(), atol=1e-4, rtol=1e-3), name
    logical = sum(request.tokens.shape[0] for request in requests)
    (forecast,), (plain,) = shared.of("forecast"), apart.of("forecast")
    assert sum(plain["packed_tokens"]) == logical
    assert sum(forecast["packed_tokens"]) == logical - 3 * 39 - 24
    observed = shared.of("observed")[0]
    assert observed["peak_allocated"] <= forecast["bound_allocated"]
    assert abs(forecast["peak_allocated"] - observed["peak_allocated"]) < 0.01 * observed["peak_allocated"]


def test_memory_of_copied_outputs_is_forecast_too(pair: tuple[_Bench, _Bench]) -> None:
    shared, _ = pair
    requests = [replace(each, hidden=True) for each in _family([5] * 40, 100)]
    shared.train(requests)
    (forecast,), (observed,) = shared.of("forecast"), shared.of("observed")
    assert sum(forecast["packed_tokens"]) < 400
    copied = sum(each.tokens.shape[0] for each in requests) * TINY.hidden * 4
    assert observed["peak_allocated"] <= forecast["bound_allocated"]
    assert abs(forecast["peak_allocated"] - observed["peak_allocated"]) < copied // 20


def test_equal_requests_run_once_and_each_gets_its_outputs(pair: tuple[_Bench, _Bench]) -> None:
    shared, _ = pair
    twice = [*_family([5], 10)[1:], *_family([5], 10)[1:]]
    outputs = shared.train(twice)
    assert torch.equal(outputs[0], outputs[1])
    assert sum(shared.of("forecast")[0]["packed_tokens"]) == twice[0].tokens.shape[0]


def test_a_split_keeps_relatives_together(pair: tuple[_Bench, _Bench]) -> None:
    from trainer_rank.execution import KEY_BYTES, prefix_keys
    from trainer_rank.packing import balanced, slot_groups
    from trainer_rank.prefixes import find_prefixes
    from trainer_rank.requests import shapes_of

    families = [*_family([6, 6, 6], 50)[1:]]
    torch.manual_seed(0)
    for _ in range(3):
        tokens = torch.cat([torch.arange(100, 150), torch.randint(0, 9, (7,))])
        families.append(Request(tokens[:-1], tokens[1:], group="family"))
    mixed = [families[each] for each in (0, 3, 1, 4, 2, 5)]
    prefixes = find_prefixes(prefix_keys(dict(enumerate(mixed))), KEY_BYTES)
    (group,) = slot_groups(shapes_of(mixed, ("policy",)), prefixes)
    assert {part.indices for part in balanced(group, 2)} == {(0, 2, 4), (1, 3, 5)}
    assert sum(part.packed_tokens for part in balanced(group, 2)) == group.packed_tokens


def test_rerun_of_shared_prefixes_equals_whole(tmp_path: Path) -> None:
    found = set()
    for index, ladder in enumerate((("whole",), ("rerun",))):
        bench = _Bench(13 + index, ladder=ladder)
        outputs = bench.train(_family([12, 30], 20))
        found.add((bench.gradients(), b"".join(each.numpy().tobytes() for each in outputs)))
        bench.rank.close()
        bench.device.close()
    assert len(found) == 1
