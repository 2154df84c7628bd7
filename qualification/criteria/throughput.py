"""Judge what a policy costs in time, from the launcher's stamps round interleaved measurements of two arms."""

from __future__ import annotations

from decimal import Decimal

from qualification.criteria.observation import Observation, StampedEvent
from qualification.criteria.thresholds import Measured, count, ended, none
from qualification.figures import Unreadable, number, read_figure
from qualification.records import Criterion
from qualification.statistics import Measurement, compare_arms, interleaved
from qualification.verdict import Direction, Threshold

PAIRS = 5
STEP_TIME = Threshold(
    name="step_time_ratio",
    direction=Direction.AT_MOST,
    value="1.05",
    unit="ratio",
    plausible_from="0.5",
)
"""Time of a step under the policy, as a multiple of a step under ``none``; half of it or less is not believed."""

_TOLERANCE = Decimal("0.001")
"""How far two log-probabilities (nats) of the same request may lie apart: sums are taken in another order."""


def judge(observation: Observation) -> list[Criterion]:
    """Return every criterion of the workload, in the order in which people read them."""
    measurements = _measurements(observation)
    return [
        ended(observation),
        count("measurements", len(interleaved(PAIRS)), len(measurements), "measurements"),
        none("work_differs", _work_differs(observation), "measurements"),
        compare_arms(STEP_TIME, measurements),
    ]


def _measurements(observation: Observation) -> list[Measurement]:
    """Pair each beginning with the end that follows it, as stamped; one without the other is no measurement."""
    found: list[Measurement] = []
    begun: StampedEvent | None = None
    for event in observation.events:
        if event.kind == "measure":
            begun = event
        elif event.kind == "measured" and begun is not None:
            arm, same = event.text("arm"), event.whole("number") == begun.whole("number")
            if arm is not None and arm == begun.text("arm") and same:
                found.append(Measurement(arm=arm, value=event.monotonic_ns - begun.monotonic_ns))
            begun = None
    return found


def _work_differs(observation: Observation) -> Measured:
    """Count measurements of B whose log-probabilities are not those of A at the same update: other work was done."""
    arms: dict[str, list[list[Decimal]]] = {"A": [], "B": []}
    for event in (*observation.of("warm"), *observation.of("measured")):
        said = None if isinstance(event.body, Unreadable) else event.body.get("log_probabilities")
        values = _numbers(said)
        if event.text("arm") not in arms or isinstance(values, Unreadable):
            return Unreadable(f"are unknown: event {event.sequence} gives no log-probabilities of an arm")
        arms[event.text("arm") or ""].append(values)
    if len(arms["A"]) != len(arms["B"]):
        return Unreadable("are unknown: the arms were not measured equally often")
    pairs = list(zip(arms["A"], arms["B"], strict=True))
    return sum(_apart(one, other) for one, other in pairs) if pairs else Unreadable("are unknown: nothing was measured")


def _numbers(steps: object) -> list[Decimal] | Unreadable:
    """Return the log-probabilities of all steps of a measurement; at least one, all of them numbers."""
    listed = [each for step in steps if isinstance(step, list) for each in step] if isinstance(steps, list) else []
    found = [number(read_figure(each)) for each in listed]
    known = [value for value in found if not isinstance(value, Unreadable)]
    return known if known and len(known) == len(found) else Unreadable("are no numbers")


def _apart(one: list[Decimal], other: list[Decimal]) -> bool:
    return len(one) != len(other) or any(abs(a - b) > _TOLERANCE for a, b in zip(one, other, strict=True))
