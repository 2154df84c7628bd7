import random
from fractions import Fraction
from itertools import product
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qualification.figures import Unreadable
from qualification.records import Verdict
from qualification.statistics import Measurement, compare_arms, interleaved, paired_ratio
from qualification.verdict import Direction, Threshold

SPEED = Threshold(
    name="speed", direction=Direction.AT_LEAST, value="0.97", unit="ratio", plausible_from="0.1", plausible_to=10
)


def measure(ratios: list[Fraction], base: int = 1_000_000) -> list[Measurement]:
    """Interleaved measurements whose pairs have these ratios of B to A."""
    taken = []
    for index, ratio in enumerate(ratios):
        both = [Measurement(arm="A", value=base), Measurement(arm="B", value=int(base * ratio))]
        taken += both if index % 2 == 0 else both[::-1]
    return taken


def test_the_order_is_a_b_b_a() -> None:
    assert interleaved(5) == "ABBAABBAAB"


def test_the_interval_is_the_exact_distribution_of_the_resampled_median() -> None:
    ratios = [Fraction(value, 100) for value in (90, 95, 100, 104, 110)]
    interval = paired_ratio(measure(ratios), confidence=Fraction(8, 10))
    assert not isinstance(interval, Unreadable)
    medians = sorted(median(sample) for sample in product(ratios, repeat=5))
    assert interval.median == Fraction(1)
    assert interval.low == medians[-(-len(medians) // 10) - 1]
    assert interval.high == medians[-(-len(medians) * 9 // 10) - 1]


def test_the_interval_holds_the_true_ratio_about_as_often_as_stated() -> None:
    source = random.Random(11)
    hits = 0
    for _ in range(300):
        drawn = measure([Fraction(source.gauss(1, 0.05)).limit_denominator(10**5) for _ in range(9)])
        interval = paired_ratio(drawn)
        assert not isinstance(interval, Unreadable)
        hits += interval.low <= 1 <= interval.high
    assert hits >= 270


@given(st.lists(st.integers(1, 400), min_size=5, max_size=12))
def test_the_interval_encloses_the_median_and_never_changes(percents: list[int]) -> None:
    taken = measure([Fraction(percent, 100) for percent in percents])
    interval = paired_ratio(taken)
    assert not isinstance(interval, Unreadable)
    assert interval.low <= interval.median <= interval.high
    assert interval == paired_ratio(taken)


@pytest.mark.parametrize(
    ("percents", "verdict"),
    [
        ((99, 100, 101, 100, 102), Verdict.PASSED),
        ((80, 82, 81, 85, 83), Verdict.FAILED),
        ((80, 99, 98, 100, 101), Verdict.INCONCLUSIVE),
        ((4000, 4000, 4100, 3900, 4000), Verdict.INCONCLUSIVE),
        ((1, 1, 1, 1, 1), Verdict.INCONCLUSIVE),
        ((100, 100, 100), Verdict.INCOMPLETE),
        ((0, 0, 0, 0, 0), Verdict.INCOMPLETE),
    ],
)
def test_only_a_whole_interval_on_one_side_decides(percents: tuple[int, ...], verdict: Verdict) -> None:
    criterion = compare_arms(SPEED, measure([Fraction(percent, 100) for percent in percents]))
    assert criterion.verdict is verdict
    assert criterion.reason
    if verdict is not Verdict.INCOMPLETE:
        assert criterion.measured == f"{sorted(percents)[2] / 100:.6f}"


def test_a_figure_that_must_be_small_is_judged_from_above() -> None:
    cost = Threshold(name="cost", direction=Direction.AT_MOST, value="1.05", unit="ratio")
    assert compare_arms(cost, measure([Fraction(101, 100)] * 5)).verdict is Verdict.PASSED
    assert compare_arms(cost, measure([Fraction(110, 100)] * 5)).verdict is Verdict.FAILED


def test_measurements_that_were_not_interleaved_are_incomplete() -> None:
    taken = sorted(measure([Fraction(1)] * 5), key=lambda measurement: measurement.arm)
    criterion = compare_arms(SPEED, taken)
    assert criterion.verdict is Verdict.INCOMPLETE
    assert criterion.reason == "speed was measured in the order AAAAABBBBB, not ABBAABBAAB"
