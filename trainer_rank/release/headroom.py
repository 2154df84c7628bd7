"""Keep physically free what was promised: to libraries, to collectives, and to the backward's own growth.

What lies outside PyTorch's allocator is read as physical minus reserved. The highest reading so far is what libraries
come to hold in this process; whatever is missing from it now (a handle not yet built, a communicator torn down) is due
again, and is claimed until it is there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter_ns
from typing import TYPE_CHECKING

from trainer_rank.admission.budget import Status, Term
from trainer_rank.events import Announcer
from trainer_rank.policies import HandOff, Policy
from trainer_rank.release.account import Account, permit

if TYPE_CHECKING:
    from trainer_rank.devices.protocol import Device


class Headroom:
    """Claims of one rank on its device, and the releases that make them good. Bytes."""

    def __init__(self, device: Device, policy: Policy, announcer: Announcer) -> None:
        self._device = device
        self._policy = policy
        self._announcer = announcer
        self._highest: int | None = None
        self._collective_met = False
        self._account = Account(device.name, perf_counter_ns)

    def learn(self) -> None:
        """Read what lies outside the allocator after a forward and backward, a step or a collective has run."""
        self._highest = max(self._highest or 0, self._outside())

    def claims(self) -> tuple[Term, ...]:
        """Return what libraries and collectives will still take."""
        if not self._policy.claims_libraries:
            return ()
        found = [self._libraries()]
        if not self._collective_met:
            size, source = self._policy.collective_claim_bytes, f"policy {self._policy.name}, until one has run"
            found.append(Term("first collective", size, Status.BOUNDED, source))
        return tuple(found)

    def hand_off(self, growth: int | None, trains: bool) -> None:
        """Before outputs reach the caller: release the cache where the policy says so.

        ``growth``: driver bytes that the plan may still take, None when it was not forecast. A denial changes nothing.
        """
        memory = self._device.memory_info()
        slack = self._device.reserved() > self._device.allocated()
        due = sum(claim.size or 0 for claim in self.claims())
        wanted = {
            HandOff.NEVER: False,
            HandOff.ALWAYS: True,
            HandOff.BELOW_THREE_PERCENT: memory.free * 100 < memory.total * 3 and trains,
            HandOff.COVERAGE: memory.free < due + (growth or 0),
        }[self._policy.hand_off]
        if wanted and slack:
            self.release(f"hand-off with {memory.free} B free, {due + (growth or 0)} B due")

    def release(self, why: str) -> bool:
        """Return the cache to the driver if the account grants it; says whether it did. Never part of a retry."""
        owner, returned = self._device.name, 0
        with self._account.episode(owner) as episode:
            permission = permit(self._account.balance(owner, need=True), self._policy.release_per_million)
            if permission.granted:
                with self._device.activate():
                    returned = self._device.empty_cache()
                episode.released = True
        balance = self._account.balance(owner, need=False)
        self._announcer.event(
            "release",
            why=why,
            granted=permission.granted,
            reason=permission.reason.value,
            returned=returned,
            free=self._device.memory_info().free,
            cost_ns=int(balance.cost),
            work_ns=int(balance.work),
        )
        return permission.granted

    def working(self) -> AbstractContextManager[None]:
        """Credit the forward work inside to the release account."""
        return self._account.work(self._device.name)

    @contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """Protect a collective outside any hand-off: its claim is made good before it runs, and learned from it."""
        claims = self.claims()
        due = sum(claim.size or 0 for claim in claims)
        if self._policy.hand_off is HandOff.COVERAGE and self._device.memory_info().free < due:
            self.release(f"collective {name}, {due} B due")
        self._announcer.event(
            "collective",
            name=name,
            free=self._device.memory_info().free,
            due=due,
            claims=[{"name": claim.name, "size": claim.size, "source": claim.source} for claim in claims],
        )
        yield
        self._collective_met = True
        self.learn()

    def _libraries(self) -> Term:
        if self._highest is None:
            card = self._device.card
            due = card.held_outside("first_backward") - card.context
            return Term("libraries", due, Status.MEASURED, f"card {card.name}: from context to first_backward")
        due = max(0, self._highest - self._outside())
        return Term("libraries", due, Status.MEASURED, "highest reading outside the allocator less the present one")

    def _outside(self) -> int:
        memory = self._device.memory_info()
        return memory.total - memory.free - self._device.reserved()
