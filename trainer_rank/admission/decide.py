"""The admission decision: a pure function of forecasts, budget and candidates. No torch, no input or output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from trainer_rank.admission.budget import Budget, Status, Term
from trainer_rank.errors import PlanningError


class Outcome(StrEnum):
    """What was decided about the requested work."""

    ADMITTED = "admitted"
    ADMITTED_OVERSIZED = "admitted_oversized"
    REFUSED = "refused"
    UNKNOWN = "unknown"
    PLANNING_ERROR = "planning_error"


class Coverage(StrEnum):
    """Whether the tapes reach a plan: inside what was probed, beyond it with a widened bound, or not at all."""

    COVERED = "covered"
    EXTRAPOLATED = "extrapolated"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Demand:
    """What one candidate will take, forecast from memory sample ``sample``. All sizes in bytes, None where unknown.

    ``required`` bounds what the plan takes of the memory that is free now: what it takes from the driver, or under a
    policy that counts no cached blocks all that it allocates. It is compared with the budget. ``terms`` name what makes
    it up. ``host`` bounds the host memory that the plan takes.
    """

    sample: int
    coverage: Coverage
    required: int | None
    peak_allocated: int | None
    peak_reserved: int | None
    bound_allocated: int | None
    bound_reserved: int | None
    bound_device_used: int | None
    peak_stage: str | None = None
    terms: tuple[Term, ...] = ()
    uncovered: tuple[str, ...] = ()
    host: int = 0

    @property
    def known(self) -> bool:
        """Whether every stage and every term has a figure."""
        figures = self.required is not None and all(term.size is not None for term in self.terms)
        return figures and self.coverage is not Coverage.UNKNOWN and not self.uncovered


@dataclass(frozen=True)
class Candidate:
    """One way to do the work: its place in the ladder, its cut by original request index, and its cost in time."""

    ordinal: int
    rung: str
    subforwards: tuple[tuple[int, ...], ...]
    packed_tokens: tuple[int, ...]
    cost_ns: int | None = None


@dataclass(frozen=True)
class Decision:
    """What was decided, and every figure that it turned on.

    ``selected`` and ``sample`` are the ordinals of the chosen candidate and of the memory sample that decided;
    neither is ever carried over from an earlier check. ``shortfall`` is the smallest excess over the budget.
    """

    outcome: Outcome
    sample: int
    selected: int | None
    rung: str | None
    required: int | None
    available: int | None
    shortfall: int | None
    largest: Term | None
    reason: str


def decide(
    forecasts: Sequence[Demand], budget: Budget, candidates: Sequence[Candidate], *, oversize: bool = False
) -> Decision:
    """Choose the first candidate whose forecast fits the budget; candidates come cheapest first.

    ``forecasts[i]`` belongs to ``candidates[i]``. ``oversize`` is the caller's explicit last resort: when none fits,
    the known one with the smallest excess is admitted. Raises PlanningError when a forecast was made from another
    memory sample than the budget.
    """
    _check(forecasts, budget, candidates)
    available = budget.available
    pairs = list(zip(candidates, forecasts, strict=True))
    if available is None:
        unknown = next(claim for claim in budget.claims if claim.size is None)
        return _unplaced(Outcome.UNKNOWN, budget, None, unknown, f"claim {unknown.name} has no known size")
    host = budget.host or 0
    for candidate, demand in pairs:
        if _fits(demand, available, host):
            return Decision(
                Outcome.ADMITTED, budget.sample, candidate.ordinal, candidate.rung, demand.required, available,
                None, _largest(demand.terms), f"{candidate.rung} fits",
            )  # fmt: skip
    known = [(candidate, demand) for candidate, demand in pairs if demand.known]
    unknown_stages = [stage for _, demand in pairs if not demand.known for stage in _unknown_names(demand)]
    if unknown_stages and not (oversize and known):
        named = ", ".join(dict.fromkeys(unknown_stages))
        return _unplaced(Outcome.UNKNOWN, budget, None, None, f"no tape covers {named}")
    excesses = [max((demand.required or 0) - available, demand.host - host) for _, demand in known]
    excess, index = min(zip(excesses, range(len(known)), strict=True))
    candidate, demand = known[index]
    largest = _largest((*demand.terms, *budget.claims))
    if not oversize:
        return _unplaced(
            Outcome.REFUSED, budget, demand, largest, f"the smallest plan exceeds the budget by {excess} B"
        )
    return Decision(
        Outcome.ADMITTED_OVERSIZED, budget.sample, candidate.ordinal, candidate.rung, demand.required, available,
        excess, largest, f"{candidate.rung} exceeds the budget by {excess} B and the caller allows oversize",
    )  # fmt: skip


def _fits(demand: Demand, available: int, host: int) -> bool:
    return demand.known and demand.required is not None and demand.required <= available and demand.host <= host


def _check(forecasts: Sequence[Demand], budget: Budget, candidates: Sequence[Candidate]) -> None:
    if not candidates or len(forecasts) != len(candidates):
        raise PlanningError(
            f"{len(candidates)} candidates with {len(forecasts)} forecasts cannot be decided; give one forecast each"
        )
    stale = sorted({demand.sample for demand in forecasts} - {budget.sample})
    if stale:
        raise PlanningError(
            f"forecasts from memory sample {stale[0]} cannot be judged by sample {budget.sample}; forecast again"
        )


def _unplaced(outcome: Outcome, budget: Budget, demand: Demand | None, largest: Term | None, reason: str) -> Decision:
    required = None if demand is None else demand.required
    available = budget.available
    shortfall = None if required is None or available is None else required - available
    return Decision(outcome, budget.sample, None, None, required, available, shortfall, largest, reason)


def _largest(terms: Sequence[Term]) -> Term | None:
    known = [term for term in terms if term.size is not None]
    return max(known, key=lambda term: term.size or 0, default=None)


def _unknown_names(demand: Demand) -> list[str]:
    names = [*demand.uncovered, *(term.name for term in demand.terms if term.status is Status.UNKNOWN)]
    return names or ["its total"]
