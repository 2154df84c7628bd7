"""Judge a full-step run: the work was done, each step's forecast came first and held, and nothing was left.

Counts of work rest on recordings and checkpoint files that were hashed after the run, peaks on their replay in trusted
code, order on the launcher's stamps. A figure that cannot be read makes its criterion INCOMPLETE.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

from qualification.criteria.checkpoint import Tensors, finite_tensors_of, optimizer_steps
from qualification.criteria.observation import Observation, Replay, StampedEvent
from qualification.criteria.thresholds import Measured, count, ended, left_after_close, none
from qualification.figures import Unreadable
from qualification.records import Criterion
from qualification.verdict import Direction, Threshold, compare

SLOTS = ("adversary", "policy")
UPDATES = 3
BACKWARDS = 18
WORST_ERROR_PERCENT = "5"


def judge(observation: Observation) -> list[Criterion]:
    """Return every criterion of the workload, in the order in which people read them."""
    steps = _Steps(observation)
    return [
        ended(observation),
        count("backwards", BACKWARDS, steps.backwards(), "backwards"),
        count("finite_losses", BACKWARDS, _finite_losses(observation), "losses"),
        *(_optimizer(observation, slot) for slot in SLOTS),
        none("steps_without_forecast_before", steps.count(steps.unannounced), "steps"),
        none("recordings_not_exact", steps.count(lambda replay, _: not replay.exact), "recordings"),
        none("allocated_above_bound", steps.above("bound_allocated", "peak_allocated"), "steps"),
        none("reserved_above_bound", steps.above("bound_reserved", "peak_reserved"), "steps"),
        _worst("allocated_worst_error", steps.worst_error("peak_allocated")),
        _worst("reserved_worst_error", steps.worst_error("peak_reserved")),
        none("out_of_memory_events", steps.total(lambda replay: replay.out_of_memory), "events"),
        none("allocator_retries", steps.total(lambda replay: replay.segments_freed), "segments"),
        none("allocated_after_close", left_after_close(observation), "B"),
    ]


class _Steps:
    """The steps of a run: each recording with the forecast that belongs to it."""

    def __init__(self, observation: Observation) -> None:
        self._observation = observation
        self.replays = {name: found for name, found in observation.replays.items() if name.startswith("step-")}

    def backwards(self) -> Measured:
        """Count the recordings that contain a backward stage; every one must be readable."""
        return self.total(lambda replay: int(any(stage.startswith("backward/") for stage in replay.stages)))

    def total(self, part: Callable[[Replay], int]) -> Measured:
        """Add up a figure over all recordings."""
        total = 0
        for name, found in self.replays.items():
            if isinstance(found, Unreadable):
                return Unreadable(f"is unknown: recording {name} {found.reason}")
            total += part(found)
        return total if self.replays else Unreadable("is unknown: no step was recorded")

    def count(self, wrong: Callable[[Replay, str], bool]) -> Measured:
        """Count the steps for which ``wrong`` holds."""
        total = 0
        for name, found in self.replays.items():
            if isinstance(found, Unreadable):
                return Unreadable(f"is unknown: recording {name} {found.reason}")
            total += wrong(found, name)
        return total if self.replays else Unreadable("is unknown: no step was recorded")

    def unannounced(self, _: Replay, name: str) -> bool:
        """Say whether a step lacks a forecast that was stamped before its observation."""
        forecasts, observed = self._events("forecast", name), self._events("observed", name)
        if len(forecasts) != 1 or len(observed) != 1:
            return True
        return not (
            forecasts[0].sequence < observed[0].sequence and forecasts[0].monotonic_ns <= observed[0].monotonic_ns
        )

    def above(self, bound: str, peak: str) -> Measured:
        """Count the steps whose replayed peak exceeds the bound that was forecast."""
        pairs = self._pairs(bound, peak)
        return pairs if isinstance(pairs, Unreadable) else sum(got > limit for limit, got in pairs)

    def worst_error(self, peak: str) -> Measured:
        """Return the largest absolute error of the forecast, percent of the replayed peak, three decimals."""
        pairs = self._pairs(peak, peak)
        if isinstance(pairs, Unreadable):
            return pairs
        worst = max(Decimal(100 * abs(forecast - got)) / got for forecast, got in pairs)
        return format(worst.quantize(Decimal("0.001")), "f")

    def _pairs(self, forecast: str, peak: str) -> list[tuple[int, int]] | Unreadable:
        pairs = []
        for name, found in self.replays.items():
            if isinstance(found, Unreadable):
                return Unreadable(f"is unknown: recording {name} {found.reason}")
            events = self._events("forecast", name)
            said = events[0].whole(forecast) if len(events) == 1 else Unreadable(f"has {len(events)} forecasts")
            if isinstance(said, Unreadable):
                return Unreadable(f"is unknown: {forecast} of {name} {said.reason}")
            got = int(getattr(found, peak))
            if got <= 0:
                return Unreadable(f"is unknown: {peak} of {name} is {got}")
            pairs.append((said, got))
        return pairs or Unreadable("is unknown: no step was recorded")

    def _events(self, kind: str, name: str) -> list[StampedEvent]:
        return [event for event in self._observation.of(kind) if event.whole("step") == _number(name)]


def _number(name: str) -> int | None:
    digits = name.removeprefix("step-")
    return int(digits) if digits.isascii() and digits.isdigit() else None


def _finite_losses(observation: Observation) -> Measured:
    losses = observation.of("loss")
    for event in losses:
        value = event.figure("value")
        if isinstance(value, Unreadable):
            return Unreadable(f"are unknown: the loss in event {event.sequence} {value.reason}")
    return len({event.whole("step") for event in losses})


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


def _worst(name: str, measured: Measured) -> Criterion:
    return compare(Threshold(name=name, direction=Direction.AT_MOST, value=WORST_ERROR_PERCENT, unit="%"), measured)
