"""Exit codes of ``qualify``: one meaning each, and the order in which they win when several apply."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from qualification import errors
from qualification.gate import TAMPERED
from qualification.records import AdoptionDecision, Decision, ReceiptStatus, Verdict
from trainer_rank.errors import AdmissionRefused, AdmissionUnknown, InvalidInputError, TrainerRankError


class ExitCode(IntEnum):
    """What a command's exit code says."""

    PASSED = 0
    UNEXPECTED = 1
    USAGE = 2
    FAILED = 3
    HELD = 4
    TAMPERED = 5
    NOT_CLEAN = 6
    NOT_PERMITTED = 7
    INTERRUPTED = 130


PRECEDENCE = (ExitCode.TAMPERED, ExitCode.NOT_CLEAN, ExitCode.FAILED, ExitCode.HELD, ExitCode.PASSED)
"""When several codes apply to one answer, the first of these that does is the answer."""


_VERDICTS = {Verdict.PASSED: ExitCode.PASSED, Verdict.FAILED: ExitCode.FAILED}
_DECISIONS = {Decision.ADOPTED: ExitCode.PASSED, Decision.REJECTED: ExitCode.FAILED, Decision.HELD: ExitCode.HELD}

_ERRORS: tuple[tuple[type[BaseException], ExitCode], ...] = (
    (KeyboardInterrupt, ExitCode.INTERRUPTED),
    (errors.ConfigurationError, ExitCode.USAGE),
    (errors.RefusedError, ExitCode.FAILED),
    (errors.UnknownError, ExitCode.HELD),
    (errors.TamperedError, ExitCode.TAMPERED),
    (errors.NotCleanError, ExitCode.NOT_CLEAN),
    (errors.NotPermittedError, ExitCode.NOT_PERMITTED),
    (InvalidInputError, ExitCode.USAGE),
    (AdmissionUnknown, ExitCode.HELD),
    (AdmissionRefused, ExitCode.FAILED),
    (TrainerRankError, ExitCode.USAGE),
)


def strongest(codes: Iterable[ExitCode]) -> ExitCode:
    """Return the code that answers for all of ``codes``; one outside the order wins over every other."""
    given = set(codes) or {ExitCode.HELD}
    outside = given.difference(PRECEDENCE)
    return min(outside) if outside else next(code for code in PRECEDENCE if code in given)


def for_run(verdicts: Iterable[Verdict], receipts: Iterable[ReceiptStatus]) -> ExitCode:
    """Return the code of a run: by verdict and receipt, never by decision. No verdict or no receipt is not a pass."""
    seen_verdicts, seen_receipts = list(verdicts), list(receipts)
    codes = [_VERDICTS.get(verdict, ExitCode.HELD) for verdict in seen_verdicts] or [ExitCode.HELD]
    clean = bool(seen_receipts) and all(status is ReceiptStatus.CLEAN for status in seen_receipts)
    return strongest([*codes, ExitCode.PASSED if clean else ExitCode.NOT_CLEAN])


def for_decision(decision: AdoptionDecision) -> ExitCode:
    """Return the code of a decision; one held because evidence does not verify is 5."""
    return ExitCode.TAMPERED if decision.row == TAMPERED.name else _DECISIONS[decision.decision]


def for_error(error: BaseException) -> ExitCode:
    """Return the code of an error that ended a command; 1 for one that nobody foresaw."""
    return next((code for kind, code in _ERRORS if isinstance(error, kind)), ExitCode.UNEXPECTED)
