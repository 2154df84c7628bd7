"""The gate's table: exactly one row adopts, and taking away or spoiling any input never moves towards adopted."""

from itertools import combinations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qualification.gate import (
    CONDITIONS,
    Age,
    GateInputs,
    Head,
    ReceiptStanding,
    Source,
    WorkloadStanding,
    decide,
    flatten,
    unflatten,
)
from qualification.records import Decision, Ground, ReceiptStatus, Verdict

GOOD_WORKLOAD = WorkloadStanding(workload="full_step", ground=Ground.NATIVE, verdict=Verdict.PASSED, age=Age.FRESH)
GOOD_RECEIPT = ReceiptStanding(attempt=1, status=ReceiptStatus.CLEAN)
BARE = GateInputs(
    run="run-1",
    commit="c" * 40,
    policy="forecast",
    evidence_root="e" * 64,
    rules_sha256="f" * 64,
    decided_at="2026-11-30T22:00:00Z",
)
GOOD = msgspec.structs.replace(
    BARE,
    ledger_problems=(),
    covered=True,
    source=Source.EXACT,
    head=Head.CURRENT,
    workloads=(GOOD_WORKLOAD,),
    receipts=(GOOD_RECEIPT,),
    approved_by=("Ada",),
)
SPOILED: dict[str, tuple[Decision, dict[str, object]]] = {
    "tampered": (Decision.HELD, {"ledger_problems": ("entry 3 does not hash",)}),
    "workload_failed": (
        Decision.REJECTED,
        {"workloads": (msgspec.structs.replace(GOOD_WORKLOAD, verdict=Verdict.FAILED),)},
    ),
    "person_rejected": (Decision.REJECTED, {"rejected_by": ("Bo",)}),
    "unverified": (Decision.HELD, {"covered": False}),
    "unclean": (Decision.HELD, {"receipts": (ReceiptStanding(attempt=1, status=ReceiptStatus.DIRTY),)}),
    "nothing_required": (Decision.HELD, {"workloads": ()}),
    "rehearsal": (
        Decision.HELD,
        {"workloads": (WorkloadStanding(workload="a", ground=Ground.NATIVE, elsewhere=Verdict.PASSED),)},
    ),
    "incomplete": (
        Decision.HELD,
        {"workloads": (msgspec.structs.replace(GOOD_WORKLOAD, verdict=Verdict.INCOMPLETE),)},
    ),
    "inconclusive": (
        Decision.HELD,
        {"workloads": (msgspec.structs.replace(GOOD_WORKLOAD, verdict=Verdict.INCONCLUSIVE),)},
    ),
    "inexact_source": (Decision.HELD, {"source": Source.DIRTY}),
    "head_moved": (Decision.HELD, {"head": Head.MOVED}),
    "stale": (Decision.HELD, {"workloads": (msgspec.structs.replace(GOOD_WORKLOAD, age=Age.STALE),)}),
    "superseded": (Decision.HELD, {"superseded_by": "run-2"}),
    "person_held": (Decision.HELD, {"held_by": ("Cy",)}),
    "unapproved": (Decision.HELD, {"approved_by": ()}),
}
ORDER = tuple(SPOILED)


def spoil(*rows: str) -> GateInputs:
    inputs = GOOD
    for row in rows:
        inputs = msgspec.structs.replace(inputs, **SPOILED[row][1])
    return inputs


def test_the_good_case_adopts_and_says_so() -> None:
    ruling = decide(GOOD)
    assert (ruling.decision, ruling.row) == (Decision.ADOPTED, "adopted")


@pytest.mark.parametrize("row", ORDER)
def test_each_spoiled_input_gives_its_own_row_and_one_reason(row: str) -> None:
    ruling = decide(spoil(row))
    assert (ruling.decision, ruling.row) == (SPOILED[row][0], row)
    assert len(ruling.reasons) == 1


def test_the_rows_spoiled_here_are_all_the_rows_there_are() -> None:
    assert ORDER[3:] == tuple(row.name for row in CONDITIONS)


def test_the_first_matching_row_wins_over_every_later_one() -> None:
    about_workloads = {row for row in ORDER if "workloads" in SPOILED[row][1]}
    for first, second in combinations(ORDER, 2):
        if {first, second} <= about_workloads:
            continue  # one workload cannot have two verdicts; two workloads are combined below
        assert decide(spoil(second, first)).row == first


