"""Keep physically free what was promised: to libraries, to collectives, and to the rest of an admitted plan.

Two mechanisms. While outputs are under way, the allocator is capped at what it holds plus what is free minus the
claims: it then returns its own cache before it takes what was promised. And where claims are not covered already,
the cache is released, at most once per question, within the account's budget.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from time import perf_counter_ns
from typing import TYPE_CHECKING, NamedTuple

import torch

from trainer_rank.admission.budget import Status, Term
from trainer_rank.errors import UnsupportedError
from trainer_rank.events import Announcer
from trainer_rank.policies import HandOff, Policy
from trainer_rank.release.account import Account, Balance, Clock, Permission, Reason, permit
from trainer_rank.release.caches import Released, release, segment_nanoseconds
from trainer_rank.release.libraries import BACKWARD, COLLECTIVE, FORWARD, Libraries

if TYPE_CHECKING:
    from trainer_rank.devices.protocol import Device

Exchange = Callable[[Balance], Balance]


class _Reading(NamedTuple):
    """Physically free bytes, and those outside PyTorch's allocator."""

    free: int
    outside: int


class _Attempt(NamedTuple):
    """The answer to a question for a release, what was released, and this rank's own cost until then."""

    permission: Permission
    done: Released | None
    cost: float


class Headroom:
    """Claims of one rank on its device, and the releases that make them good. Bytes.

    ``exchange`` folds the balances of all ranks; each of them calls it at every hand-off. Without it, and at every
    other moment, the rank decides alone. While ``observe`` it decides and reports, and releases nothing. ``recorded``:
    what libraries took by phase in an earlier process; of it and the card's figure the larger one is claimed.
    """

    def __init__(
        self,
        device: Device,
        policy: Policy,
        announcer: Announcer,
        *,
        clock: Clock = perf_counter_ns,
        exchange: Exchange | None = None,
        recorded: tuple[Term, ...] = (),
    ) -> None:
        self._device = device
        self._policy = policy
        self._announcer = announcer
        self._exchange = exchange
        self.observe = False
        self._account = Account(os.getpid(), clock)
        self._recorded = {claim.name: claim for claim in recorded}
        self._libraries = Libraries(_expected(device, policy, self._recorded) if policy.claims_libraries else {})
        self._refill = _Refill(device)
        self._callers_cap: int | None = None
        self._capped = False
        if policy.hand_off is not HandOff.NEVER or policy.release_on_refusal:
            with device.activate(), device.side_stream():
                pass  # a card's first side streams take driver memory, which a release would find missing

    def claims(self) -> tuple[Term, ...]:
        """Return what libraries and collectives will still take."""
        return self._libraries.due(self._read().outside) if self._policy.claims_libraries else ()

    @property
    def unknown(self) -> bool:
        """Whether libraries will take what nobody knows."""
        return self._libraries.unknown

    def torn_down(self) -> None:
        """Count on libraries taking again what they took: handles or communicators were destroyed."""
        self._libraries.torn_down()

    def working(self) -> AbstractContextManager[None]:
        """Credit the forward work inside to the release account."""
        return self._account.work(os.getpid())

    @contextmanager
    def protected(self, phase: str, name: str | None = None) -> Iterator[None]:
        """Run a phase in which libraries may take memory: make all claims good first, learn from it when it ends."""
        self.make_room(name or phase)
        with self.learning(phase):
            yield

    def make_room(self, what: str) -> None:
        """Make all claims good, by a release where it is needed, before ``what`` begins."""
        if self._policy.claims_libraries:
            self._cover(what, 0)

    @contextmanager
    def learning(self, phase: str) -> Iterator[None]:
        """Learn what libraries take in the phase inside, when it runs to its end."""
        if not self._policy.claims_libraries:
            yield
            return
        with self._account.instrumentation(os.getpid()):
            before = self._read().outside
        yield
        with self._account.instrumentation(os.getpid()):
            self._libraries.ran(phase, before, self._read().outside)

    def has_run(self, phase: str) -> bool:
        """Say whether the phase has run to its end here."""
        return phase in self._libraries.sizes

    def learned(self) -> tuple[Term, ...]:
        """Return what libraries took by phase, measured here or before. A phase in which nothing grew says nothing.

        Its libraries may have been loaded already, by another rank of the process for one.
        """
        found = dict(self._recorded)
        for phase, size in self._libraries.sizes.items():
            if size > (found[phase].size or 0 if phase in found else 0):
                found[phase] = Term(phase, size, Status.MEASURED, f"growth outside PyTorch on {self._device.name}")
        return tuple(found.values())

    def hand_off(self, growth: int | None, trains: bool) -> None:
        """Before outputs reach the caller: release the cache where the policy says so.

        ``growth``: driver bytes that the plan may still take, None when it was not forecast. A denial changes nothing.
        """
        if self._policy.hand_off is HandOff.COVERAGE:
            self._cover("hand-off", growth or 0, self._exchange)
        elif self._policy.hand_off is HandOff.ALWAYS:
            self.release("hand-off", lambda: True, self._exchange)
        elif self._policy.hand_off is HandOff.BELOW_THREE_PERCENT:
            self.release("hand-off", lambda: trains and self._below_three_percent(), self._exchange)

    def release(self, why: str, needed: Callable[[], bool], exchange: Exchange | None = None) -> bool:
        """Return the cache to the driver if it is needed and the account grants it; says whether it did.

        Never part of a retry. Finding out is charged like everything else. With an ``exchange`` any rank's need counts.
        """
        with self.releasing(why, needed, exchange) as released:
            return released

    @contextmanager
    def releasing(self, why: str, needed: Callable[[], bool], exchange: Exchange | None = None) -> Iterator[bool]:
        """Release as :meth:`release` does; what is done inside, such as planning anew, is charged to the episode."""
        attempt: _Attempt | None = None
        try:
            with self._account.episode(os.getpid()) as episode:
                attempt = self._attempt(needed, exchange)
                episode.released = attempt is not None and attempt.done is not None
                yield episode.released
        finally:
            if attempt is not None:
                with self._account.instrumentation(os.getpid()):
                    self._tell(why, attempt)

    def _attempt(self, needed: Callable[[], bool], exchange: Exchange | None) -> _Attempt | None:
        """Return the answer and what was released; None when nobody asked for a release."""
        owner = os.getpid()
        self._account.refill(owner, self._refill.due())
        need = needed() and self._device.reserved() > self._device.allocated()
        if not need and exchange is None:
            return None
        balance = self._account.balance(owner, need)
        permission = permit(exchange(balance) if exchange else balance, self._policy.release_per_million)
        if permission.granted and not self.observe:
            return _Attempt(*self._released(permission), balance.cost)
        return _Attempt(permission, None, balance.cost)

    def cap(self, reserve: int) -> None:
        """Keep PyTorch out of the claims and ``reserve`` bytes: cap it at what it holds plus what is free beyond."""
        if not self._policy.claims_libraries or self._capped:
            return
        with self._account.instrumentation(os.getpid()):
            reading = self._read()
            due = _due(self._libraries.due(reading.outside), reserve)
            room = 0 if due is None else self._device.reserved() + reading.free - due
            self._callers_cap, self._capped = self._device.cap(), True
            if room > 0:
                self._device.set_cap(room if self._callers_cap is None else min(room, self._callers_cap))

    def uncap(self) -> None:
        """Give the caller's own cap back: what was promised has been taken, or is no longer wanted."""
        if self._capped:
            self._capped = False
            self._device.set_cap(self._callers_cap)

    def _cover(self, what: str, growth: int, exchange: Exchange | None = None) -> None:
        """Release unless free memory covers the claims and ``growth``; report the claims and what is free then."""
        seen: list[tuple[_Reading, tuple[Term, ...]]] = []

        def short() -> bool:
            reading = self._read()
            claims = self._libraries.due(reading.outside)
            seen.append((reading, claims))
            due = _due(claims, growth)
            return due is None or reading.free < due

        released = self.release(what, short, exchange)
        reading, claims = seen[0]
        with self._account.instrumentation(os.getpid()):
            if released:
                reading = self._read()
            due = _due(claims, growth)
            if due != growth:
                told = [asdict(claim) for claim in claims]
                self._announcer.event("headroom", before=what, free=reading.free, due=due, growth=growth, claims=told)

    def _below_three_percent(self) -> bool:
        free, total = self._device.memory_info()
        return free * 100 < total * 3

    def _released(self, permission: Permission) -> tuple[Permission, Released | None]:
        try:
            done = release(self._device, self._policy.release_scope)
        except UnsupportedError:
            return Permission(False, Reason.UNSUPPORTED, permission.balance, permission.per_million), None
        self._refill.begin(done.segments)
        return permission, done

    def _tell(self, why: str, attempt: _Attempt) -> None:
        permission, done, cost = attempt
        now, before = self._account.balance(os.getpid(), need=False), permission.balance
        self._announcer.event(
            "release",
            why=why,
            granted=permission.granted,
            reason=permission.reason.value,
            observed_only=self.observe,
            per_million=permission.per_million,
            cost_ns=round(before.cost),
            dearest_ns=None if before.dearest is None else round(before.dearest),
            work_ns=round(before.work),
            releases=before.releases,
            charged_ns=round(now.cost - cost),
            shrunk={} if done is None else dict(done.shrunk),
            segments=0 if done is None else done.segments,
            release_ns=0 if done is None else done.nanoseconds,
            refill_ns_per_segment=self._refill.nanoseconds,
            free=self._device.memory_info().free,
        )

    def _read(self) -> _Reading:
        free, total = self._device.memory_info()
        return _Reading(free, total - free - self._device.reserved())


