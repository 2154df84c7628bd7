"""The planner takes the widest micro-batch that fits whole, else the cheapest rung for one unit."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_rank.admission.budget import Budget, Status, Term
from trainer_rank.admission.decide import Coverage, Demand, Outcome
from trainer_rank.admission.ladder import Plan, Retention, ladder, plans
from trainer_rank.admission.planner import Choice, Unit, choose
from trainer_rank.errors import UnsupportedError
from trainer_rank.packing import Work, slot_groups, units
from trainer_rank.prefixes import Prefixes
from trainer_rank.requests import RequestShape

RUNGS = ladder(["rerun", "whole", "split"])


@dataclass
class _Linear:
    """Retained bytes for every token, working bytes for the widest subforward; tapes reach ``covered`` tokens."""

    retained: int = 10
    working: int = 100
    covered: int = 1 << 60
    asked: list[Plan] = field(default_factory=list)

    def demand(self, plan: Plan) -> Demand:
        self.asked.append(plan)
        size, widest = self._size(plan), max(plan.packed_tokens)
        coverage = Coverage.COVERED if widest <= self.covered else Coverage.EXTRAPOLATED
        figures = (size,) * 6
        return Demand(7, coverage, *figures, terms=(Term("plan", size, Status.FITTED, "line"),))

    def _size(self, plan: Plan) -> int:
        widest, total = max(plan.packed_tokens), sum(plan.packed_tokens)
        kept = widest if plan.retention is Retention.RERUN else total
        return self.retained * kept + self.working * widest

    def least(self, plan: Plan) -> int | None:
        return max(0, self._size(plan) - 50)

    def cost_ns(self, plan: Plan) -> int:
        again = sum(plan.packed_tokens) if plan.retention is Retention.RERUN else 0
        return 3 * sum(plan.packed_tokens) + again + 50 * len(plan.subforwards)


def _requests(lengths: list[int], group: str | None = None) -> list[RequestShape]:
    return [RequestShape(index, length, group=group) for index, length in enumerate(lengths)]


def _budget(free: int) -> Budget:
    return Budget(7, free, 1 << 50)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=30), st.integers(0, 800_000))
def test_the_width_is_the_largest_that_fits(lengths: list[int], free: int) -> None:
    pending = units(_requests(lengths))
    choice = choose(pending, RUNGS, _Linear(), _budget(free))
    fitting = [n for n in range(1, len(lengths) + 1) if 110 * sum(lengths[:n]) <= free]
    if fitting:
        assert (choice.units, choice.decision.rung) == (fitting[-1], "whole")
    else:
        assert choice.units == 1
        assert choice.plan is None
        assert choice.decision.outcome is Outcome.REFUSED


@given(st.lists(st.integers(1, 200), min_size=1, max_size=30), st.integers(0, 800_000))
def test_a_group_that_does_not_fit_whole_takes_the_cheapest_rung_that_fits(lengths: list[int], free: int) -> None:
    (pending,) = units(_requests(lengths, group="pair"))
    forecaster = _Linear()
    choice = choose([pending], RUNGS, forecaster, _budget(free))
    every = [plan for rung in RUNGS for plan in plans(rung, Work(slot_groups(pending)))]
    fitting = [plan for plan in every if (forecaster.demand(plan).required or 0) <= free]
    if not fitting:
        assert choice.decision.outcome is Outcome.REFUSED
        assert choice.plan is None
        _follow(choice, pending, free)
        return
    assert choice.plan is not None
    assert sorted(index for part in choice.plan.indices for index in part) == list(range(len(lengths)))
    assert forecaster.cost_ns(choice.plan) == min(forecaster.cost_ns(plan) for plan in fitting)
    assert choice.demand is not None
    assert choice.demand.required == forecaster.demand(choice.plan).required


def _follow(choice: Choice, unit: Unit, free: int) -> None:
    """A refusal's remedy is true: the smaller piece that it names is admitted."""
    words = (choice.remedy or "").split()
    if words[0] == "give":
        smaller = unit[: int(words[3])]
    elif words[0] == "shorten":
        smaller = (replace(unit[0], length=int(words[-2])),)
    else:
        assert words[:3] == ["lower", "the", "claims"]
        smaller, free = (replace(unit[0], length=1),), free + int(words[4])
    assert choose([smaller], RUNGS, _Linear(), _budget(free)).plan is not None


