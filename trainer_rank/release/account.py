"""The release account: what cache releases cost against the forward work that was done. Pure; the clock is injected.

Charged is the whole episode: exchange, sampling, release, sampling again, the renewed search, and refill, whether the
release was permitted, denied or failed; and what the account's own instrumentation takes. Credited is completed forward
work and nothing else. It is an accounting rule, not a bound on the total slowdown. Any one unit of time will do;
integers and floats compare exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction

from trainer_rank.errors import InvalidInputError

MILLION = 1_000_000
Clock = Callable[[], float]


class Reason(StrEnum):
    """Why a release was permitted or denied."""

    UNLIMITED = "the policy sets no budget"
    FIRST = "first necessary release"
    WITHIN = "cost and dearest episode lie within the budget"
    NOT_NEEDED = "no rank needs a release"
    OVER = "cost and dearest episode exceed the budget"
    NO_DEAREST = "no dearest episode is known"
    INVALID = "a figure of the account is no finite number of at least zero"
    CLOCK = "the clock is invalid"
    OWNER = "the account belongs to another owner"
    UNSUPPORTED = "the allocator's settings forbid it"


@dataclass(frozen=True)
class Balance:
    """An account's figures, in units of its clock. ``dearest`` is the dearest episode, None while there was none.

    ``need``: this rank needs a release now; ``fault``: why its figures cannot be trusted.
    """

    cost: float = 0
    dearest: float | None = None
    work: float = 0
    releases: int = 0
    need: bool = True
    fault: Reason | None = None


@dataclass(frozen=True)
class Permission:
    """Whether a release may happen, why, and the figures that it turned on."""

    granted: bool
    reason: Reason
    balance: Balance
    per_million: int | None


def permit(balance: Balance, per_million: int | None) -> Permission:
    """Decide on a release: ``cost + dearest <= per_million / 1,000,000 x work``, inclusive; the first one is free.

    ``per_million`` None means no budget. A fault or a figure that is no finite number denies whatever the policy.
    """
    granted, reason = _decided(balance, per_million)
    return Permission(granted, reason, balance, per_million)


def _decided(balance: Balance, per_million: int | None) -> tuple[bool, Reason]:
    figures = (balance.cost, balance.work, *(() if balance.dearest is None else (balance.dearest,)))
    if balance.fault is not None:
        return False, balance.fault
    if not all(map(_countable, figures)):
        return False, Reason.INVALID
    if not balance.need:
        return False, Reason.NOT_NEEDED
    if per_million is None:
        return True, Reason.UNLIMITED
    if balance.releases == 0:
        return True, Reason.FIRST
    if balance.dearest is None:
        return False, Reason.NO_DEAREST
    spent = Fraction(balance.cost) + Fraction(balance.dearest)
    within = spent * MILLION <= per_million * Fraction(balance.work)
    return within, Reason.WITHIN if within else Reason.OVER


def fold(balances: list[Balance]) -> Balance:
    """Fold the balances of all ranks: costs summed, work by maximum, need by any, validity by all."""
    if not balances:
        raise InvalidInputError("no balance to fold; give one of each rank")
    dearest = [balance.dearest for balance in balances]
    return Balance(
        cost=sum(balance.cost for balance in balances),
        dearest=None if None in dearest else sum(each for each in dearest if each is not None),
        work=max(balance.work for balance in balances),
        releases=max(balance.releases for balance in balances),
        need=any(balance.need for balance in balances),
        fault=next((balance.fault for balance in balances if balance.fault is not None), None),
    )


class Episode:
    """One attempt at a release; set ``released`` when caches were really given back."""

    def __init__(self) -> None:
        self.released = False


class Account:
    """One rank's account. ``owner`` is whoever may use it; anyone else gets no release. Not for several threads."""

    def __init__(self, owner: Hashable, clock: Clock) -> None:
        self._owner = owner
        self._clock = clock
        self._balance = Balance(need=False)
        self._latest: float | None = None
        self._open: Episode | None = None

    def balance(self, owner: Hashable, need: bool) -> Balance:
        """Return the figures as ``owner`` may use them now; charges of an open episode come at its end."""
        fault = self._balance.fault or (None if owner == self._owner else Reason.OWNER)
        return replace(self._balance, need=need, fault=fault)

    @contextmanager
    def episode(self, owner: Hashable) -> Iterator[Episode]:
        """Charge what happens inside to ``owner``'s account, also when it raises. Episodes do not nest."""
        if self._open is not None:
            raise InvalidInputError("a release episode is open already; end it before the next one")
        begun = self._now()
        self._open = episode = Episode()
        try:
            yield episode
        finally:
            self._open = None
            spent = self._since(begun)
            if owner == self._owner and spent is not None:
                self._charge(spent, episode.released)

    @contextmanager
    def instrumentation(self, owner: Hashable) -> Iterator[None]:
        """Charge what looking and reporting inside cost, also when it raises; it belongs to no episode."""
        begun = self._now()
        try:
            yield
        finally:
            spent = self._since(begun)
            if owner == self._owner and spent is not None:
                self._balance = replace(self._balance, cost=self._balance.cost + spent)

    @contextmanager
    def work(self, owner: Hashable) -> Iterator[None]:
        """Credit the forward work inside; nothing when it raises."""
        begun = self._now()
        yield
        spent = self._since(begun)
        if owner == self._owner and spent is not None:
            self._balance = replace(self._balance, work=self._balance.work + spent)

    def refill(self, owner: Hashable, cost: float) -> None:
        """Charge what later allocations lost because the latest release had emptied the cache."""
        if owner != self._owner or self._latest is None:
            return
        if not _countable(cost):
            self._balance = replace(self._balance, fault=Reason.INVALID)
            return
        self._latest += cost
        dearest = max(self._latest, self._balance.dearest or 0)
        self._balance = replace(self._balance, cost=self._balance.cost + cost, dearest=dearest)

    def _charge(self, spent: float, released: bool) -> None:
        before = self._balance
        dearest = spent if before.dearest is None else max(spent, before.dearest)
        self._balance = replace(
            before, cost=before.cost + spent, dearest=dearest, releases=before.releases + int(released)
        )
        if released:
            self._latest = spent

    def _now(self) -> float | None:
        try:
            now = self._clock()
        except Exception:  # a clock may fail in any way; without it there is no release
            now = math.nan
        if type(now) in (int, float) and math.isfinite(now):
            return now
        self._balance = replace(self._balance, fault=Reason.CLOCK)
        return None

    def _since(self, begun: float | None) -> float | None:
        """Return the time since ``begun``; a clock that goes back is invalid from then on."""
        now = self._now()
        if begun is None or now is None:
            return None
        if now < begun:
            self._balance = replace(self._balance, fault=Reason.CLOCK)
            return None
        return now - begun


def _countable(value: float) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0
