"""Leases in the evidence database, shared by every process and host that uses it. See ``execution.leases`` for the
rules.

Each operation is one transaction under the database's write lock. Time is the database server's on PostgreSQL and this
host's on SQLite, so that hosts with different clocks agree.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import Connection, Engine, Row, func, select, text

from db.engine import reading, writing
from db.leases_models import devices, leases, queue
from qualification.errors import UnknownError
from qualification.execution.leases import (
    EXPIRY_SECONDS,
    Holding,
    LeaseLost,
    LeaseRequest,
    Resource,
    Waiting,
    assign,
)
from qualification.records import Lease, Process, ReceiptStatus

EXPIRY_MS = EXPIRY_SECONDS * 1000


class DatabaseLeaseStore:
    """The :class:`~qualification.execution.leases.LeaseStore` of an evidence database."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def enqueue(self, request: LeaseRequest) -> int:
        """Take a place in the queue and return its ticket; registers devices that were never asked for."""
        with writing(self._engine) as connection:
            known = set(connection.scalars(select(devices.c.name)))
            new = [{"name": name, "token": 0} for name in dict.fromkeys(request.candidates) if name not in known]
            if new:
                connection.execute(devices.insert(), new)
            values = {
                "priority": request.priority,
                "request": _text(request),
                "expires_at_ms": _now_ms(connection) + EXPIRY_MS,
            }
            key = connection.execute(queue.insert().values(values)).inserted_primary_key
            return int(key[0]) if key else 0

    def try_acquire(self, ticket: int) -> tuple[Lease, ...] | Waiting:
        """Grant all that the ticket asks for, with fresh tokens, or say why not now. UnknownError if it lapsed."""
        with writing(self._engine) as connection:
            now = _now_ms(connection)
            connection.execute(queue.delete().where(queue.c.expires_at_ms <= now))
            renewed = connection.execute(
                queue.update().where(queue.c.ticket == ticket).values(expires_at_ms=now + EXPIRY_MS)
            )
            if not renewed.rowcount:
                raise UnknownError(f"ticket {ticket} lapsed: nobody asked for it within {EXPIRY_SECONDS} s; ask again")
            waiting = connection.execute(select(queue).order_by(queue.c.priority.desc(), queue.c.ticket)).all()
            known = {row.name: row for row in connection.execute(select(devices))}
            taken = {row.resource: row for row in _open(connection)}
            free = [name for name, row in known.items() if name not in taken and row.quarantine is None]
            requests = {row.ticket: _request(row.request) for row in waiting}
            granted = assign(free, [(key, item.candidates, item.count) for key, item in requests.items()])
            if ticket in granted:
                return _grant(connection, ticket, requests[ticket], granted[ticket], now)
            place = list(requests).index(ticket)
            return _waiting(connection, requests[ticket], place, known, taken, now)

    def withdraw(self, ticket: int) -> None:
        """Leave the queue."""
        with writing(self._engine) as connection:
            connection.execute(queue.delete().where(queue.c.ticket == ticket))

    def heartbeat(self, held: Sequence[Lease]) -> None:
        """Extend leases by 30 s. Raises LeaseLost when any has expired or its token is no longer in force."""
        with writing(self._engine) as connection:
            now = _now_ms(connection)
            for lease in held:
                row = _in_force(connection, lease, now)
                extended = leases.update().where(leases.c.id == row.id).values(expires_at_ms=now + EXPIRY_MS)
                connection.execute(extended)

    def check(self, held: Sequence[Lease]) -> None:
        """Raise LeaseLost unless every lease is in force now."""
        with reading(self._engine) as connection:
            now = _now_ms(connection)
            for lease in held:
                _in_force(connection, lease, now)

    def adopt(self, lease: Lease, holder: Process, host: str) -> Lease:
        """Take over an expired lease to recover it, under a fresh token. Raises LeaseLost unless expired and open."""
        with writing(self._engine) as connection:
            now = _now_ms(connection)
            row = _row(connection, lease)
            if row.expires_at_ms > now:
                raise LeaseLost(
                    f"the lease of {lease.resource} with token {lease.token} is in force; nothing to recover"
                )
            token = _next_token(connection, lease.resource)
            request = msgspec.structs.replace(_request(row.request), holder=holder, host=host)
            values = {"token": token, "request": _text(request), "expires_at_ms": now + EXPIRY_MS}
            connection.execute(leases.update().where(leases.c.id == row.id).values(values))
            return Lease(resource=lease.resource, token=token)

    def release(self, lease: Lease, status: ReceiptStatus, reason: str | None = None) -> None:
        """Close a lease with its receipt's status; anything but CLEAN quarantines the device. Raises LeaseLost."""
        with writing(self._engine) as connection:
            row = _row(connection, lease)
            values = {"closed_at_ms": _now_ms(connection), "status": status.value, "reason": reason}
            connection.execute(leases.update().where(leases.c.id == row.id).values(values))
            if status is not ReceiptStatus.CLEAN:
                _quarantine(
                    connection, lease.resource, f"lease of run {_request(row.request).run} ended {status}: {reason}"
                )

    def quarantine(self, resource: str, reason: str) -> None:
        """Keep a device from being leased until :meth:`lift`."""
        with writing(self._engine) as connection:
            _quarantine(connection, resource, reason)

    def lift(self, resource: str, baseline_bytes: int | None) -> None:
        """End a quarantine after a CLEAN probe, and remember the idle baseline that it read."""
        values = {"quarantine": None, "baseline_bytes": baseline_bytes}
        with writing(self._engine) as connection:
            connection.execute(devices.update().where(devices.c.name == resource).values(values))

    def resources(self) -> tuple[Resource, ...]:
        """Return every device ever asked for."""
        with reading(self._engine) as connection:
            rows = connection.execute(select(devices).order_by(devices.c.name))
            return tuple(_resource(connection, row) for row in rows)

    def holdings(self) -> tuple[Holding, ...]:
        """Return every lease that is not closed, oldest first."""
        with reading(self._engine) as connection:
            now = _now_ms(connection)
            return tuple(_holding(row, now) for row in _open(connection))