def test_several_workloads_are_each_looked_at_and_the_first_row_wins() -> None:
    about_workloads = [row for row in ORDER if SPOILED[row][1].get("workloads")]
    for first, second in combinations(about_workloads, 2):
        both = (*spoil(first).workloads, *spoil(second).workloads, GOOD_WORKLOAD)
        assert decide(msgspec.structs.replace(GOOD, workloads=both)).row == first


def every_workload(required: Ground) -> list[WorkloadStanding]:
    """All standings of one workload: 5 verdicts on the ground, 5 elsewhere, 3 ages."""
    verdicts = (None, *Verdict)
    return [
        WorkloadStanding(workload="full_step", ground=required, verdict=verdict, elsewhere=elsewhere, age=age)
        for verdict in verdicts
        for elsewhere in verdicts
        for age in Age
    ]


def every_input() -> list[GateInputs]:
    """The whole domain of the table: every value that an input may take, in every combination that matters alone."""
    workloads: list[tuple[WorkloadStanding, ...]] = [()]
    workloads += [(standing,) for ground in Ground for standing in every_workload(ground)]
    receipts = [(), *[(ReceiptStanding(attempt=1, status=status),) for status in (None, *ReceiptStatus)]]
    return [
        msgspec.structs.replace(
            BARE,
            ledger_problems=problems,
            covered=covered,
            source=source,
            head=head,
            superseded_by=newer,
            workloads=listed,
            receipts=proof,
            approved_by=approved,
            rejected_by=rejected,
            held_by=held,
        )
        for problems in (None, (), ("x",))
        for covered in (False, True)
        for source in (Source.EXACT, Source.UNKNOWN)
        for head in (Head.FIXED, Head.MOVED)
        for newer in (None, "run-2")
        for listed in workloads
        for proof in receipts
        for approved in ((), ("Ada",))
        for rejected in ((), ("Bo",))
        for held in ((), ("Cy",))
    ]


def test_exactly_one_combination_of_the_whole_domain_adopts_per_harmless_choice() -> None:
    adopted = [inputs for inputs in every_input() if decide(inputs).decision is Decision.ADOPTED]
    for inputs in adopted:
        assert inputs.ledger_problems == ()
        assert inputs.covered
        assert inputs.source is Source.EXACT
        assert inputs.head is Head.FIXED
        assert inputs.superseded_by is None
        assert (inputs.approved_by, inputs.rejected_by, inputs.held_by) == (("Ada",), (), ())
        assert [receipt.status for receipt in inputs.receipts] == [ReceiptStatus.CLEAN]
        (standing,) = inputs.workloads
        assert (standing.ground, standing.verdict, standing.age) == (Ground.NATIVE, Verdict.PASSED, Age.FRESH)
        assert standing.elsewhere is not Verdict.FAILED
    # The one free choice is what a rehearsal of the same workload showed besides: absent or any verdict but FAILED.
    assert sorted(str(inputs.workloads[0].elsewhere) for inputs in adopted) == sorted(
        ["None", "PASSED", "INCONCLUSIVE", "INCOMPLETE"]
    )


FAVOUR = {Decision.REJECTED: 0, Decision.HELD: 1, Decision.ADOPTED: 2}
WORSE_VERDICTS = (None, Verdict.INCOMPLETE, Verdict.INCONCLUSIVE, Verdict.FAILED)
standings = st.builds(
    WorkloadStanding,
    workload=st.sampled_from(["full_step", "pressure"]),
    ground=st.sampled_from(Ground),
    verdict=st.sampled_from([None, *Verdict]),
    elsewhere=st.sampled_from([None, *Verdict]),
    age=st.sampled_from(Age),
)
people = st.lists(st.sampled_from(["Ada", "Bo", "Cy"]), unique=True, max_size=3).map(tuple)
receipts = st.builds(
    ReceiptStanding, attempt=st.integers(0, 3), status=st.sampled_from([None, *ReceiptStatus, ReceiptStatus.CLEAN])
)
any_inputs = st.builds(
    GateInputs,
    run=st.just("run-1"),
    commit=st.just("c" * 40),
    policy=st.just("forecast"),
    evidence_root=st.just("e" * 64),
    rules_sha256=st.just("f" * 64),
    decided_at=st.just("2026-11-30T22:00:00Z"),
    ledger_problems=st.sampled_from([None, (), ("x",)]),
    covered=st.booleans(),
    source=st.sampled_from(Source),
    head=st.sampled_from(Head),
    superseded_by=st.sampled_from([None, "run-2"]),
    workloads=st.lists(standings | st.just(GOOD_WORKLOAD), max_size=3).map(tuple),
    receipts=st.lists(receipts | st.just(GOOD_RECEIPT), max_size=3).map(tuple),
    approvals_required=st.integers(1, 3),
    approved_by=people,
    rejected_by=people,
    held_by=people,
)
mostly_good = st.one_of(any_inputs, st.just(GOOD))


