"""Tell observers what happens, as plain mappings of integers and strings. An observer's failure changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from trainer_rank.admission.planner import Choice
from trainer_rank.admission.vote import plan_digest

if TYPE_CHECKING:
    from trainer_rank.devices.protocol import Device


class Announcer:
    """Calls the observers and counts how often one failed."""

    def __init__(
        self, on_event: Callable[[Mapping[str, Any]], None], on_stage: Callable[[str], None] = lambda _: None
    ) -> None:
        self._on_event = on_event
        self._on_stage = on_stage
        self.failures = 0

    def event(self, name: str, /, **values: object) -> None:
        """Hand on one event."""
        try:
            self._on_event({"event": name, **values})
        except Exception:  # an observer may fail in any way; training goes on and the count is reported
            self.failures += 1

    def stage(self, name: str) -> None:
        """Hand on the beginning of a stage."""
        try:
            self._on_stage(name)
        except Exception:  # as above
            self.failures += 1


def announce_forecast(announcer: Announcer, step: int, choice: Choice) -> None:
    """Say what is about to run and what it was forecast to take, before it runs. Bytes; costs in nanoseconds."""
    demand, decision = choice.demand, choice.decision
    assert demand is not None and choice.plan is not None
    candidate = next(each for each in choice.candidates if each.ordinal == decision.selected)
    announcer.event(
        "forecast",
        step=step,
        outcome=decision.outcome.value,
        rung=decision.rung,
        plan_sha256=plan_digest(choice.plan),
        selected=decision.selected,
        sample=decision.sample,
        subforwards=[list(indices) for indices in choice.plan.indices],
        packed_tokens=list(choice.plan.packed_tokens),
        logical_tokens=[each.logical_tokens for each in choice.plan.subforwards],
        coverage=demand.coverage.value,
        peak_allocated=demand.peak_allocated,
        peak_reserved=demand.peak_reserved,
        bound_allocated=demand.bound_allocated,
        bound_reserved=demand.bound_reserved,
        bound_device_used=demand.bound_device_used,
        required=decision.required,
        available=decision.available,
        free=choice.budget.free,
        cost_ns=candidate.cost_ns,
        terms=[asdict(term) for term in demand.terms],
        claims=[asdict(claim) for claim in choice.budget.claims],
    )


def announce_observation(announcer: Announcer, step: int, device: Device) -> None:
    """Say what the step took, from the allocator's own counters. Bytes and counts; the device is not waited for."""
    memory = device.memory_info()
    announcer.event(
        "observed",
        step=step,
        peak_allocated=device.peak_allocated(),
        peak_reserved=device.peak_reserved(),
        device_used=memory.total - memory.free,
        allocator_retries=device.allocator_retries(),
        out_of_memory=device.out_of_memory_count(),
    )