def _now_ms(connection: Connection) -> int:
    if connection.dialect.name == "postgresql":
        return int(connection.execute(text("SELECT extract(epoch FROM clock_timestamp()) * 1000")).scalar_one())
    return time.time_ns() // 1_000_000


def _open(connection: Connection) -> Sequence[Row[Any]]:
    return connection.execute(select(leases).where(leases.c.closed_at_ms.is_(None)).order_by(leases.c.id)).all()


def _row(connection: Connection, lease: Lease) -> Row[Any]:
    row = connection.execute(
        select(leases).where(leases.c.resource == lease.resource, leases.c.closed_at_ms.is_(None))
    ).one_or_none()
    if row is None or row.token != lease.token:
        now = "closed" if row is None else f"held under token {row.token}"
        raise LeaseLost(f"lease lost: {lease.resource} with token {lease.token} is {now}")
    return row


def _in_force(connection: Connection, lease: Lease, now: int) -> Row[Any]:
    row = _row(connection, lease)
    if row.expires_at_ms <= now:
        late = (now - row.expires_at_ms) // 1000
        raise LeaseLost(f"lease lost: {lease.resource} with token {lease.token} expired {late} s ago")
    return row


def _next_token(connection: Connection, resource: str) -> int:
    connection.execute(devices.update().where(devices.c.name == resource).values(token=devices.c.token + 1))
    return int(connection.execute(select(func.max(devices.c.token)).where(devices.c.name == resource)).scalar_one())


def _grant(
    connection: Connection, ticket: int, request: LeaseRequest, names: Sequence[str], now: int
) -> tuple[Lease, ...]:
    granted = []
    for name in names:
        lease = Lease(resource=name, token=_next_token(connection, name))
        values = {
            "resource": name,
            "token": lease.token,
            "request": _text(request),
            "acquired_at_ms": now,
            "expires_at_ms": now + EXPIRY_MS,
        }
        connection.execute(leases.insert().values(values))
        granted.append(lease)
    connection.execute(queue.delete().where(queue.c.ticket == ticket))
    return tuple(granted)


def _waiting(
    connection: Connection,
    request: LeaseRequest,
    place: int,
    known: dict[str, Row[Any]],
    taken: dict[str, Row[Any]],
    now: int,
) -> Waiting:
    blocked: dict[str, str] = {}
    expired: list[Holding] = []
    quarantined: list[Resource] = []
    for name in request.candidates:
        if name in taken:
            holding = _holding(taken[name], now)
            state = "whose lease expired" if holding.expired else "whose lease is in force"
            blocked[name] = f"held by run {holding.run} on {holding.host}, {state} ({holding.expires_at})"
            expired += [holding] if holding.expired else []
        elif known[name].quarantine is not None:
            blocked[name] = f"in quarantine: {known[name].quarantine}"
            quarantined.append(_resource(connection, known[name]))
        elif place:
            blocked[name] = "kept for requests before this one"
    return Waiting(position=place, blocked=blocked, expired=tuple(expired), quarantined=tuple(quarantined))


def _quarantine(connection: Connection, resource: str, reason: str) -> None:
    connection.execute(devices.update().where(devices.c.name == resource).values(quarantine=reason))


def _holding(row: Row[Any], now: int) -> Holding:
    request = _request(row.request)
    return Holding(
        lease=Lease(resource=row.resource, token=row.token),
        run=request.run,
        attempt=request.attempt,
        folder=request.folder,
        host=request.host,
        holder=request.holder,
        acquired_at=_stamp(row.acquired_at_ms),
        expires_at=_stamp(row.expires_at_ms),
        expired=row.expires_at_ms <= now,
    )


def _resource(connection: Connection, row: Row[Any]) -> Resource:
    mine = leases.c.resource == row.name
    clean = select(func.coalesce(func.max(leases.c.id), 0)).where(mine, leases.c.status == ReceiptStatus.CLEAN.value)
    since = select(leases.c.request).where(mine, leases.c.id > clean.scalar_subquery()).order_by(leases.c.id)
    return Resource(
        name=row.name,
        token=row.token,
        baseline_bytes=row.baseline_bytes,
        quarantine=row.quarantine,
        folders=tuple(_request(text).folder for text in connection.scalars(since)),
    )


def _stamp(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _text(request: LeaseRequest) -> str:
    return msgspec.json.encode(request).decode()


def _request(content: str) -> LeaseRequest:
    return msgspec.json.decode(content, type=LeaseRequest)
