"""The thin shell round the decision: sample the device, forecast from the sample, decide, release and decide again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainer_rank.admission.budget import Budget, Status, Term
from trainer_rank.admission.ladder import ladder
from trainer_rank.admission.planner import Choice, Unit, choose, unforecast
from trainer_rank.allocator.rules import LARGE_SEGMENT, SMALL_SEGMENT
from trainer_rank.forecasting import Sample
from trainer_rank.packing import GroupKey
from trainer_rank.policies import Policy
from trainer_rank.probing import Probes
from trainer_rank.release.headroom import Headroom

if TYPE_CHECKING:
    from trainer_rank.devices.protocol import Device


class Sampler:
    """Makes one decision from one fresh sample each time it is asked; nothing is carried over."""

    def __init__(self, device: Device, policy: Policy, probes: Probes, headroom: Headroom) -> None:
        self._device = device
        self._policy = policy
        self._rungs = ladder(policy.ladder)
        self._probes = probes
        self._headroom = headroom
        self._samples = 0

    def choose(self, pending: Sequence[Unit], optimizer_bytes: int, oversize: bool) -> Choice:
        """Decide how the next micro-batch runs; ``optimizer_bytes`` is the state that its step will create.

        Kinds of pass that were never recorded are probed first. When nothing fits, the policy may release the cache,
        once, and the decision is made again from a new sample.
        """
        if not self._policy.forecasts:
            return unforecast(pending, self._budget(optimizer_bytes)[0], self._policy.name)
        keys = {GroupKey(each.slot, each.gradients, each.hidden) for unit in pending for each in unit}
        if self._probes.prepare(keys):
            self._headroom.learn()
        choice = self._decide(pending, optimizer_bytes, oversize)
        if choice.plan is None and self._policy.release_on_refusal and self._released(choice):
            return self._decide(pending, optimizer_bytes, oversize)
        return choice

    def _released(self, choice: Choice) -> bool:
        cached = self._device.reserved() > self._device.allocated()
        return cached and self._headroom.release(f"refused: {choice.decision.reason}")

    def _decide(self, pending: Sequence[Unit], optimizer_bytes: int, oversize: bool) -> Choice:
        budget, sample = self._budget(optimizer_bytes)
        return choose(pending, self._rungs, self._probes.forecaster(sample), budget, oversize=oversize)

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
