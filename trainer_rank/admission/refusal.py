"""Put a decision that admitted nothing into one sentence: what is missing, what is largest, what would make it fit."""

from __future__ import annotations

from trainer_rank.admission.decide import Outcome
from trainer_rank.admission.planner import Choice, Unit


def explain_refusal(choice: Choice, unit: Unit) -> str:
    """Return the text of an AdmissionRefused: the shortfall in bytes, the largest term, and two remedies."""
    decision = choice.decision
    work = f"{len(unit)} requests of {sum(shape.length for shape in unit)} tokens"
    if decision.outcome is Outcome.UNKNOWN:
        return f"the memory of {work} is unknown: {decision.reason}; record a probe that covers it, or run less"
    largest = decision.largest
    named = "" if largest is None else f"; the largest term is {largest.name} ({largest.size} B, {largest.status})"
    return (
        f"{work} refused: the smallest plan needs {decision.required} B and {decision.available} B of "
        f"{choice.budget.free} B free are unclaimed, {decision.shortfall} B too few{named}; "
        f"free at least {decision.shortfall} B on the device, or {_smaller(choice, unit)}"
    )


def _smaller(choice: Choice, unit: Unit) -> str:
    """Name a size that fits: the forecasts grow with the tokens, so the tried share of them is an upper estimate."""
    decision = choice.decision
    tokens = sum(shape.length for shape in unit)
    longest = max(unit, key=lambda shape: shape.length)
    available = max(0, decision.available or 0)
    share = tokens * available // (decision.required or 1)
    if len(unit) > 1 and share >= longest.length:
        return f"give groups of at most {share} tokens"
    return f"shorten request {longest.index} of {longest.length} tokens to at most {min(share, longest.length - 1)}"
