"""Prices of plans from real recordings: less work is never live in more bytes, and what is unknown stays unknown."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer_rank.test_rank import _Bench, _requests
from trainer_rank.admission.ladder import LADDER, Plan, plans
from trainer_rank.admission.planner import choose
from trainer_rank.forecasting import PlanForecaster
from trainer_rank.packing import Work, slot_groups, units
from trainer_rank.requests import RequestShape

SLOTS = ("policy", "adversary")
WORK = st.lists(
    st.tuples(st.integers(1, 150), st.sampled_from(SLOTS), st.booleans(), st.booleans()), min_size=1, max_size=9
)


@pytest.fixture(scope="module")
def forecaster() -> Iterator[PlanForecaster]:
    """Sees a device where passes of one slot that keep their graph, and those without one, were recorded."""
    bench = _Bench(61, ladder=("whole",))
    bench.train(_requests([20, 9], slots=SLOTS))
    bench.rank._sampler._budget()
    found = bench.rank._sampler.forecaster
    if found is None:
        bench.rank._sampler._sample.snapshot  # type: ignore[union-attr] # noqa: B018 - reads the blocks
        found = bench.rank._sampler.forecaster
    assert found is not None
    yield found
    bench.rank.close()
    bench.device.close()


def _shapes(drawn: list[tuple[int, str, bool, bool]]) -> list[RequestShape]:
    return [RequestShape(index, length, slot, True, "g") for index, (length, slot, _, _) in enumerate(drawn)]


@given(WORK)
@settings(deadline=None, max_examples=60)
def test_a_subset_is_never_live_in_more_than_its_superset(
    forecaster: PlanForecaster, drawn: list[tuple[int, str, bool, bool]]
) -> None:
    everything = _shapes(drawn)
    part = [shape for shape, (_, _, kept, _) in zip(everything, drawn, strict=True) if kept] or everything[:1]
    large, small = (Plan("whole", slot_groups(shapes)) for shapes in (everything, part))
    assert (forecaster.least(small) or 0) <= (forecaster.least(large) or 0)
    least, demand = forecaster.least(large), forecaster.demand(large)
    assert least is not None
    assert demand.required is not None
    assert least <= demand.required
    assert (forecaster.demand(small).bound_allocated or 0) <= (demand.bound_allocated or 0)


@given(WORK)
@settings(deadline=None, max_examples=60)
def test_a_finer_cut_is_never_live_in_more(
    forecaster: PlanForecaster, drawn: list[tuple[int, str, bool, bool]]
) -> None:
    work = Work(slot_groups(_shapes(drawn)))
    leasts = [forecaster.least(plan) for rung in LADDER[:2] for plan in plans(rung, work)]
    assert None not in leasts
    assert leasts == sorted(leasts, reverse=True)  # type: ignore[type-var]


@given(WORK)
@settings(deadline=None, max_examples=30)
def test_no_cut_loses_what_decides_its_price(
    forecaster: PlanForecaster, drawn: list[tuple[int, str, bool, bool]]
) -> None:
    shapes = _shapes(drawn)
    for rung in LADDER:
        for plan in plans(rung, Work(slot_groups(shapes))):
            keys = {forecaster._library.key(each, plan.retention) for each in plan.subforwards}
            whole = {forecaster._library.key(each, plan.retention) for each in slot_groups(shapes)}
            assert keys == whole
            demand = forecaster.demand(plan)
            known = keys <= forecaster._library.recorded.keys()
            assert demand.known is known
            if not known:
                assert (demand.required, forecaster.least(plan)) == (None, None)
                assert demand.uncovered


def test_what_was_never_recorded_is_unknown_at_every_width(forecaster: PlanForecaster) -> None:
    from trainer_rank.admission.budget import Budget
    from trainer_rank.admission.decide import Outcome

    pending = units([RequestShape(index, 5, hidden=True) for index in range(4)])
    choice = choose(pending, LADDER, forecaster, Budget(forecaster.sample.ordinal, 1 << 40, 1 << 40))
    assert choice.plan is None
    assert choice.decision.outcome is Outcome.UNKNOWN
