"""The decision is monotone: more demand, more claims or less knowledge never moves it towards admission."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_rank.admission.budget import Budget, Status, Term
from trainer_rank.admission.decide import Candidate, Coverage, Demand, Outcome, decide
from trainer_rank.errors import InvalidInputError, PlanningError

GIB = 1 << 30


def _demand(required: int | None, sample: int = 3, uncovered: tuple[str, ...] = ()) -> Demand:
    term = Term("retained", required, Status.UNKNOWN if required is None else Status.FITTED, "tape")
    coverage = Coverage.UNKNOWN if uncovered else Coverage.COVERED
    figures = (required,) * 6
    return Demand(sample, coverage, *figures, peak_stage="backward", terms=(term,), uncovered=uncovered)


def _candidates(count: int) -> tuple[Candidate, ...]:
    names = ("whole", "split", "rerun")
    return tuple(Candidate(index, names[min(index, 2)], ((0,),), (10,)) for index in range(count))


def _budget(free: int, claims: tuple[int | None, ...] = ()) -> Budget:
    terms = [
        Term(f"claim{index}", size, Status.UNKNOWN if size is None else Status.BOUNDED, "test")
        for index, size in enumerate(claims)
    ]
    return Budget(3, free, 1 << 50, tuple(terms))


demands = st.lists(
    st.builds(
        _demand,
        st.one_of(st.none(), st.integers(0, 1 << 40)),
        uncovered=st.sampled_from([(), (), (), ("optimizer",)]),
    ),
    min_size=1,
    max_size=6,
)
budgets = st.builds(_budget, st.integers(0, 1 << 40), st.lists(st.integers(0, 1 << 38), max_size=3).map(tuple))
_RANK = {Outcome.ADMITTED: 1, Outcome.UNKNOWN: 0, Outcome.REFUSED: 0}


@given(demands, budgets, st.data())
def test_less_room_or_knowledge_never_admits_more(forecasts: list[Demand], budget: Budget, data: st.DataObject) -> None:
    candidates = _candidates(len(forecasts))
    before = decide(forecasts, budget, candidates)
    index = data.draw(st.integers(0, len(forecasts) - 1))
    worse_demand = list(forecasts)
    required, uncovered = worse_demand[index].required, worse_demand[index].uncovered
    worse_demand[index] = data.draw(
        st.sampled_from(
            [
                _demand(None),
                _demand(required, uncovered=("head",)),
                _demand(None if required is None else required + data.draw(st.integers(0, GIB)), uncovered=uncovered),
            ]
        )
    )
    extra = Term("extra", data.draw(st.integers(0, GIB)), Status.MEASURED, "test")
    unknown = Term("extra", None, Status.UNKNOWN, "test")
    for forecasts_, budget_ in [
        (worse_demand, budget),
        (forecasts, replace(budget, claims=(*budget.claims, extra))),
        (forecasts, replace(budget, claims=(*budget.claims, unknown))),
        (forecasts, replace(budget, free=data.draw(st.integers(0, budget.free)))),
    ]:
        after = decide(forecasts_, budget_, candidates)
        assert _RANK[after.outcome] <= _RANK[before.outcome]
        if after.selected is not None and before.selected is not None and forecasts_ is forecasts:
            assert after.selected >= before.selected


@given(demands, budgets)
def test_what_is_admitted_fits_and_is_the_first_that_does(forecasts: list[Demand], budget: Budget) -> None:
    decision = decide(forecasts, budget, _candidates(len(forecasts)))
    available = budget.available
    assert available is not None
    fitting = [
        index
        for index, each in enumerate(forecasts)
        if each.known and each.required is not None and each.required <= available
    ]
    assert decision.selected == (fitting[0] if fitting else None)
    assert decision.sample == budget.sample
    if decision.outcome is Outcome.REFUSED:
        assert decision.shortfall is not None and decision.shortfall > 0
        assert decision.largest is not None


def test_the_budget_is_inclusive_and_claims_are_subtracted() -> None:
    assert decide([_demand(90)], _budget(100, (10,)), _candidates(1)).outcome is Outcome.ADMITTED
    refused = decide([_demand(91)], _budget(100, (10,)), _candidates(1))
    assert (refused.outcome, refused.shortfall, refused.available) == (Outcome.REFUSED, 1, 90)
    assert decide([_demand(0)], _budget(10, (11,)), _candidates(1)).outcome is Outcome.REFUSED


def test_an_unknown_candidate_is_passed_over_only_for_one_that_is_known_to_fit() -> None:
    budget = _budget(100)
    assert decide([_demand(None), _demand(50)], budget, _candidates(2)).selected == 1
    unknown = decide([_demand(None, uncovered=("expert LoRA",)), _demand(500)], budget, _candidates(2))
    assert unknown.outcome is Outcome.UNKNOWN
    assert "expert LoRA" in unknown.reason


def test_an_unknown_claim_admits_nothing_and_is_named() -> None:
    decision = decide([_demand(0)], _budget(100, (None,)), _candidates(1))
    assert (decision.outcome, decision.available) == (Outcome.UNKNOWN, None)
    assert "claim0" in decision.reason


def test_oversize_takes_the_smallest_excess_and_says_by_how_much() -> None:
    decision = decide([_demand(500), _demand(130), _demand(140)], _budget(100), _candidates(3), oversize=True)
    assert (decision.outcome, decision.selected, decision.shortfall) == (Outcome.ADMITTED_OVERSIZED, 1, 30)
    some = decide([_demand(500), _demand(None)], _budget(100), _candidates(2), oversize=True)
    assert (some.outcome, some.selected, some.shortfall) == (Outcome.ADMITTED_OVERSIZED, 0, 400)
    assert decide([_demand(None)], _budget(100), _candidates(1), oversize=True).outcome is Outcome.UNKNOWN


def test_a_forecast_of_an_earlier_sample_is_never_used() -> None:
    with pytest.raises(PlanningError, match="sample 2 cannot be judged by sample 3"):
        decide([_demand(1, sample=2)], _budget(100), _candidates(1))
    with pytest.raises(PlanningError, match="2 candidates with 1 forecasts"):
        decide([_demand(1)], _budget(100), _candidates(2))


def test_unknown_is_never_zero() -> None:
    with pytest.raises(InvalidInputError, match="unknown has no size"):
        Term("library", 0, Status.UNKNOWN, "nobody")
    with pytest.raises(InvalidInputError, match="unknown has no size"):
        Term("library", None, Status.MEASURED, "nobody")
    with pytest.raises(InvalidInputError, match="negative"):
        Term("library", -1, Status.MEASURED, "nobody")
    with pytest.raises(InvalidInputError, match="cannot be"):
        Budget(0, 11, 10)


def test_host_memory_is_a_budget_of_its_own() -> None:
    held = replace(_demand(50), host=1000)
    for host, expected in ((1000, Outcome.ADMITTED), (999, Outcome.REFUSED), (None, Outcome.REFUSED)):
        decision = decide([held], replace(_budget(100), host=host), _candidates(1))
        assert decision.outcome is expected
    refused = decide([held], replace(_budget(100), host=990), _candidates(1))
    assert "exceeds the budget by 10 B" in refused.reason
    assert decide([held, _demand(60)], _budget(100), _candidates(2)).selected == 1
