"""The tables of leases: who may use which device now. Operational, never a projection of the ledger."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Index, Integer, MetaData, Table, Text, UniqueConstraint, text

metadata = MetaData()

_Number = BigInteger().with_variant(Integer, "sqlite")

devices = Table(
    "lease_devices",
    metadata,
    Column("name", Text, primary_key=True),
    Column("token", BigInteger, nullable=False),
    Column("baseline_bytes", BigInteger),
    Column("quarantine", Text),
)
"""Every device ever asked for; ``token`` is the last fencing token given out for it."""

queue = Table(
    "lease_queue",
    metadata,
    Column("ticket", _Number, primary_key=True, autoincrement=True),
    Column("priority", Integer, nullable=False),
    Column("request", Text, nullable=False),
    Column("expires_at_ms", BigInteger, nullable=False),
    sqlite_autoincrement=True,
)
"""Who waits; a ticket that stops asking expires."""

leases = Table(
    "leases",
    metadata,
    Column("id", _Number, primary_key=True, autoincrement=True),
    Column("resource", Text, nullable=False),
    Column("token", BigInteger, nullable=False),
    Column("request", Text, nullable=False),
    Column("acquired_at_ms", BigInteger, nullable=False),
    Column("expires_at_ms", BigInteger, nullable=False),
    Column("closed_at_ms", BigInteger),
    Column("status", Text),
    Column("reason", Text),
    UniqueConstraint("resource", "token"),
    Index(
        "leases_one_open",
        "resource",
        unique=True,
        sqlite_where=text("closed_at_ms IS NULL"),
        postgresql_where=text("closed_at_ms IS NULL"),
    ),
)
"""Every lease ever given. The partial index is what keeps two from holding one device, whatever the program does."""
