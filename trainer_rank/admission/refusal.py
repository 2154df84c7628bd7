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
        f"free at least {decision.shortfall} B on the device, or {choice.remedy}"
    )
