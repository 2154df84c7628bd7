"""Exit codes: one per meaning, the stated precedence, and nothing that passes by being absent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.cli.exits import PRECEDENCE, ExitCode, for_decision, for_error, for_run, strongest
from qualification import errors
from qualification.records import AdoptionDecision, Decision, ReceiptStatus, Verdict
from trainer_rank.errors import AdmissionRefused, TraceError

_DIGEST = "0" * 64


def _decision(decision: Decision, row: str) -> AdoptionDecision:
    return AdoptionDecision(
        run="r",
        decision=decision,
        row=row,
        reasons=(),
        evidence_root=_DIGEST,
        rules_sha256=_DIGEST,
        ledger_size=1,
        ledger_root=_DIGEST,
        decided_at="2026-11-30T00:00:00Z",
    )


@given(st.lists(st.sampled_from(PRECEDENCE), min_size=1))
def test_the_first_in_the_order_of_precedence_answers(codes: list[ExitCode]) -> None:
    assert strongest(codes) == min(codes, key=PRECEDENCE.index)


def test_nothing_at_all_is_held() -> None:
    assert strongest([]) is ExitCode.HELD


@pytest.mark.parametrize(
    ("verdicts", "receipts", "code"),
    [
        ([Verdict.PASSED], [ReceiptStatus.CLEAN], 0),
        ([Verdict.PASSED, Verdict.FAILED], [ReceiptStatus.CLEAN], 3),
        ([Verdict.INCOMPLETE], [ReceiptStatus.CLEAN], 4),
        ([Verdict.INCONCLUSIVE], [ReceiptStatus.CLEAN], 4),
        ([Verdict.FAILED], [ReceiptStatus.CLEAN, ReceiptStatus.DIRTY], 6),
        ([Verdict.PASSED], [ReceiptStatus.UNVERIFIED], 6),
        ([Verdict.PASSED], [], 6),
        ([], [ReceiptStatus.CLEAN], 4),
    ],
)
def test_a_run_answers_by_verdict_and_receipt(
    verdicts: list[Verdict], receipts: list[ReceiptStatus], code: int
) -> None:
    assert for_run(verdicts, receipts) == code


@pytest.mark.parametrize(
    ("decision", "row", "code"),
    [
        (Decision.ADOPTED, "adopted", 0),
        (Decision.REJECTED, "workload_failed", 3),
        (Decision.HELD, "rehearsal", 4),
        (Decision.HELD, "tampered", 5),
    ],
)
def test_the_gate_answers_by_decision(decision: Decision, row: str, code: int) -> None:
    assert for_decision(_decision(decision, row)) == code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (errors.ConfigurationError("x"), 2),
        (errors.RefusedError("x"), 3),
        (errors.UnknownError("x"), 4),
        (errors.TamperedError("x"), 5),
        (errors.NotCleanError("x"), 6),
        (errors.NotPermittedError("x"), 7),
        (errors.QualificationError("x"), 1),
        (AdmissionRefused("x"), 3),
        (TraceError("x"), 2),
        (OSError(28, "No space left on device"), 1),
        (ZeroDivisionError(), 1),
    ],
)
def test_every_error_has_its_code(error: BaseException, code: int) -> None:
    assert for_error(error) == code
