"""An event that cannot be read as it was sent leaves no verdict but INCOMPLETE, and names the place."""

from pathlib import Path

import pytest

from qualification.criteria.observation import Observation
from qualification.criteria.thresholds import malformed
from qualification.records import Ground, Verdict
from tests.qualification.criteria.stamping import stamp


def _observation(line: str, folder: Path) -> Observation:
    lines = ['{"event":"start"}', line, '{"event":"end"}']
    return Observation("full_step", Ground.REHEARSAL, 0, False, stamp(lines, folder))


@pytest.mark.parametrize(
    ("value", "said"),
    [("NaN", "is NaN"), ("Infinity", "is infinite"), ("-Infinity", "is infinite"), ("1e999", "is infinite")],
)
def test_a_value_that_is_no_finite_number_is_incomplete_wherever_it_stands(
    value: str, said: str, tmp_path: Path
) -> None:
    line = '{"event":"optimizer","slots":{"policy":{"gradient_norm":' + value + '}},"list":[1]}'
    found = malformed(_observation(line, tmp_path))
    assert found is not None
    assert (found.verdict, found.measured) == (Verdict.INCOMPLETE, 1)
    assert f"event 1 (optimizer) has slots.policy.gradient_norm, which {said}" in (found.reason or "")


def test_a_key_given_twice_and_a_line_that_is_no_object_are_incomplete(tmp_path: Path) -> None:
    for line, said in (
        ('{"event":"loss","value":[{"a":1,"a":2}]}', "event 1 (loss) has value[0].a, which is given twice"),
        ("Traceback", "event 1 (of no kind) is not JSON"),
        ("[1]", "event 1 (of no kind) is not a JSON object"),
        ('{"event":"loss","value":1', "event 1 (of no kind) is not JSON"),
    ):
        found = malformed(_observation(line, tmp_path))
        assert found is not None
        assert found.verdict is Verdict.INCOMPLETE
        assert said in (found.reason or "")


@pytest.mark.parametrize("value", ["null", '"12"', "true", "-1.5", "[]", "{}"])
def test_values_that_are_well_formed_are_left_to_the_criterion_that_reads_them(value: str, tmp_path: Path) -> None:
    assert malformed(_observation('{"event":"loss","value":' + value + "}", tmp_path)) is None