@st.composite
def worsened(draw: st.DrawFn) -> tuple[GateInputs, GateInputs]:
    """Inputs, and the same with one proof removed or one thing failed (a required workload stays required)."""
    inputs = draw(mostly_good)
    changes: dict[str, object] = {
        "ledger_problems": draw(st.sampled_from([None, ("broken",)])),
        "covered": False,
        "source": draw(st.sampled_from([Source.DIRTY, Source.UNKNOWN])),
        "head": draw(st.sampled_from([Head.MOVED, Head.UNREADABLE])),
        "superseded_by": "run-3",
        "approvals_required": inputs.approvals_required + 1,
        "approved_by": inputs.approved_by[1:],
        "rejected_by": (*inputs.rejected_by, "Dee"),
        "held_by": (*inputs.held_by, "Dee"),
        "receipts": (*inputs.receipts[1:], draw(receipts.filter(lambda one: one.status is not ReceiptStatus.CLEAN))),
        "workloads": (
            *inputs.workloads[1:],
            draw(standings.filter(lambda one: one.verdict in WORSE_VERDICTS or one.age is not Age.FRESH)),
        ),
    }
    field = draw(st.sampled_from(sorted(changes)))
    return inputs, msgspec.structs.replace(inputs, **{field: changes[field]})


@given(worsened())
def test_removing_or_failing_any_input_never_moves_to_adopted(pair: tuple[GateInputs, GateInputs]) -> None:
    _, after = pair
    assert decide(after).decision is not Decision.ADOPTED or decide(pair[0]).decision is Decision.ADOPTED


@given(worsened())
def test_removing_or_failing_an_input_of_an_adopted_case_ends_adoption(pair: tuple[GateInputs, GateInputs]) -> None:
    before, after = pair
    if decide(before).decision is Decision.ADOPTED:
        assert FAVOUR[decide(after).decision] < FAVOUR[Decision.ADOPTED]


@given(mostly_good)
def test_inputs_survive_the_flat_form_of_a_statement_and_decide_the_same(inputs: GateInputs) -> None:
    stored = msgspec.json.decode(msgspec.json.encode(flatten(inputs)))
    again = unflatten(stored)
    assert again == inputs
    assert decide(again) == decide(inputs)


@given(any_inputs)
def test_no_decision_is_without_a_reason_and_deciding_is_pure(inputs: GateInputs) -> None:
    ruling = decide(inputs)
    assert ruling.reasons
    assert ruling == decide(inputs)


def test_bare_inputs_are_held_for_everything_that_was_not_shown() -> None:
    ruling = decide(BARE)
    assert (ruling.decision, ruling.row) == (Decision.HELD, "unverified")
    assert "there is no cleanup receipt" in ruling.reasons
    assert "the gate rules require no workload, which can never adopt" in ruling.reasons
    assert "0 of 1 approvals" in ruling.reasons


def test_one_person_named_twice_is_one_approval() -> None:
    inputs = msgspec.structs.replace(GOOD, approvals_required=2, approved_by=("Ada", "Ada"))
    assert decide(inputs).reasons == ("1 of 2 approvals",)


def test_a_flat_form_that_holds_something_else_is_refused() -> None:
    flat = flatten(GOOD)
    for broken in ({**flat, "surprise": 1}, {**flat, "run.x": 1}, {**flat, "head": "nowhere"}):
        with pytest.raises(msgspec.ValidationError):
            unflatten(broken)


def test_a_rehearsal_that_is_incomplete_says_so_and_what_is_missing() -> None:
    standing = WorkloadStanding(
        workload="full_step", ground=Ground.NATIVE, elsewhere=Verdict.INCOMPLETE, reasons=("backwards is missing",)
    )
    ruling = decide(msgspec.structs.replace(GOOD, workloads=(standing,)))
    assert (ruling.decision, ruling.row) == (Decision.HELD, "rehearsal")
    assert ruling.reasons == (
        "full_step is rehearsal evidence, native is required, and it is INCOMPLETE (backwards is missing)",
    )
