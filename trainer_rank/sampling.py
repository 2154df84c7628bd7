"""The thin shell round the decision: sample the device, forecast from the sample, decide, release and decide again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from trainer_rank.admission.budget import Budget, Status, Term
from trainer_rank.admission.ladder import Retention, Rung, ladder
from trainer_rank.admission.planner import Choice, Unit, choose, consider, unforecast, with_figures
from trainer_rank.admission.vote import Proposal
from trainer_rank.allocator.rules import LARGE_SEGMENT, SMALL_SEGMENT
from trainer_rank.errors import AdmissionRefused
from trainer_rank.forecasting import PassKey, PlanForecaster, Sample
from trainer_rank.hostmemory import available_host_memory
from trainer_rank.packing import GroupKey, sharing_groups
from trainer_rank.policies import Policy
from trainer_rank.prefixes import Prefixes
from trainer_rank.probing import LEAST_PROBES, Lengths, Probes
from trainer_rank.release.caches import without_unused
from trainer_rank.release.headroom import Headroom
from trainer_rank.release.libraries import BACKWARD, FORWARD

if TYPE_CHECKING:
    from trainer_rank.admission.agree import Agreement
    from trainer_rank.devices.protocol import Device


class Sampler:
    """Makes one decision from one fresh sample each time it is asked; nothing is carried over.

    ``exact_figures``: what is admitted is forecast by replay also where the decision did not need it.
    """

    def __init__(
        self,
        device: Device,
        policy: Policy,
        probes: Probes,
        headroom: Headroom,
        agreement: Agreement | None = None,
        *,
        exact_figures: bool = True,
    ) -> None:
        self._device = device
        self._policy = policy
        self._rungs = ladder(policy.ladder)
        self._near = tuple(rung for rung in self._rungs if rung.retention is Retention.DEVICE) or self._rungs
        self._probes = probes
        self._headroom = headroom
        self._agreement = agreement
        self._exact_figures = exact_figures
        self._prefixes: Prefixes | None = None
        self._sharing: frozenset[GroupKey] = frozenset()
        self._trains = True
        self._optimizer_bytes = self._samples = 0
        self._sample: Sample | None = None

    def choose(
        self, pending: Sequence[Unit], prefixes: Prefixes | None, prepare: Callable[[], int], oversize: bool
    ) -> Choice:
        """Decide how the next micro-batch runs; ``prepare`` makes room for its gradients and says what state of the
        optimizer its step will create, bytes.

        Kinds of pass that were never recorded are probed first, those that keep graphs elsewhere only when no other
        plan fits. When nothing fits, the policy may release the cache, and decides again from a new sample; one that
        can show that a release is enough makes it before other rungs are tried.
        """
        keys = {GroupKey(each.slot, each.gradients, each.hidden) for unit in pending for each in unit}
        self._prefixes, self._trains = prefixes, any(key.gradients for key in keys)
        if not self._policy.forecasts:
            self._optimizer_bytes = prepare()
            return unforecast(pending, self._budget()[0], self._policy.name, prefixes)

        def propose() -> Choice:
            self._optimizer_bytes = prepare()
            self._sharing = sharing_groups(pending, prefixes)
            self._record(keys, self._near)
            return self._alone(pending, keys, oversize)

        if self._agreement is None:
            return propose()
        return self._agreement.decide(
            propose, lambda proposal: self._review(pending, oversize, proposal), oversize=oversize
        )

    def tell(self, error: Exception) -> None:
        """Tell the other ranks, which wait for this one's plan, that something keeps it from planning."""
        if self._agreement is not None:
            self._agreement.tell(error)

    @property
    def forecaster(self) -> PlanForecaster | None:
        """What sees the device as it was in the sample that decided last; None when nothing is forecast."""
        if self._sample is None or not self._policy.forecasts:
            return None
        return self._probes.forecaster(self._sample)

    def _review(self, pending: Sequence[Unit], oversize: bool, proposal: Proposal) -> Choice:
        budget, sample = self._budget()
        budget = self._with_host(budget, self._rungs)
        forecaster, (width, ordinal) = self._probes.forecaster(sample), (proposal.units, proposal.ordinal)
        return consider(
            pending, self._rungs, forecaster, budget, width, ordinal, oversize=oversize, prefixes=self._prefixes
        )

    def _record(
        self, keys: Collection[GroupKey], rungs: Sequence[Rung], shapes: Sequence[Lengths] | None = None
    ) -> bool:
        """Record the kinds of pass that these rungs make of groups with these keys; says whether any was missing."""
        missing = self._missing(keys, rungs)
        if missing:
            self._headroom.make_room("probes")
            self._require_libraries(BACKWARD if self._trains else FORWARD)
            self._probes.prepare(missing, shapes)
        return bool(missing)

    def _missing(self, keys: Collection[GroupKey], rungs: Sequence[Rung]) -> dict[PassKey, GroupKey]:
        retentions = dict.fromkeys(rung.retention for rung in rungs)
        return self._probes.missing(keys, retentions, again=self._headroom.unknown, sharing=self._sharing)

    def _require_libraries(self, phase: str) -> None:
        """Refuse to probe where what libraries will take in the phase is not free: it would fail inside a library."""
        phases = (FORWARD,) if phase == FORWARD else (FORWARD, BACKWARD)
        names = [f"libraries of {each}" for each in phases]
        due = sum(claim.size or 0 for claim in self._headroom.claims() if claim.name in names)
        needed, free = due + self._policy.reserve_bytes, self._device.memory_info().free
        if free < needed:
            raise AdmissionRefused(
                f"nothing can be probed: libraries of {phase} will take {due} B and {free} B are free, "
                f"{needed - free} B too few with the reserve; free at least that, or lower the claims by it"
            )

    def _record_far(self, keys: Collection[GroupKey], budget: Budget, sample: Sample, placed: bool) -> bool:
        """Record what keeps graphs elsewhere, at the shapes that fit now, unless every rank has ``placed`` its work."""
        if not self._missing(keys, self._rungs) or self._probes.everyone(placed):
            return False
        shapes = self._probes.affordable(keys, budget, sample)
        return len(shapes) >= LEAST_PROBES and self._record(keys, self._rungs, shapes)

    def _alone(self, pending: Sequence[Unit], keys: Collection[GroupKey], oversize: bool) -> Choice:
        budget, sample = self._budget()
        choice = self._decide(pending, budget, sample, self._near)
        if choice.plan is None and self._policy.claims_libraries:
            helps = partial(self._helps, pending, budget, sample, self._near)
            with self._headroom.releasing(choice.decision.reason, helps) as released:
                if released:  # milliseconds, where other rungs must be recorded first and then run the forward twice
                    budget, sample = self._budget()
                    choice = self._decide(pending, budget, sample, self._near)
        if self._record_far(keys, budget, sample, choice.plan is not None):
            budget, sample = self._budget()
        if choice.plan is None:
            choice = self._decide(pending, budget, sample, self._rungs)
        if choice.plan is not None:
            return choice
        if not self._policy.release_on_refusal:
            return self._decide(pending, budget, sample, self._rungs, oversize=oversize, last=True)
        helps = partial(self._helps, pending, budget, sample, self._rungs)
        with self._headroom.releasing(choice.decision.reason, helps):
            budget, sample = self._budget()
            return self._decide(pending, budget, sample, self._rungs, oversize=oversize, last=True)

    def _helps(self, pending: Sequence[Unit], budget: Budget, sample: Sample, rungs: Sequence[Rung]) -> bool:
        """Say whether one of the rungs would be admitted after a release; policies without claims just try."""
        if not self._policy.claims_libraries:
            return True
        left = without_unused(sample.snapshot)
        free = budget.free + sample.snapshot.reserved - left.reserved
        after = Sample.of(sample.ordinal, sample.memory._replace(free=free), left)
        return self._decide(pending, replace(budget, free=free), after, rungs, figures=False).plan is not None

    def _decide(
        self,
        pending: Sequence[Unit],
        budget: Budget,
        sample: Sample,
        rungs: Sequence[Rung],
        *,
        oversize: bool = False,
        last: bool = False,
        figures: bool = True,
    ) -> Choice:
        alone = self._agreement is None  # another rank's room is not known here
        budget = self._with_host(budget, rungs)
        search = self._probes.forecaster(sample, budget.available if alone and not last else None)
        choice = choose(
            pending,
            rungs,
            search,
            budget,
            oversize=oversize,
            by_cost=alone,
            explain=last,
            prefixes=self._prefixes,
        )
        spared = choice.demand is not None and choice.demand.peak_reserved is None
        if not (figures and spared and self._exact_figures):
            return choice
        return with_figures(choice, self._probes.forecaster(sample, budget.available, figures=True))

    def _budget(self) -> tuple[Budget, Sample]:
        self._samples += 1
        memory = self._device.memory_info()
        claims = [
            Term("reserve", self._policy.reserve_bytes, Status.BOUNDED, f"policy {self._policy.name}"),
            *(each for each in self._headroom.claims() if self._trains or each.name != f"libraries of {BACKWARD}"),
        ]
        if self._optimizer_bytes and self._policy.claims_libraries:
            size = self._optimizer_bytes + LARGE_SEGMENT + SMALL_SEGMENT
            claims.append(Term("optimizer state", size, Status.BOUNDED, "adapter shapes and a segment of each pool"))
        if self._probes.first_pass_bytes and not self._headroom.has_run(BACKWARD):
            size = self._probes.first_pass_bytes + LARGE_SEGMENT + SMALL_SEGMENT
            claims.append(Term("first pass", size, Status.MEASURED, "tapes, and a segment of each pool"))
        device = self._device
        self._sample = sample = Sample(self._samples, memory, device.allocated(), device.reserved(), device.snapshot)
        return Budget(self._samples, memory.free, memory.total, tuple(claims)), sample

    def _with_host(self, budget: Budget, rungs: Sequence[Rung]) -> Budget:
        """Return the budget with what these rungs may take of the host; reading that costs as much as a decision."""
        if not any(rung.retention is Retention.HOST for rung in rungs):
            return budget
        host = available_host_memory()
        return replace(budget, host=None if host is None else host * self._policy.host_per_million // 1_000_000)
