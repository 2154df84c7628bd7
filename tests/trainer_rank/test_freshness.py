"""Every decision is made by the present budget, and nothing of the previous micro-batch is alive in it unasked."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from tests.trainer_rank.test_rank import WIDE, _Bench, _loss, _requests
from trainer_rank.errors import InvalidInputError

NARROW = 54 << 20
"""Room for one request of 300 tokens at a time."""


@pytest.fixture
def bench() -> Iterator[_Bench]:
    made = _Bench(3, room=NARROW, **WIDE)
    yield made
    made.rank.close()
    made.device.close()


def _allocated(bench: _Bench) -> list[int]:
    """Bytes that were live on the device when each forecast was made."""
    samples: list[Any] = bench.samples  # type: ignore[attr-defined]
    return [sample.snapshot.allocated for sample in samples]


def _sampled(bench: _Bench) -> None:
    """Note the sample of every decision."""
    bench.samples = []  # type: ignore[attr-defined]
    plain = bench.rank._sampler._budget

    def budget() -> Any:
        found = plain()
        bench.samples.append(found[1])  # type: ignore[attr-defined]
        return found

    bench.rank._sampler._budget = budget  # type: ignore[method-assign]


def test_outputs_are_gone_before_the_next_decision_even_where_their_mapping_is_kept(bench: _Bench) -> None:
    requests = _requests([300] * 6, group=None)
    bench.train(requests[:1])
    _sampled(bench)
    mappings = []
    for micro_batch in bench.rank.forward_micro_batches(requests):
        mappings.append(micro_batch.outputs)
    assert len(mappings) > 1
    assert len(set(_allocated(bench))) == 1, "each decision found the device as empty as the first"
    assert all(not mapping for mapping in mappings)


def test_outputs_that_are_held_are_counted_in_the_next_decision(bench: _Bench) -> None:
    requests = _requests([300] * 6, group=None)
    bench.train(requests[:1])
    _sampled(bench)
    iterator = bench.rank.forward_micro_batches(requests)
    first = next(iterator)
    first.hold()
    next(iterator)
    before, after = _allocated(bench)[0], _allocated(bench)[-1]
    assert after > before
    first.release()


def test_a_neighbour_that_takes_memory_between_two_micro_batches_narrows_the_second() -> None:
    bench = _Bench(4, room=NARROW + (taken := 146 << 20), **WIDE)
    iterator = bench.rank.forward_micro_batches(_requests([300] * 12, group=None))
    first = next(iterator)
    assert len(first.outputs) == 6, "as far as the probes reach"
    bench.rank.backward(first, _loss(first.outputs))
    bench.device.set_elsewhere(taken)
    second = next(iterator)
    free = [event["free"] for event in bench.of("forecast")]
    assert free[1] <= free[0] - taken
    assert len(second.outputs) < 6
    assert bench.device.out_of_memory_count() == 0
    bench.rank.close()
    bench.device.close()


def test_every_decision_has_a_sample_of_its_own(bench: _Bench) -> None:
    bench.train(_requests([300] * 6, group=None))
    samples = [event["sample"] for event in bench.of("forecast")]
    assert len(samples) == len(set(samples)) > 1
    assert samples == sorted(samples)


def test_an_iterator_that_is_dropped_late_leaves_the_outputs_of_the_next_one(bench: _Bench) -> None:
    early = bench.rank.forward_micro_batches(_requests([20]))
    first = next(early)
    late = bench.rank.forward_micro_batches(_requests([30]))
    second = next(late)
    with pytest.raises(InvalidInputError, match="outputs of micro-batch 0 were released"):
        _ = first.outputs
    del early
    gc.collect()
    bench.rank.backward(second, _loss(second.outputs))
