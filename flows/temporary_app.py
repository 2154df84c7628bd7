"""The application of a Prefect server for one run: everything in memory, with the tables of the installed version.

A server that lives as long as one run has no older database to migrate, so it makes its tables at once; a hundred and
more migrations take seconds. Started by :mod:`flows.temporary_server` with the settings in ``SETTINGS``.
"""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from sqlalchemy.schema import CreateIndex, CreateTable

if TYPE_CHECKING:
    from fastapi import FastAPI

SETTINGS = {
    "PREFECT_API_DATABASE_CONNECTION_URL": (
        "sqlite+aiosqlite:///file::memory:?cache=shared&uri=true&check_same_thread=false"
    ),
    "PREFECT_API_DATABASE_MIGRATE_ON_START": "false",
    "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",
    "PREFECT_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",
    "PREFECT_UI_ENABLED": "0",
    "PREFECT__SERVER_EPHEMERAL": "1",
    "PREFECT__SERVER_FINAL": "1",
}


def create() -> FastAPI:
    """Return Prefect's application, which makes its tables when it starts."""
    gc.disable()  # thousands of classes are made now, and none of them is garbage
    from prefect.server.api.server import create_app

    application = create_app()
    gc.enable()
    start = application.router.lifespan_context

    @asynccontextmanager
    async def with_tables(app: FastAPI) -> AsyncIterator[None]:
        await _make_tables()
        async with start(app):
            yield

    application.router.lifespan_context = with_tables
    return application


async def _make_tables() -> None:
    from prefect.server.database import provide_database_interface

    database = provide_database_interface()
    async with (await database.engine()).begin() as connection:
        for table in database.Base.metadata.sorted_tables:
            await connection.execute(CreateTable(table))
            for index in table.indexes:
                await connection.execute(CreateIndex(index, if_not_exists=True))  # one is declared twice