class _Refill:
    """What a release costs afterwards: each segment that the allocator takes again, up to as many as it returned."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._left = self._seen = 0
        self.nanoseconds: int | None = None

    def begin(self, segments: int) -> None:
        """Count from here, after a release of ``segments``; measures once what a segment costs."""
        if self.nanoseconds is None:
            self.nanoseconds = segment_nanoseconds(self._device)
        self._left, self._seen = segments, self._device.driver_allocations()

    def due(self) -> int:
        """Return the nanoseconds of what was taken again since this was last asked."""
        if not self._left or self.nanoseconds is None:
            return 0
        taken = self._device.driver_allocations()
        counted = min(self._left, taken - self._seen)
        self._left, self._seen = self._left - counted, taken
        return counted * self.nanoseconds


def _expected(device: Device, policy: Policy, recorded: Mapping[str, Term]) -> dict[str, Term]:
    """What the phases of a fresh process take: the larger of the card's figure and what tapes recorded, or unknown."""
    card, peers = device.card, _has_peers()
    forward = card.held_outside("first_forward", peers)
    sizes = {FORWARD: forward - card.context, BACKWARD: card.held_outside("first_backward", peers) - forward}
    found = {
        phase: Term(f"libraries of {phase}", size, Status.MEASURED, f"card {card.name}")
        if card.outside
        else Term(f"libraries of {phase}", None, Status.UNKNOWN, f"card {card.name} has no figure and none has run")
        for phase, size in sizes.items()
    }
    source = f"policy {policy.name}, until one has run"
    found[COLLECTIVE] = Term("first collective", policy.collective_claim_bytes, Status.BOUNDED, source)
    for phase, claim in found.items():
        known = recorded.get(phase)
        if known is not None and (known.size or 0) > (claim.size or 0):
            found[phase] = replace(known, name=claim.name)
    return found


def _has_peers() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _due(claims: tuple[Term, ...], growth: int) -> int | None:
    """Return the bytes that must be free, None when a claim is unknown."""
    sizes = [claim.size for claim in claims]
    known = [size for size in sizes if size is not None]
    return sum(known) + growth if len(known) == len(sizes) else None
