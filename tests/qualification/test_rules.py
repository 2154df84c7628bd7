import hashlib
from importlib import import_module
from pathlib import Path

import pytest

from qualification.criteria.observation import Observation
from qualification.execution.receipt import REQUIRED
from qualification.records import Ground, Verdict
from qualification.rules import RulesError, judged_workloads, load_rules, parse_rules, shipped_rules
from qualification.verdict import Direction, fold

TEXT = """
format = 1
name = "small"
description = "for a test"
[freshness]
days = 3
[approvals]
people = 2
valid_days = 7
[[workloads]]
name = "full_step"
ground = "native"
[[workloads.criteria]]
name = "backwards"
direction = "equal"
value = 18
unit = "backwards"
shortfall = "INCOMPLETE"
[[workloads.criteria]]
name = "forecast_error"
direction = "at_most"
value = "2.5"
unit = "percent"
[probes]
process = ["processes", "nvml"]
"""


def test_a_document_is_read_and_known_by_the_digest_of_its_bytes() -> None:
    document = parse_rules(TEXT.encode(), "small", {"full_step"})
    assert document.sha256 == hashlib.sha256(TEXT.encode()).hexdigest()
    (workload,) = document.rules.workloads
    assert (workload.ground, workload.label) == (Ground.NATIVE, "full_step on native")
    assert [threshold.direction for threshold in workload.criteria] == [Direction.EQUAL, Direction.AT_MOST]
    assert workload.criteria[0].shortfall is Verdict.INCOMPLETE
    assert document.rules.probes == {"process": ("processes", "nvml")}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"full_step"', '"full_stop"', "workload 'full_stop' is not known; known: full_step"),
        ("people = 2", "peoples = 2", "unknown field `peoples`"),
        ("people = 2", "people = 0", ">= 1"),
        ("people = 2", "people = true", "Expected `int`, got `bool`"),
        ("days = 3", "days = 3.5", "Expected `int`, got `float`"),
        ('"native"', '"metal"', "Invalid enum value 'metal'"),
        ('"at_most"', '"below"', "Invalid enum value 'below'"),
        ('"2.5"', "2.5", "got `float`"),
        ('"2.5"', '"two"', "value of forecast_error of full_step on native is no decimal figure: 'two'"),
        ('"forecast_error"', '"backwards"', "criteria of full_step on native: 'backwards' is listed twice"),
        ('unit = "percent"', "", "missing required field `unit`"),
        ('unit = "percent"', 'unit = "percent"\nplausible_to = 1', "outside its own plausible range"),
        ('"INCOMPLETE"', '"PASSED"', "may not be PASSED"),
        ('["processes", "nvml"]', '["nvml", "nvml"]', "probes of process: 'nvml' is listed twice"),
        (
            'ground = "native"',
            'ground = "native"\nparameters = {update = 3}',
            "parameter update is not known to workload full_step",
        ),
        ("format = 1", "format = 2", "Invalid enum value 2"),
        ("format = 1", "format = ", "Invalid value"),
    ],
)
def test_a_document_with_a_mistake_is_refused_at_load(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(RulesError) as refused:
        parse_rules(TEXT.replace(old, new).encode(), "small", {"full_step"})
    assert message in str(refused.value)
    assert str(refused.value).startswith("rules small: ")
    assert "\n" not in str(refused.value)


def test_the_same_workload_twice_on_one_ground_is_refused_and_on_two_grounds_is_not() -> None:
    again = '[[workloads]]\nname = "full_step"\nground = "{}"\n[probes]'
    with pytest.raises(RulesError, match="'full_step on native' is listed twice"):
        parse_rules(TEXT.replace("[probes]", again.format("native")).encode(), "small", {"full_step"})
    both = parse_rules(TEXT.replace("[probes]", again.format("rehearsal")).encode(), "small", {"full_step"})
    assert len(both.rules.workloads) == 2


def test_what_is_no_text_or_no_file_or_no_name_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(RulesError, match="cannot be read"):
        load_rules(tmp_path / "absent.toml")
    with pytest.raises(RulesError, match="no gate rules are named 'lenient'; known: "):
        load_rules("lenient")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(RulesError, match=r"binary\.toml: "):
        load_rules(binary)


def test_every_shipped_document_loads_and_requires_native_evidence() -> None:
    assert "standard" in shipped_rules()
    for name in shipped_rules():
        rules = load_rules(name).rules
        assert rules.name == name
        assert {workload.ground for workload in rules.workloads} == {Ground.NATIVE}
        assert {workload.name for workload in rules.workloads} <= judged_workloads()


def test_every_figure_that_shipped_rules_ask_for_is_one_that_the_judge_gives_in_that_unit() -> None:
    for name in shipped_rules():
        for workload in load_rules(name).rules.workloads:
            judge = import_module(f"qualification.criteria.{workload.name}").judge
            nothing = Observation(
                workload=workload.name, ground=workload.ground, exit_code=None, timed_out=False, events=()
            )
            given = {(criterion.name, criterion.unit) for criterion in judge(nothing)}
            assert {(threshold.name, threshold.unit) for threshold in workload.criteria} <= given
            assert fold(judge(nothing)) is not Verdict.PASSED


def test_every_probe_that_shipped_rules_ask_for_is_one_that_a_receipt_holds() -> None:
    for name in shipped_rules():
        for probes in load_rules(name).rules.probes.values():
            assert {"processes", "lease"} <= set(probes) <= set(REQUIRED)
