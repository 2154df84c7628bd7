"""Leases: the right to use a device, in force only with the newest fencing token and a fresh heartbeat.

Expiry revokes authority, not occupancy: a device whose lease ran out is given to nobody before a CLEAN probe. The rules
are here, pure; who stores them (``db.leases``) implements :class:`LeaseStore`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from qualification.execution.supervisor import LeaseLost
from qualification.records import Count, Lease, Process, ReceiptStatus, Record

EXPIRY_SECONDS = 30
HEARTBEAT_SECONDS = 10

__all__ = [
    "EXPIRY_SECONDS",
    "HEARTBEAT_SECONDS",
    "Holding",
    "LeaseLost",
    "LeaseRequest",
    "LeaseStore",
    "Resource",
    "Waiting",
    "assign",
]


class LeaseRequest(Record, frozen=True, kw_only=True):
    """What a run asks for: ``count`` of ``candidates`` (device identities), all at once. Higher priority goes first.

    ``folder`` is the run's folder, where recovery finds who was started; ``host`` and ``holder`` say who asks.
    """

    run: str
    attempt: Count
    candidates: tuple[str, ...]
    count: Count
    folder: str
    host: str
    holder: Process
    priority: int = 0


class Resource(Record, frozen=True, kw_only=True):
    """What is known of a device. ``baseline_bytes`` was read when it was idle; None when it never was.

    ``folders`` are those of the runs that had it since it was last given back CLEAN.
    """

    name: str
    token: Count
    baseline_bytes: Count | None
    quarantine: str | None
    folders: tuple[str, ...] = ()


class Holding(Record, frozen=True, kw_only=True):
    """One lease that is not closed: who has the device, and whether its authority has run out."""

    lease: Lease
    run: str
    attempt: Count
    folder: str
    host: str
    holder: Process
    acquired_at: str
    expires_at: str
    expired: bool


class Waiting(Record, frozen=True, kw_only=True):
    """Why a request was not granted now: each blocked device and its reason, and the place in the queue."""

    position: Count
    blocked: dict[str, str]
    expired: tuple[Holding, ...] = ()
    quarantined: tuple[Resource, ...] = ()

    @property
    def reason(self) -> str:
        """Return one line for people."""
        devices = "; ".join(f"{name}: {reason}" for name, reason in self.blocked.items())
        return f"place {self.position + 1} in the queue; {devices}" if devices else f"place {self.position + 1}"


class LeaseStore(Protocol):
    """Leases shared by every process that uses one database. Each method is one transaction."""

    def enqueue(self, request: LeaseRequest) -> int:
        """Take a place in the queue and return its ticket. Tickets that stop asking lose their place after 30 s."""

    def try_acquire(self, ticket: int) -> tuple[Lease, ...] | Waiting:
        """Grant all that the ticket asks for, with fresh tokens, or say why not now. UnknownError if it lapsed."""

    def withdraw(self, ticket: int) -> None:
        """Leave the queue."""

    def heartbeat(self, leases: Sequence[Lease]) -> None:
        """Extend leases by 30 s. Raises LeaseLost when any has expired or its token is no longer in force."""

    def check(self, leases: Sequence[Lease]) -> None:
        """Raise LeaseLost unless every lease is in force now. Called right before the first touch of a device."""

    def adopt(self, lease: Lease, holder: Process, host: str) -> Lease:
        """Take over an expired lease to recover it, under a fresh token. Raises LeaseLost unless expired and open."""

    def release(self, lease: Lease, status: ReceiptStatus, reason: str | None = None) -> None:
        """Close a lease with its receipt's status, expired or not; anything but CLEAN quarantines the device.

        Raises LeaseLost when the lease is closed already or another token is in force.
        """

    def quarantine(self, resource: str, reason: str) -> None:
        """Keep a device from being leased until :meth:`lift`."""

    def lift(self, resource: str, baseline_bytes: int | None) -> None:
        """End a quarantine after a CLEAN probe, and remember the idle baseline that it read."""

    def resources(self) -> tuple[Resource, ...]:
        """Return every device ever asked for."""

    def holdings(self) -> tuple[Holding, ...]:
        """Return every lease that is not closed, oldest first."""


def assign(free: Iterable[str], tickets: Iterable[tuple[int, Sequence[str], int]]) -> dict[int, tuple[str, ...]]:
    """Return who gets what now: ``tickets`` are (ticket, candidates, count) in the order of the queue.

    A ticket gets everything it asks for or nothing. One that must wait keeps the free devices it could use from those
    behind it, so that a large request is not overtaken for ever.
    """
    left = list(free)
    granted: dict[int, tuple[str, ...]] = {}
    for ticket, candidates, count in tickets:
        usable = [name for name in candidates if name in left]
        if len(usable) >= count:
            granted[ticket] = tuple(usable[:count])
            usable = usable[:count]
        left = [name for name in left if name not in usable]
    return granted
