"""Schema revisions on filled databases: protections and views survive, evidence is never migrated away."""

from __future__ import annotations

import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text
from sqlalchemy.engine import URL

from db import models, protections, views
from db.engine import REVISIONS, open_for_reading, open_for_writing, reading, stored_revision, upgrade
from db.leases_models import metadata as leases
from db.migrations.run import configuration
from qualification.errors import ConfigurationError, QualificationError
from tests import facts
from tests.databases import Workplace

_STORED = {
    "sqlite": "SELECT name, sql FROM sqlite_master WHERE type IN ('trigger', 'view') ORDER BY 1",
    "postgresql": "SELECT tgname, pg_get_triggerdef(oid) || tgenabled::text FROM pg_trigger WHERE NOT tgisinternal "
    "UNION ALL SELECT viewname, definition FROM pg_views WHERE schemaname = 'public' ORDER BY 1",
}


def _protected(workplace: Workplace) -> list[tuple[str, str]]:
    with reading(workplace.engine) as connection:
        return [(name, sql) for name, sql in connection.execute(text(_STORED[workplace.url.get_backend_name()]))]


def test_the_programs_revisions_are_those_of_the_scripts() -> None:
    scripts = ScriptDirectory.from_config(configuration()).walk_revisions()
    assert tuple(script.revision for script in scripts) == REVISIONS[::-1]


def test_the_migrated_schema_is_the_one_that_the_models_describe(workplace: Workplace) -> None:
    with reading(workplace.engine) as connection:
        inspector = inspect(connection)
        for table in (*models.metadata.sorted_tables, *leases.sorted_tables):
            assert [one["name"] for one in inspector.get_columns(table.name)] == [
                column.name for column in table.columns
            ]
            assert {one["name"] for one in inspector.get_indexes(table.name) if one["name"] in _names(table)} == _names(
                table
            )
        tables = {name for name in inspector.get_table_names() if name != "alembic_version"}
    assert tables == {*models.metadata.tables, *leases.tables}


def _names(table: models.Table) -> set[str]:
    return {str(index.name) for index in table.indexes}


def test_only_the_ledger_has_a_column_that_names_what_came_before() -> None:
    named = [table.name for table in models.metadata.sorted_tables for column in table.columns if "prev" in column.name]
    assert named == ["ledger"]
    assert [column.name for column in models.ledger.primary_key.columns] == ["sequence"]


@pytest.mark.parametrize("target", REVISIONS[:-1])
def test_down_and_up_again_keeps_evidence_triggers_and_views(workplace: Workplace, target: str) -> None:
    workplace.record(facts.result(), facts.receipt(), facts.decision())
    workplace.ledger.sign_head()
    before = _protected(workplace)
    assert {name for name, _ in before} >= {"ledger_appends", *views.VIEWS}
    upgrade(workplace.engine, target)
    assert stored_revision(workplace.engine) == target
    assert {name for name, _ in _protected(workplace)} >= {"ledger_appends"}
    open_for_writing(workplace.url)
    assert _protected(workplace) == before
    assert workplace.verify().verified


def test_evidence_is_not_migrated_away(workplace: Workplace) -> None:
    workplace.record(facts.receipt())
    with pytest.raises(QualificationError, match="never migrated away"):
        upgrade(workplace.engine, "base")
    assert stored_revision(workplace.engine) == REVISIONS[-1]
    assert workplace.verify().verified


def test_an_empty_schema_goes_down_to_nothing_and_up_again(workplace: Workplace) -> None:
    before = _protected(workplace)
    upgrade(workplace.engine, "base")
    assert _protected(workplace) == []
    upgrade(workplace.engine)
    assert _protected(workplace) == before


def test_a_newer_schema_is_refused_in_one_line_and_left_untouched(workplace: Workplace) -> None:
    workplace.record(facts.receipt())
    with workplace.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = 'ffffffffffff'")
    workplace.engine.dispose()
    file = Path(str(workplace.url.database))
    before = sha256(file.read_bytes()).digest() if workplace.url.get_backend_name() == "sqlite" else b""
    for open_database in (open_for_reading, open_for_writing):
        with pytest.raises(ConfigurationError) as raised:
            open_database(workplace.url)
        assert "ffffffffffff" in str(raised.value)
        assert REVISIONS[-1] in str(raised.value)
        assert "\n" not in str(raised.value)
    if before:
        assert sha256(file.read_bytes()).digest() == before


def test_an_older_schema_is_read_only_after_migration(workplace: Workplace) -> None:
    workplace.record(facts.receipt())
    upgrade(workplace.engine, "0002")
    with pytest.raises(ConfigurationError, match="qualify db migrate"):
        open_for_reading(workplace.url)
    open_for_writing(workplace.url)
    open_for_reading(workplace.url)


def test_a_missing_trigger_or_view_is_found_by_name(workplace: Workplace) -> None:
    kind = workplace.url.get_backend_name()
    with workplace.engine.begin() as connection:
        connection.exec_driver_sql("DROP TRIGGER ledger_appends" + (" ON ledger" if kind == "postgresql" else ""))
        connection.exec_driver_sql("DROP VIEW why_held")
    with reading(workplace.engine) as connection:
        assert [finding.place for finding in protections.check(connection)] == [
            "view why_held",
            "trigger ledger_appends",
        ]


_WEAK = "CREATE OR REPLACE FUNCTION qualify_refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'"


@pytest.mark.postgresql
@pytest.mark.parametrize(
    ("change", "places"),
    [
        ("ALTER TABLE ledger DISABLE TRIGGER ledger_appends", ["trigger ledger_appends"]),
        ("ALTER TABLE ledger ENABLE REPLICA TRIGGER ledger_refuses_change", ["trigger ledger_refuses_change"]),
        (_WEAK, ["trigger ledger_refuses_change", "trigger ledger_identity_refuses_change"]),
        ("ALTER TABLE ledger DROP CONSTRAINT ledger_previous_hash_key", ["unique column ledger.previous_hash"]),
        ("DROP VIEW run_overview", ["view run_overview"]),
    ],
)
def test_a_protection_that_is_switched_off_on_the_server_is_found(
    postgresql_url: URL, tmp_path: Path, change: str, places: list[str]
) -> None:
    workplace = Workplace(tmp_path / "home", tmp_path / "trust", postgresql_url)
    workplace.trust.mkdir()
    workplace.record(facts.receipt())
    assert workplace.verify().verified
    with workplace.engine.begin() as connection:
        connection.exec_driver_sql(change)
    assert [finding.place for finding in workplace.verify().findings] == places
    workplace.engine.dispose()


def test_reading_does_not_import_alembic(sqlite_workplace: Workplace) -> None:
    sqlite_workplace.record(facts.receipt())
    program = (
        "import sys; from db.check import verify_database; from db.engine import open_for_reading; "
        "open_for_reading(); assert not {'alembic', 'prefect', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], env=sqlite_workplace.environment, check=True)
