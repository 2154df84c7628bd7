"""Fixtures of real databases."""

from tests.databases import database_url, postgresql_server, postgresql_url, sqlite_workplace, workplace
from tests.recorded import recorded, recorded_here

__all__ = [
    "database_url",
    "postgresql_server",
    "postgresql_url",
    "recorded",
    "recorded_here",
    "sqlite_workplace",
    "workplace",
]
