"""Watch a rank's decisions and steps, and write a planner report where one is due. Never changes training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from trainer_rank.admission.decide import Outcome
from trainer_rank.admission.planner import Choice
from trainer_rank.devices.protocol import Device
from trainer_rank.errors import AdmissionRefused
from trainer_rank.events import Announcer
from trainer_rank.microbatch import Admitted
from trainer_rank.outofmemory import FailureKind, failure_kind, forget_frames
from trainer_rank.policies import Policy
from trainer_rank.prefixes import Prefixes
from trainer_rank.reports.diagnosis import Peaks, describe_failure, failing_subforward
from trainer_rank.reports.failure import Failure, Revision
from trainer_rank.reports.report import Observed, Origin, Report, ReportKind
from trainer_rank.reports.spool import Spool
from trainer_rank.reports.watch import Place, Watch
from trainer_rank.requests import RequestShape

MILLION = 1_000_000


class Witness:
    """Writes reports of ``origin`` into ``spool`` and announces them as ``report`` events.

    ``revision`` answers what a slot's adapter is. ``caller_step`` is whatever the caller calls the present step.
    """

    def __init__(
        self,
        device: Device,
        policy: Policy,
        announcer: Announcer,
        spool: Spool | None,
        origin: Origin,
        revision: Callable[[str], Revision],
    ) -> None:
        self._device = device
        self._policy = policy
        self._announcer = announcer
        self._spool = spool
        self._origin = origin
        self._revision = revision
        self._place = Place(device)
        self._caller: tuple[Admitted, Watch] | None = None
        self.caller_step: str | None = None

    def begin(self, stage: str) -> None:
        """Note that a stage of the running plan begins, and tell the observers."""
        self._place.begin(stage)
        self._announcer.stage(stage)

    def refused(
        self, step: int, choice: Choice, unit: Sequence[RequestShape], prefixes: Prefixes | None, oversize: bool
    ) -> None:
        """Report a decision that admitted nothing."""
        kind, reason = ReportKind.REFUSAL, choice.decision.reason
        self._write(lambda: self._report(kind, step, choice, tuple(unit), oversize, reason=reason, prefixes=prefixes))

    def planning_failed(self, step: int, unit: Sequence[RequestShape], oversize: bool, error: BaseException) -> None:
        """Report that planning itself failed, or was refused before a decision was made here, as by another rank."""
        kind = ReportKind.REFUSAL if isinstance(error, AdmissionRefused) else ReportKind.PLANNING_ERROR
        self._write(lambda: self._report(kind, step, None, tuple(unit), oversize, reason=str(error)))

    def observed(self, admitted: Admitted) -> None:
        """Report a complete step whose peaks were further from the forecast than the policy's threshold."""
        demand = admitted.choice.demand
        if demand is None:
            return
        allocated, reserved = self._device.peak_allocated(), self._device.peak_reserved()
        errors = _per_million(demand.peak_allocated, allocated), _per_million(demand.peak_reserved, reserved)
        if max(abs(each or 0) for each in errors) > self._policy.report_error_percent * (MILLION // 100):
            seen = Observed(allocated, reserved, *errors)
            self._write(lambda: self._executed(ReportKind.MISS, admitted, observed=seen))

    @contextmanager
    def during(self, admitted: Admitted) -> Iterator[None]:
        """Watch an execution. A failure is classified, reported, noted on the error, stripped of tensors, raised."""
        self.take_back()
        watch = Watch(self._device, self._place, self._fail)
        try:
            with watch:
                yield
        except BaseException as error:
            kind = failure_kind(error, watch.counted)
            if kind is not FailureKind.OTHER or isinstance(error, Exception):
                self._failed(admitted, watch, kind, error)
            raise

    def hand_over(self, admitted: Admitted) -> None:
        """Watch what the caller does with the outputs: its failures do not come this way, but its memory does."""
        self._caller = admitted, Watch(self._device, self._place, self._fail).__enter__()

    def take_back(self, error: BaseException | None = None) -> None:
        """End the watch on the caller, and report a memory failure there; ``error`` is what ended it, if known."""
        if self._caller is None:
            return
        (admitted, watch), self._caller = self._caller, None
        watch.__exit__(None, None, None)
        if watch.counted or watch.scenes:
            kind = failure_kind(error or RuntimeError(), watch.counted)
            self._write(lambda: self._failure_report(admitted, watch, kind, error))

    def _failed(self, admitted: Admitted, watch: Watch, kind: FailureKind, error: BaseException) -> None:
        identity = self._write(lambda: self._failure_report(admitted, watch, kind, error))
        assert admitted.choice.plan is not None
        where = watch.scenes[-1] if watch.scenes else self._place
        _, subforward = failing_subforward(admitted.choice.plan, where.stage) or (None, None)
        error.add_note(
            f"micro-batch {admitted.step} failed in {where.stage}{f' at {where.part}' if where.part else ''} ({kind}), "
            f"requests {list(subforward.indices) if subforward else []}, report {identity or 'not kept'}"
        )
        forget_frames(error)

    def _failure_report(
        self, admitted: Admitted, watch: Watch, kind: FailureKind, error: BaseException | None
    ) -> Report:
        assert admitted.choice.plan is not None
        peaks = Peaks(self._device.peak_allocated(), self._device.peak_reserved())
        plan, forecaster = admitted.choice.plan, admitted.forecaster
        failure = describe_failure(kind, error, plan, forecaster, watch, self._revision, peaks)
        reported = ReportKind.FAILURE if kind is FailureKind.OTHER else ReportKind.OUT_OF_MEMORY
        return self._executed(reported, admitted, failure=failure)

    def _executed(
        self, kind: ReportKind, admitted: Admitted, *, observed: Observed | None = None, failure: Failure | None = None
    ) -> Report:
        step, choice, _ = admitted
        assert choice.plan is not None
        shapes = [shape for subforward in choice.plan.subforwards for shape in subforward.requests]
        ordered = tuple(sorted(shapes, key=lambda shape: shape.index))
        oversized, prefixes = choice.decision.outcome is Outcome.ADMITTED_OVERSIZED, choice.plan.subforwards[0].prefixes
        return self._report(
            kind, step, choice, ordered, oversized, observed=observed, failure=failure, prefixes=prefixes
        )

    def _report(
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
    ) -> Report:
        return Report(
            kind=kind,
            origin=self._origin,
            step=step,
            caller_step=self.caller_step,
            policy=self._policy,
            requests=requests,
            choice=choice,
            oversize=oversize,
            observed=observed,
            failure=failure,
            reason=reason,
            prefixes=prefixes,
        )

    def _write(self, make: Callable[[], Report]) -> str | None:
        try:
            report = make()
            identity = None if self._spool is None else self._spool.write(report.document())
        except Exception:  # whatever keeps a report from being written, training goes on as without one
            self._fail()
            return None
        self._announcer.event("report", kind=report.kind.value, step=report.step, id=identity)
        return identity

    def _fail(self) -> None:
        self._announcer.failures += 1


def _per_million(forecast: int | None, observed: int) -> int | None:
    return None if forecast is None else (forecast - observed) * MILLION // max(1, observed)
