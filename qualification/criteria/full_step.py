"""Judge a full-step run: the work was done, each step's forecast came first and held, and nothing was left.

Counts of work rest on recordings and checkpoint files that were hashed after the run, peaks on their replay in trusted
code, order on the launcher's stamps. A figure that cannot be read makes its criterion INCOMPLETE.
"""

from __future__ import annotations

from qualification.criteria.checkpoint import Tensors, finite_tensors_of, optimizer_steps
from qualification.criteria.observation import Observation
from qualification.criteria.steps import Steps, finite_losses, worst
from qualification.criteria.thresholds import Measured, count, ended, left_after_close, none
from qualification.figures import Unreadable
from qualification.records import Criterion

SLOTS = ("adversary", "policy")
UPDATES = 3
BACKWARDS = 18


def judge(observation: Observation) -> list[Criterion]:
    """Return every criterion of the workload, in the order in which people read them."""
    steps = Steps(observation)
    return [
        ended(observation),
        count("backwards", BACKWARDS, steps.backwards(), "backwards"),
        count("finite_losses", BACKWARDS, finite_losses(observation), "losses"),
        *(_optimizer(observation, slot) for slot in SLOTS),
        none("steps_without_forecast_before", steps.count(steps.unannounced), "steps"),
        none("recordings_not_exact", steps.count(lambda replay, _: not replay.exact), "recordings"),
        none("allocated_above_bound", steps.above("bound_allocated", "peak_allocated"), "steps"),
        none("reserved_above_bound", steps.above("bound_reserved", "peak_reserved"), "steps"),
        worst("allocated_worst_error", steps.worst_error("peak_allocated")),
        worst("reserved_worst_error", steps.worst_error("peak_reserved")),
        none("out_of_memory_events", steps.total(lambda replay: replay.out_of_memory), "events"),
        none("allocator_retries", steps.total(lambda replay: replay.segments_freed), "segments"),
        none("allocated_after_close", left_after_close(observation), "B"),
    ]


def _optimizer(observation: Observation, slot: str) -> Criterion:
    """Judge that a slot that trains was stepped, and that a frozen one has no state."""
    if slot == SLOTS[0] and observation.parameters.get("frozen"):
        return none(f"optimizer_tensors_{slot}", _optimizer_tensors(observation, slot), "tensors")
    return count(f"optimizer_steps_{slot}", UPDATES, optimizer_steps(_saved(observation, slot), slot), "steps")


def _optimizer_tensors(observation: Observation, slot: str) -> Measured:
    tensors = _saved(observation, slot)
    if isinstance(tensors, Unreadable):
        return tensors
    return sum(not name.startswith("parameter/") for name in tensors)


def _saved(observation: Observation, slot: str) -> Tensors:
    return finite_tensors_of(observation, f"checkpoint/slot-{slot}.safetensors")