def test_width_never_grows_past_what_the_tapes_cover() -> None:
    choice = choose(units(_requests([100] * 10)), RUNGS, _Linear(covered=450), _budget(1 << 40))
    assert choice.units == 4
    alone = choose(units(_requests([500])), RUNGS, _Linear(covered=450), _budget(1 << 40))
    assert (alone.units, alone.decision.outcome) == (1, Outcome.ADMITTED)


def test_rerun_is_found_when_nothing_that_retains_fits() -> None:
    pending = units(_requests([100] * 8, group="g"))
    choice = choose(pending, RUNGS, _Linear(retained=1000, working=10), _budget(150_000))
    assert choice.plan is not None
    assert choice.plan.retention is Retention.RERUN
    assert choice.decision.rung == "rerun"
    assert choice.decision.sample == 7


def test_few_forecasts_decide_among_many_requests() -> None:
    forecaster = _Linear()
    choose(units(_requests([7] * 10_000)), RUNGS, forecaster, _budget(110 * 7 * 6_000))
    assert len(forecaster.asked) <= 28


@dataclass
class _Exhaustive(_Linear):
    """The same, without a least, so that nothing is passed over."""

    def least(self, plan: Plan) -> None:  # type: ignore[override]
        return None


@given(
    st.lists(st.tuples(st.integers(1, 60), st.sampled_from("ab"), st.booleans()), min_size=1, max_size=12),
    st.integers(0, 60_000),
    st.booleans(),
    st.booleans(),
    st.integers(0, 300),
)
def test_what_is_passed_over_changes_no_decision(
    drawn: list[tuple[int, str, bool]], free: int, by_cost: bool, oversize: bool, retained: int
) -> None:
    shapes = [RequestShape(n, length, slot, gradients, "g") for n, (length, slot, gradients) in enumerate(drawn)]
    shared = [min(drawn[n - 1][0], drawn[n][0]) // 2 if n % 3 else 0 for n in range(len(drawn))]
    prefixes = Prefixes(tuple(range(len(drawn))), tuple(shared))
    found = [
        choose(units(shapes), RUNGS, forecaster, _budget(free), oversize=oversize, by_cost=by_cost, prefixes=prefixes)
        for forecaster in (_Linear(retained=retained), _Exhaustive(retained=retained))
    ]
    ours, every = found
    assert ours.plan == every.plan
    assert ours.decision == every.decision
    assert ours.remedy == every.remedy
    assert set(ours.candidates) <= set(every.candidates)


def test_a_long_ladder_is_climbed_with_few_forecasts() -> None:
    forecaster = _Linear(retained=1, working=1000)
    choice = choose(units(_requests([7] * 10_000, group="g")), RUNGS, forecaster, _budget(7 * 1000 * 3))
    assert choice.plan is not None
    assert len(choice.plan.subforwards) > 3000
    assert len(forecaster.asked) <= 8


@dataclass
class _Timed(_Linear):
    """Rows that are shared take twice as long."""

    def cost_ns(self, plan: Plan) -> int:
        return sum((20 if each.shares else 10) * each.packed_tokens for each in plan.subforwards)


@pytest.mark.parametrize(("sharing", "rows"), [(90, 120), (40, 300)])
def test_of_both_layouts_the_cheaper_that_fits_runs(sharing: int, rows: int) -> None:
    prefixes = Prefixes((0, 1, 2), (0, sharing, sharing))
    choice = choose(units(_requests([100] * 3)), RUNGS, _Timed(), _budget(1 << 40), prefixes=prefixes)
    assert choice.plan is not None
    assert sum(choice.plan.packed_tokens) == rows
    narrow = choose(units(_requests([100] * 3)), RUNGS, _Timed(), _budget(110 * 220), prefixes=prefixes)
    assert narrow.plan is not None
    assert sum(narrow.plan.packed_tokens) == 300 - 2 * sharing
    assert narrow.units == 3


def test_an_unknown_rung_is_refused_by_name() -> None:
    with pytest.raises(
        UnsupportedError, match="rung 'shrink' does not exist; choose of whole, split, host-held, rerun"
    ):
        ladder(["whole", "shrink"])
