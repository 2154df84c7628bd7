"""Judge cold admissions beside a ballast: each was fitted or refused, and none met an out of memory.

Out of memory rests on the replay of recordings and on what the launcher stamped of each answer.
"""

from __future__ import annotations

from qualification.criteria.observation import Observation
from qualification.criteria.thresholds import Measured, ended, none, some
from qualification.figures import Unreadable
from qualification.records import Criterion

BALLAST = 68_451_041_280
REFUSALS = ("AdmissionRefused", "AdmissionUnknown")


def judge(observation: Observation) -> list[Criterion]:
    """Return every criterion of the workload, in the order in which people read them."""
    answers = [event.text("answer") or "" for event in observation.of("answer")]
    return [
        ended(observation),
        none("batches_without_the_reported_ballast", _without(observation), "batches"),
        some("batches_fitted", _fitted(observation), "batches"),
        some("batches_refused", sum(answer in REFUSALS for answer in answers), "batches"),
        none("batches_unanswered", _unanswered(observation, answers), "batches"),
        none("out_of_memory_events", _events(observation), "events"),
        none("answers_that_are_failures", _failures(answers), "batches", ", ".join(_others(answers)) or None),
    ]


def _without(observation: Observation) -> Measured:
    """Count the batches that were asked for beside less than the report's driver allocation."""
    asked = observation.of("ballast")
    sizes = [event.whole("size") for event in asked]
    return sum(size != BALLAST for size in sizes) if asked else Unreadable("is unknown: no batch was tried")


def _fitted(observation: Observation) -> Measured:
    """Count the steps that were recorded and ran without out of memory."""
    steps = {name: found for name, found in observation.replays.items() if "/step-" in name}
    broken = [found for found in steps.values() if isinstance(found, Unreadable)]
    if broken:
        return Unreadable(f"is unknown: a recording {broken[0].reason}")
    return sum(found.out_of_memory == 0 for found in steps.values() if not isinstance(found, Unreadable))


def _events(observation: Observation) -> Measured:
    counted = 0
    for name, found in observation.replays.items():
        if isinstance(found, Unreadable):
            return Unreadable(f"is unknown: recording {name} {found.reason}")
        counted += found.out_of_memory
    return counted if observation.replays else Unreadable("is unknown: nothing was recorded")


def _unanswered(observation: Observation, answers: list[str]) -> Measured:
    asked = len(observation.of("ballast"))
    return asked - len(answers) if asked else Unreadable("is unknown: no batch was tried")


def _failures(answers: list[str]) -> Measured:
    return len(_others(answers)) if answers else Unreadable("is unknown: no batch was answered")


def _others(answers: list[str]) -> list[str]:
    return [answer for answer in answers if answer not in REFUSALS and not answer.startswith("fitted ")]
