"""Watch a rank's decisions and steps, and write a planner report where one is due. Never changes training."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from trainer_rank.admission.decide import Outcome
from trainer_rank.admission.planner import Choice
from trainer_rank.devices.protocol import Device, Sighting
from trainer_rank.events import Announcer
from trainer_rank.outofmemory import FailureKind, failure_kind, forget_frames
from trainer_rank.policies import Policy
from trainer_rank.prefixes import Prefixes
from trainer_rank.reports.report import Failure, Observed, Report, ReportKind
from trainer_rank.reports.spool import Spool
from trainer_rank.requests import RequestShape

_SUBFORWARD = re.compile(r"(?:forward|backward)/subforward/(\d+)")


class Witness:
    """Writes reports into ``spool`` and announces them as ``report`` events.

    ``slot_steps`` answers how many optimizer steps a slot has had: the revision of its adapter. ``caller_step`` is
    whatever the caller calls the present step.
    """

    def __init__(
        self,
        device: Device,
        policy: Policy,
        announcer: Announcer,
        spool: Spool | None,
        slot_steps: Callable[[str], int],
    ) -> None:
        self._device = device
        self._policy = policy
        self._announcer = announcer
        self._spool = spool
        self._slot_steps = slot_steps
        self.caller_step: str | None = None

    def refused(
        self, step: int, choice: Choice, unit: Sequence[RequestShape], prefixes: Prefixes | None, oversize: bool
    ) -> None:
        """Report a decision that admitted nothing."""
        reason = choice.decision.reason
        self._write(ReportKind.REFUSAL, step, choice, tuple(unit), oversize, reason=reason, prefixes=prefixes)

    def planning_failed(self, step: int, unit: Sequence[RequestShape], oversize: bool, error: BaseException) -> None:
        """Report that planning itself failed."""
        self._write(ReportKind.PLANNING_ERROR, step, None, tuple(unit), oversize, reason=str(error))

    def observed(self, step: int, choice: Choice) -> None:
        """Report a complete step whose peaks were further from the forecast than the policy's threshold."""
        demand = choice.demand
        observed = Observed(self._device.peak_allocated(), self._device.peak_reserved())
        if demand is None or demand.peak_allocated is None:
            return
        error = abs(demand.peak_allocated - observed.peak_allocated) * 100
        if error > self._policy.report_error_percent * max(1, observed.peak_allocated):
            self._write(ReportKind.MISS, step, choice, _shapes(choice), _oversized(choice), observed=observed)

    @contextmanager
    def during(self, step: int, choice: Choice) -> Iterator[None]:
        """Watch an execution. A failure is classified, reported, noted on the error, stripped of tensors, raised."""
        sightings: list[Sighting] = []
        before = self._device.out_of_memory_count()
        try:
            with self._device.watch_out_of_memory(sightings.append):
                yield
        except Exception as error:
            failure = self._failure(error, choice, sightings, self._device.out_of_memory_count() - before)
            out_of_memory = failure.kind != FailureKind.OTHER
            kind = ReportKind.OUT_OF_MEMORY if out_of_memory else ReportKind.FAILURE
            report = self._write(kind, step, choice, _shapes(choice), _oversized(choice), failure=failure)
            error.add_note(
                f"micro-batch {step} failed in {failure.stage} ({failure.kind}), requests {list(failure.requests)}, "
                f"report {report or 'not kept'}"
            )
            forget_frames(error)
            raise

    def _failure(self, error: Exception, choice: Choice, sightings: Sequence[Sighting], counted: int) -> Failure:
        found = _SUBFORWARD.fullmatch(self._announcer.last_stage)
        number = None if found is None else int(found.group(1))
        assert choice.plan is not None
        subforward = None if number is None else choice.plan.subforwards[number]
        sighting = sightings[-1] if sightings else None
        return Failure(
            kind=failure_kind(error, counted).value,
            type=type(error).__name__,
            stage=self._announcer.last_stage,
            subforward=number,
            requests=() if subforward is None else subforward.indices,
            slot=None if subforward is None else subforward.key.slot,
            slot_steps=None if subforward is None else self._slot_steps(subforward.key.slot),
            sampled_before_unwinding=sighting is not None,
            asked=None if sighting is None else sighting.asked,
            free=None if sighting is None else sighting.free,
            allocated=None if sighting is None else sighting.allocated,
            reserved=None if sighting is None else sighting.reserved,
            partial_peak_allocated=self._device.peak_allocated(),
            partial_peak_reserved=self._device.peak_reserved(),
        )

    def _write(
        self,
        kind: ReportKind,
        step: int,
        choice: Choice | None,
        requests: tuple[RequestShape, ...],
        oversize: bool,
        *,
        observed: Observed | None = None,
        failure: Failure | None = None,
        reason: str | None = None,
        prefixes: Prefixes | None = None,
    ) -> str | None:
        if prefixes is None and choice is not None and choice.plan is not None:
            prefixes = choice.plan.subforwards[0].prefixes
        report = Report(
            kind, step, self.caller_step, self._policy, requests, choice, oversize, observed, failure, reason, prefixes
        )
        try:
            identity = None if self._spool is None else self._spool.write(report.document())
        except (OSError, ValueError, TypeError):
            self._announcer.failures += 1
            return None
        self._announcer.event("report", kind=kind.value, step=step, id=identity)
        return identity


def _shapes(choice: Choice) -> tuple[RequestShape, ...]:
    assert choice.plan is not None
    found = [shape for subforward in choice.plan.subforwards for shape in subforward.requests]
    return tuple(sorted(found, key=lambda shape: shape.index))


def _oversized(choice: Choice) -> bool:
    return choice.decision.outcome is Outcome.ADMITTED_OVERSIZED
