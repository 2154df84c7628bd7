"""The rules that ship need each of their workloads: missing, rehearsed or short in one figure, nothing is adopted."""

from __future__ import annotations

import msgspec
import pytest

from qualification.approvals import Weighed
from qualification.gate import Head, decide
from qualification.records import Basis, Criterion, Decision, Ground, Verdict, WorkloadResult
from qualification.rules import RequiredWorkload, load_rules, shipped_rules
from qualification.standing import assemble
from qualification.verdict import Threshold
from tests.qualification.test_standing import EVIDENCE, NOW, RECEIPT, RESULT, VERIFIED, probe

REQUIRED = [(name, required.name) for name in shipped_rules() for required in load_rules(name).rules.workloads]


def held(threshold: Threshold) -> Criterion:
    return Criterion(
        name=threshold.name,
        verdict=Verdict.PASSED,
        basis=Basis.RECOMPUTED,
        measured=threshold.value,
        unit=threshold.unit,
    )


def result(required: RequiredWorkload, **changes: object) -> WorkloadResult:
    given = msgspec.structs.replace(
        RESULT,
        workload=required.name,
        parameters=dict(required.parameters),
        criteria=tuple(held(threshold) for threshold in required.criteria) or RESULT.criteria,
    )
    return msgspec.structs.replace(given, **changes)


def ruled(name: str, results: list[WorkloadResult]) -> tuple[Decision, str, tuple[str, ...]]:
    document = load_rules(name)
    probes = tuple(probe(each) for each in document.rules.probes["process"])
    evidence = msgspec.structs.replace(
        EVIDENCE, results=tuple(results), receipts=(msgspec.structs.replace(RECEIPT, probes=probes),)
    )
    approved = Weighed(approved_by=("Ada",))
    found = assemble(evidence, document, VERIFIED, approved, head=Head.FIXED, superseded_by=None, now=NOW)
    ruling = decide(found)
    return ruling.decision, ruling.row, ruling.reasons


@pytest.mark.parametrize("name", shipped_rules())
def test_what_the_rules_ask_for_is_adopted(name: str) -> None:
    results = [result(required) for required in load_rules(name).rules.workloads]
    assert ruled(name, results)[:2] == (Decision.ADOPTED, "adopted")


@pytest.mark.parametrize(("name", "workload"), REQUIRED)
def test_without_one_workload_nothing_is_adopted(name: str, workload: str) -> None:
    rules = load_rules(name).rules
    others = [result(required) for required in rules.workloads if required.name != workload]
    (missing,) = [required for required in rules.workloads if required.name == workload]
    decision, row, reasons = ruled(name, others or [result(missing, ground=Ground.REHEARSAL)])
    assert (decision, row) == (Decision.HELD, "incomplete" if others else "rehearsal")
    assert any(workload in reason for reason in reasons)
    rehearsed = result(missing, ground=Ground.REHEARSAL)
    assert ruled(name, [*others, rehearsed])[:2] == (Decision.HELD, "rehearsal")
    for place in range(len(missing.criteria)):
        short = [
            msgspec.structs.replace(each, measured=None) if index == place else each
            for index, each in enumerate(result(missing).criteria)
        ]
        assert ruled(name, [*others, result(missing, criteria=tuple(short))])[:2] == (Decision.HELD, "incomplete")


def test_adoption_rests_on_releases_under_pressure_in_matched_arms_beside_a_device_and_on_a_cold_admission() -> None:
    names = {required.name for required in load_rules("adoption").rules.workloads}
    assert {"full_step", "throughput", "pressure", "release_vs_observe", "device_release", "ballast"} <= names
