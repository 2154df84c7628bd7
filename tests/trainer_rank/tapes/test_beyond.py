"""Plans outside what was probed: more sequences, sizes that stopped falling, and plans smaller than every probe."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.trainer_rank.tapes.programs import Step, record, rows
from trainer_rank.allocator.trace import Trace
from trainer_rank.tapes import Status, fit
from trainer_rank.tapes.check import compare


def step_of(lengths: tuple[int, ...]) -> Trace:
    """Record a pass whose caller keeps one small tensor for each sequence until the pass ends."""
    features = {"packed_tokens": sum(lengths), "tokens": sum(lengths), "sequences": len(lengths)}
    kept = [Step(f"loss {index}", lambda _: 4) for index in range(len(lengths))]
    freed = [Step(death=f"loss {index}") for index in range(len(lengths))]
    forward = [Step(stage="forward"), Step("hidden", rows(8)), Step(stage="caller")]
    return record([*forward, *kept, Step(stage="backward"), *freed, Step(death="hidden")], features)


@pytest.mark.parametrize("probes", [((9,), (9,) * 8), ((9,) * 8,)])
def test_sequences_beyond_the_probes_widen_the_bound(probes: tuple[tuple[int, ...], ...]) -> None:
    """Every sequence may keep what one more of the probes took."""
    tape = fit([step_of(tuple(each * scale for each in lengths)) for lengths in probes for scale in (1, 10, 100)])
    unseen = step_of((10,) * 400)
    compared = compare(tape, unseen)
    assert compared.forecast.status is Status.EXTRAPOLATED
    assert compared.allocated_error is not None and compared.allocated_error < -50
    assert compared.bound_holds
    bound = compared.forecast.bound
    assert bound is not None and bound.allocated < 2 * compared.observed.allocated


@pytest.mark.parametrize(("slope", "known"), [(8, True), (-8, False)])
def test_a_smaller_plan_takes_no_more_than_the_smallest_probe(slope: int, known: bool) -> None:
    """Where a growing size would fall below one byte its smallest recording bounds it; a shrinking one is unknown."""

    def passed(tokens: int) -> Trace:
        def size(features: Mapping[str, int]) -> int:
            return slope * features["packed_tokens"] + (-800 if slope > 0 else 8000)

        features = {"packed_tokens": tokens, "tokens": tokens}
        return record([Step("scratch", size), Step("rows", rows(64)), Step(death="scratch")], features)

    tape = fit([passed(200), passed(400), passed(800)])
    unseen = record([Step("rows", rows(64))], {"packed_tokens": 50 if known else 2000, "tokens": 50})
    made = compare(tape, unseen).forecast
    if not known:
        assert made.status is Status.UNKNOWN
        return
    assert made.status is Status.EXTRAPOLATED
    assert made.expected is not None and made.expected.allocated == 1024 + 3584


@pytest.mark.parametrize("feature", ["sequences", "adapter_bytes"])
def test_a_plan_that_states_more_than_any_probe_is_not_covered(feature: str) -> None:
    """Probes that state no adapters and no sequences say nothing of a plan that has them."""
    tape = fit([record([Step("rows", rows(64))], {"packed_tokens": tokens}) for tokens in (100, 200, 300)])
    unseen = record([Step("rows", rows(64))], {"packed_tokens": 150, feature: 3})
    made = compare(tape, unseen).forecast
    assert made.status is Status.EXTRAPOLATED
    assert made.notes == (f"{feature} 3: no probe states its own",)
