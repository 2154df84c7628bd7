"""The thin shell round the decision: sample the device, forecast from the sample, decide, release and decide again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trainer_rank.admission.budget import Budget, Status, Term
from trainer_rank.admission.ladder import ladder
from trainer_rank.admission.planner import Choice, Unit, choose, consider, unforecast
from trainer_rank.admission.vote import Proposal
from trainer_rank.allocator.rules import LARGE_SEGMENT, SMALL_SEGMENT
from trainer_rank.forecasting import Sample
from trainer_rank.packing import GroupKey
from trainer_rank.policies import Policy
from trainer_rank.prefixes import Prefixes
from trainer_rank.probing import Probes
from trainer_rank.release.caches import without_unused
from trainer_rank.release.headroom import Headroom
from trainer_rank.release.libraries import BACKWARD

if TYPE_CHECKING:
    from trainer_rank.admission.agree import Agreement
    from trainer_rank.devices.protocol import Device


class Sampler:
    """Makes one decision from one fresh sample each time it is asked; nothing is carried over."""

    def __init__(
        self, device: Device, policy: Policy, probes: Probes, headroom: Headroom, agreement: Agreement | None = None
    ) -> None:
        self._device = device
        self._policy = policy
        self._rungs = ladder(policy.ladder)
        self._probes = probes
        self._headroom = headroom
        self._agreement = agreement
        self._prefixes: Prefixes | None = None
        self._samples = 0

    def choose(
        self, pending: Sequence[Unit], prefixes: Prefixes | None, optimizer_bytes: int, oversize: bool
    ) -> Choice:
        """Decide how the next micro-batch runs; ``optimizer_bytes`` is the state that its step will create.

        Kinds of pass that were never recorded are probed first. When nothing fits, the policy may release the cache,
        once, and the decision is made again from a new sample.
        """
        if not self._policy.forecasts:
            return unforecast(pending, self._budget(optimizer_bytes)[0], self._policy.name, prefixes)
        keys = {GroupKey(each.slot, each.gradients, each.hidden) for unit in pending for each in unit}
        if missing := self._probes.missing(keys):
            with self._headroom.protected(BACKWARD, "probes"):
                self._probes.prepare(missing)
        self._prefixes = prefixes
        if self._agreement is None:
            return self._alone(pending, optimizer_bytes, oversize)
        return self._agreement.decide(
            lambda: self._alone(pending, optimizer_bytes, oversize),
            lambda proposal: self._review(pending, optimizer_bytes, oversize, proposal),
            oversize=oversize,
        )

    def _review(self, pending: Sequence[Unit], optimizer_bytes: int, oversize: bool, proposal: Proposal) -> Choice:
        budget, sample = self._budget(optimizer_bytes)
        forecaster, (width, ordinal) = self._probes.forecaster(sample), (proposal.units, proposal.ordinal)
        return consider(
            pending, self._rungs, forecaster, budget, width, ordinal, oversize=oversize, prefixes=self._prefixes
        )

    def _alone(self, pending: Sequence[Unit], optimizer_bytes: int, oversize: bool) -> Choice:
        budget, sample = self._budget(optimizer_bytes)
        choice = self._decide(pending, budget, sample)
        if choice.plan is not None:
            return choice
        if self._policy.release_on_refusal:
            self._headroom.release(choice.decision.reason, lambda: self._helps(pending, budget, sample))
            budget, sample = self._budget(optimizer_bytes)
        return self._decide(pending, budget, sample, oversize=oversize, last=True)

    def _helps(self, pending: Sequence[Unit], budget: Budget, sample: Sample) -> bool:
        """Say whether the smallest plan would be admitted after a release; policies without claims just try."""
        if not self._policy.claims_libraries:
            return True
        left = without_unused(sample.snapshot)
        free = budget.free + sample.snapshot.reserved - left.reserved
        after = Sample(sample.ordinal, sample.memory._replace(free=free), left)
        return self._decide(pending, replace(budget, free=free), after).plan is not None

    def _decide(
        self, pending: Sequence[Unit], budget: Budget, sample: Sample, *, oversize: bool = False, last: bool = False
    ) -> Choice:
        forecaster, by_cost = self._probes.forecaster(sample), self._agreement is None
        return choose(
            pending,
            self._rungs,
            forecaster,
            budget,
            oversize=oversize,
            by_cost=by_cost,
            explain=last,
            prefixes=self._prefixes,
        )

    def _budget(self, optimizer_bytes: int) -> tuple[Budget, Sample]:
        self._samples += 1
        memory = self._device.memory_info()
        claims = [
            Term("reserve", self._policy.reserve_bytes, Status.BOUNDED, f"policy {self._policy.name}"),
            *self._headroom.claims(),
        ]
        if optimizer_bytes and self._policy.claims_libraries:
            size = optimizer_bytes + LARGE_SEGMENT + SMALL_SEGMENT
            claims.append(Term("optimizer state", size, Status.BOUNDED, "adapter shapes and a segment of each pool"))
        sample = Sample(self._samples, memory, self._device.snapshot())
        return Budget(self._samples, memory.free, memory.total, tuple(claims)), sample
