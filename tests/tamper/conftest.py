"""Fixtures of real databases."""

from tests.databases import database_url, postgresql_server, postgresql_url, sqlite_workplace, workplace

__all__ = ["database_url", "postgresql_server", "postgresql_url", "sqlite_workplace", "workplace"]
