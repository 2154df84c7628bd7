"""Get leases, hold them, and give them back by receipt. A device is touched only after it was read idle."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from qualification.errors import RefusedError, UnknownError
from qualification.execution.leases import EXPIRY_SECONDS, Holding, LeaseRequest, LeaseStore, Resource, Waiting
from qualification.execution.probes.gpus import GpuReader, is_virtual, occupancy
from qualification.execution.probes.host import leftover_processes
from qualification.execution.receipt import status_of_lease
from qualification.execution.supervision import CENSUS_FILE
from qualification.execution.supervisor import read_census
from qualification.records import Lease, Receipt, ReceiptStatus
from qualification.workloads import processes_of

ASK_SECONDS = 1.0
RECOVER_SECONDS = 3.0


class WaitCancelled(UnknownError):  # noqa: N818 - what happened, in the field's words
    """The request was cancelled before it was granted."""


class DeviceRefused(RefusedError):  # noqa: N818 - the outcome is called "refused" everywhere
    """A device cannot be leased now and waiting does not help: it does not read idle, or nobody can read it."""


@dataclass
class HeldLeases:
    """Leases in force: the authority under which a supervisor runs."""

    store: LeaseStore
    leases: tuple[Lease, ...]
    seconds: int = EXPIRY_SECONDS

    def renew(self) -> None:
        """Extend all leases. Raises LeaseLost."""
        self.store.heartbeat(self.leases)

    def check(self) -> None:
        """Raise LeaseLost unless all leases are in force now."""
        self.store.check(self.leases)

    def close(self, receipt: Receipt) -> None:
        """Close every lease by what the receipt says of its device; a device that is not CLEAN goes into quarantine.

        All are tried; the first error is raised, because a lease that did not close is not a detail.
        """
        errors: list[Exception] = []
        for lease in self.leases:
            status, reason = status_of_lease(receipt, lease)
            try:
                self.store.release(lease, status, reason)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


def acquire(
    store: LeaseStore,
    request: LeaseRequest,
    *,
    reader: GpuReader,
    recover: Callable[[Holding], str | None],
    waiting: Callable[[str], None],
    cancelled: Callable[[], str | None] | None = None,
    patience_seconds: float | None = None,
) -> HeldLeases:
    """Wait in the queue until everything asked for is leased and reads idle.

    ``recover`` is asked about leases that have expired: it closes what a dead holder left behind and returns None, or
    says why it cannot yet (the holder is alive). ``waiting`` hears each new reason. Raises DeviceRefused when a
    device is in quarantine and still not CLEAN, or does not read idle, or when ``patience_seconds`` are over, and
    WaitCancelled when ``cancelled`` gives a reason, before the queue too.
    """
    _require_wanted(cancelled)
    ticket = store.enqueue(request)
    deadline = None if patience_seconds is None else time.monotonic() + patience_seconds
    held: HeldLeases | None = None
    try:
        held = _queue(store, ticket, request, reader, recover, waiting, cancelled, deadline)
    finally:
        if held is None:
            with suppress(Exception):  # the reason for giving up matters more; the ticket lapses by itself
                store.withdraw(ticket)
    _first_touch(store, held, reader)
    return held


def _queue(
    store: LeaseStore,
    ticket: int,
    request: LeaseRequest,
    reader: GpuReader,
    recover: Callable[[Holding], str | None],
    waiting: Callable[[str], None],
    cancelled: Callable[[], str | None] | None,
    deadline: float | None,
) -> HeldLeases:
    said = ""
    recovered_at = 0.0
    alive: dict[str, str] = {}
    while not isinstance(answer := store.try_acquire(ticket), tuple):
        _require_wanted(cancelled)
        unusable = _lift(store, answer.quarantined, reader)
        blocked = answer.blocked | unusable
        if len(request.candidates) - len(unusable) < request.count:
            raise DeviceRefused("; ".join(f"{name}: {reason}" for name, reason in unusable.items()))
        if answer.expired and time.monotonic() - recovered_at >= RECOVER_SECONDS:
            alive = _recover(answer, recover)
            recovered_at = time.monotonic()
            if len(alive) < len(answer.expired):
                continue  # a device has come free: ask again before saying anything
        blocked |= {name: reason for name, reason in alive.items() if name in answer.blocked}
        text = Waiting(position=answer.position, blocked=blocked).reason
        if text != said and blocked:
            waiting(text)
            said = text
        if deadline is not None and time.monotonic() >= deadline:
            raise DeviceRefused(f"not leased in time: {text}")
        if answer.expired or not answer.quarantined or unusable:
            time.sleep(ASK_SECONDS)
    return HeldLeases(store, answer)


def _require_wanted(cancelled: Callable[[], str | None] | None) -> None:
    if cancelled is not None and (reason := cancelled()) is not None:
        raise WaitCancelled(f"{reason}, before a device was leased")


def _recover(answer: Waiting, recover: Callable[[Holding], str | None]) -> dict[str, str]:
    reasons: dict[str, str] = {}
    for holding in answer.expired:
        if (reason := recover(holding)) is not None:
            reasons[holding.lease.resource] = reason
    return reasons


def _lift(store: LeaseStore, quarantined: Sequence[Resource], reader: GpuReader) -> dict[str, str]:
    """Look at devices in quarantine; free those that are CLEAN now and return the others with both reasons."""
    unusable: dict[str, str] = {}
    for resource in quarantined:
        reason, baseline = look(resource, reader)
        if reason is None:
            store.lift(resource.name, baseline)
        else:
            unusable[resource.name] = f"in quarantine ({resource.quarantine}), and now {reason}"
    return unusable


def look(resource: Resource, reader: GpuReader) -> tuple[str | None, int | None]:
    """Return why a device is not clean, or None, and the idle baseline to remember (bytes; None for a virtual one).

    Looks at what is left of the last run that had it, and at the GPU itself.
    """
    folders = [Path(folder) for folder in resource.folders]
    censuses = [census for path in census_folders(folders) if (census := read_census(path)) is not None]
    if left := leftover_processes(censuses, ()):
        return f"processes of an earlier run are left: {', '.join(f'pid {process.pid}' for process in left)}", None
    if is_virtual(resource.name):
        return None, None
    reading = reader.read(resource.name)
    reason = occupancy(reading, resource.baseline_bytes)
    known = [used for used in (resource.baseline_bytes, reading.used_bytes) if used is not None]
    return reason, min(known, default=None)


def census_folders(folders: Sequence[Path]) -> list[Path]:
    """Return the folders of every supervised command below the given ones; where a worker writes is not looked at."""
    return sorted(
        command / process
        for folder in folders
        if folder.is_dir()
        for command in folder.iterdir()
        for process in processes_of(command.name)
        if (command / process / CENSUS_FILE).exists()
    )


def _first_touch(store: LeaseStore, held: HeldLeases, reader: GpuReader) -> None:
    """Read every device idle before anything of ours touches it; give all back when one is not."""
    resources = {resource.name: resource for resource in store.resources()}
    reasons: dict[str, str] = {}
    for lease in held.leases:
        reason, baseline = look(resources[lease.resource], reader)
        if reason is not None:
            reasons[lease.resource] = reason
        else:
            store.lift(lease.resource, baseline)
    if not reasons:
        return
    for lease in held.leases:
        reason = reasons.get(lease.resource)
        store.release(lease, ReceiptStatus.UNVERIFIED if reason else ReceiptStatus.CLEAN, reason)
    raise DeviceRefused("; ".join(f"{name}: {reason}" for name, reason in reasons.items()))
