"""What ranks tell each other about one decision, and what follows from all votes. Pure: all fold the same rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from trainer_rank.admission.decide import Outcome
from trainer_rank.admission.ladder import Plan
from trainer_rank.admission.planner import Choice
from trainer_rank.errors import AdmissionRefused, AdmissionUnknown, PlanningError

REASON_BYTES = 256
_OUTCOMES = tuple(Outcome)
_NONE = -1


@dataclass(frozen=True)
class Vote:
    """One rank's row: what it would run, what that takes and what it has, and why when it cannot plan. Bytes.

    ``units`` and ``ordinal`` name the plan among those that every rank derives from the same requests; ``digest`` is
    the first eight bytes of the plan's SHA-256. ``oversize``: its caller allows an oversized plan.
    """

    outcome: Outcome
    units: int = 0
    ordinal: int = _NONE
    required: int = _NONE
    available: int = _NONE
    digest: int = 0
    oversize: bool = False
    reason: str = ""

    def row(self) -> list[int]:
        """Return the vote as integers of fixed number."""
        text = self.reason.encode()[:REASON_BYTES].ljust(REASON_BYTES, b"\0")
        words = [int.from_bytes(text[at : at + 8], "little", signed=True) for at in range(0, REASON_BYTES, 8)]
        head = [_OUTCOMES.index(self.outcome), self.units, self.ordinal, self.required, self.available, self.digest]
        return [*head, int(self.oversize), *words]

    @classmethod
    def of_row(cls, row: Sequence[int]) -> Vote:
        """Read a row."""
        outcome, units, ordinal, required, available, digest, oversize, *words = row
        text = b"".join(word.to_bytes(8, "little", signed=True) for word in words).rstrip(b"\0")
        return cls(
            _OUTCOMES[outcome],
            units,
            ordinal,
            required,
            available,
            digest,
            bool(oversize),
            text.decode(errors="ignore"),
        )


@dataclass(frozen=True)
class Proposal:
    """The plan that all ranks consider next: how many pending units, and which of the ladder's plans."""

    units: int
    ordinal: int


def plan_digest(plan: Plan) -> str:
    """Return the SHA-256 of a plan: its rung, its retention, and each subforward's original request indices."""
    content = [plan.rung, plan.retention.value, plan.indices, plan.packed_tokens]
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()


def vote_of(choice: Choice, oversize: bool) -> Vote:
    """Return what a rank says of its own choice."""
    decision, plan = choice.decision, choice.plan
    return Vote(
        outcome=decision.outcome,
        units=choice.units,
        ordinal=_NONE if decision.selected is None else decision.selected,
        required=_NONE if decision.required is None else decision.required,
        available=_NONE if decision.available is None else decision.available,
        digest=0 if plan is None else int(plan_digest(plan)[:16], 16) >> 1,
        oversize=oversize,
        reason=decision.reason,
    )


def proposed(votes: Sequence[Vote]) -> Proposal:
    """Return the plan to consider: the narrowest width, the furthest rung that any rank needs.

    Raises what every rank must raise when one cannot plan: PlanningError, AdmissionRefused or AdmissionUnknown.
    """
    _raise_failures(votes)
    if any(vote.outcome is Outcome.ADMITTED_OVERSIZED for vote in votes) and not all(vote.oversize for vote in votes):
        rank = next(index for index, vote in enumerate(votes) if not vote.oversize)
        raise AdmissionRefused(f"rank {rank} does not allow an oversized plan, and nothing else fits; allow it on all")
    return Proposal(min(vote.units for vote in votes), max(vote.ordinal for vote in votes))


def admitted(votes: Sequence[Vote]) -> None:
    """Return when all ranks may run the plan they all considered; raises otherwise.

    Each rank must fit its own demand, and the largest demand the smallest budget.
    """
    _raise_failures(votes)
    if len({vote.digest for vote in votes}) > 1:
        digests = ", ".join(f"{vote.digest:016x}" for vote in votes)
        raise PlanningError(f"ranks planned different work ({digests}); give every rank the same requests")
    if all(vote.oversize for vote in votes) and any(vote.outcome is Outcome.ADMITTED_OVERSIZED for vote in votes):
        return
    required = max(range(len(votes)), key=lambda rank: votes[rank].required)
    available = min(range(len(votes)), key=lambda rank: votes[rank].available)
    if votes[required].required > votes[available].available:
        raise AdmissionRefused(
            f"rank {required} needs {votes[required].required} B and rank {available} has "
            f"{votes[available].available} B: give smaller groups, or free memory on rank {available}"
        )


def _raise_failures(votes: Sequence[Vote]) -> None:
    for kind, error in (
        (Outcome.PLANNING_ERROR, PlanningError),
        (Outcome.REFUSED, AdmissionRefused),
        (Outcome.UNKNOWN, AdmissionUnknown),
    ):
        for rank, vote in enumerate(votes):
            if vote.outcome is kind:
                raise error(f"rank {rank}: {vote.reason}")
