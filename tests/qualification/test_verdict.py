from decimal import Decimal
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qualification.figures import read_figure
from qualification.records import Basis, Criterion, Verdict
from qualification.verdict import Direction, Threshold, compare, fold, worst

ERROR = Threshold(name="forecast_error", direction=Direction.AT_MOST, value="2.5", unit="percent")
BACKWARDS = Threshold(
    name="backwards", direction=Direction.EQUAL, value=18, unit="backwards", shortfall=Verdict.INCOMPLETE
)
SPEED = Threshold(name="speed", direction=Direction.AT_LEAST, value="0.97", unit="ratio", plausible_to=4)


@pytest.mark.parametrize(
    ("threshold", "measured", "verdict"),
    [
        (ERROR, "2.5", Verdict.PASSED),
        (ERROR, "2.500000001", Verdict.FAILED),
        (ERROR, -3, Verdict.PASSED),
        (BACKWARDS, 18, Verdict.PASSED),
        (BACKWARDS, 0, Verdict.INCOMPLETE),
        (BACKWARDS, 19, Verdict.INCOMPLETE),
        (SPEED, "0.97", Verdict.PASSED),
        (SPEED, "0.9699", Verdict.FAILED),
        (SPEED, 40, Verdict.INCONCLUSIVE),
        (SPEED, None, Verdict.INCOMPLETE),
    ],
)
def test_a_figure_is_judged_exactly(threshold: Threshold, measured: int | str | None, verdict: Verdict) -> None:
    criterion = compare(threshold, measured)
    assert (criterion.verdict, criterion.measured, criterion.threshold) == (verdict, measured, threshold.value)
    assert (criterion.reason is None) == (verdict is Verdict.PASSED)


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("raw", [float("nan"), float("inf"), float("-inf"), None, "12", True])
def test_an_unreadable_figure_is_incomplete_in_every_direction(direction: Direction, raw: object) -> None:
    criterion = compare(Threshold(name="loss", direction=direction, value=12, unit="nats"), read_figure(raw))
    assert criterion.verdict is Verdict.INCOMPLETE
    assert criterion.measured is None
    assert criterion.reason is not None
    assert criterion.reason.startswith("loss is ")


def test_the_reason_names_figure_unit_and_bound() -> None:
    assert compare(ERROR, 3, reason="in step 2").reason == (
        "forecast_error is 3 percent, must be at most 2.5; in step 2"
    )


def _criterion(name: str, verdict: Verdict, basis: Basis = Basis.MEASURED) -> Criterion:
    return Criterion(name=name, verdict=verdict, basis=basis)


def test_folding_takes_the_worst_in_the_stated_order() -> None:
    order = (Verdict.FAILED, Verdict.INCOMPLETE, Verdict.INCONCLUSIVE, Verdict.PASSED)
    for pair in product(order, repeat=2):
        assert fold([_criterion("a", pair[0]), _criterion("b", pair[1])]) is min(pair, key=order.index)
        assert worst(pair) is min(pair, key=order.index)


def test_nothing_a_repeated_name_or_a_claim_cannot_pass() -> None:
    passed = _criterion("a", Verdict.PASSED)
    assert fold([passed]) is Verdict.PASSED
    assert fold([]) is Verdict.INCOMPLETE
    assert fold([passed, passed]) is Verdict.INCOMPLETE
    assert fold([_criterion("a", Verdict.PASSED, Basis.CLAIMED)]) is Verdict.INCOMPLETE
    assert fold([_criterion("a", Verdict.FAILED, Basis.CLAIMED)]) is Verdict.FAILED


@given(st.integers(-1000, 1000), st.integers(-1000, 1000))
def test_directions_agree_with_arithmetic(measured: int, value: int) -> None:
    for direction, holds in (
        (Direction.AT_MOST, measured <= value),
        (Direction.AT_LEAST, measured >= value),
        (Direction.EQUAL, measured == value),
    ):
        assert Threshold(name="x", direction=direction, value=value, unit="y").holds(Decimal(measured)) is holds
