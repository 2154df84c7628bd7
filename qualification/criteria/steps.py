"""The steps of a run as recordings and events tell them: were they forecast before they ran, and did the forecast hold?

Peaks rest on replays in trusted code, order on the launcher's stamps. A figure that cannot be read is ``Unreadable``.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

from qualification.criteria.observation import Observation, Replay, StampedEvent
from qualification.criteria.thresholds import Measured
from qualification.figures import Unreadable
from qualification.records import Criterion
from qualification.verdict import Direction, Threshold, compare

WORST_ERROR_PERCENT = "5"


class Steps:
    """The steps of one rank: each recording in ``folder`` (ending in a slash) with the forecast that belongs to it."""

    def __init__(self, observation: Observation, folder: str = "", rank: int = 0) -> None:
        self._observation, self._folder, self._rank = observation, folder, rank
        start = f"{folder}step-"
        self.replays = {name: found for name, found in observation.replays.items() if name.startswith(start)}

    def backwards(self) -> Measured:
        """Count the recordings that contain a backward stage; every one must be readable."""
        return self.count(lambda replay, _: replay.backward)

    def total(self, part: Callable[[Replay], int]) -> Measured:
        """Add up a figure over all recordings."""
        return self.count(lambda replay, _: part(replay))

    def count(self, wrong: Callable[[Replay, str], int]) -> Measured:
        """Count the steps for which ``wrong`` holds, or what it counts in them."""
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
        events = [event for event in self._observation.of(kind) if event.rank == self._rank]
        return [event for event in events if event.whole("step") == _number(name.removeprefix(self._folder))]


def _number(name: str) -> int | None:
    digits = name.removeprefix("step-")
    return int(digits) if digits.isascii() and digits.isdigit() else None


def finite_losses(observation: Observation) -> Measured:
    """Count the steps of all ranks whose loss is a finite number; any other loss makes the count unknown."""
    losses = observation.of("loss")
    for event in losses:
        value = event.figure("value")
        if isinstance(value, Unreadable):
            return Unreadable(f"are unknown: the loss in event {event.sequence} {value.reason}")
    return len({(event.rank, event.whole("step")) for event in losses})


def worst(name: str, measured: Measured) -> Criterion:
    """Judge the largest error of a forecast, percent of the peak."""
    return compare(Threshold(name=name, direction=Direction.AT_MOST, value=WORST_ERROR_PERCENT, unit="%"), measured)
