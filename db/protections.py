"""The triggers that keep the ledger append-only, for SQLite and PostgreSQL, and the check that they are in force.

Views are checked with them: present, and on SQLite word for word (PostgreSQL stores them in a form of its own).

They stop casual edits; rewriting by someone who can drop triggers is what signed tree heads are for.
"""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection, inspect, text

from db import views
from qualification.evidence.findings import Code, Finding

_APPEND = "(SELECT coalesce(max(sequence), 0) + 1 FROM ledger)"
_TAIL = "coalesce((SELECT hash FROM ledger ORDER BY sequence DESC LIMIT 1), (SELECT genesis_hash FROM ledger_identity))"
_UNIQUE = {"sequence", "previous_hash", "hash", "envelope_sha256"}
_PROTECTED = ("ledger", "ledger_identity")

_SQLITE = {
    **{
        f"{table}_refuses_{verb}": f"CREATE TRIGGER {table}_refuses_{verb} BEFORE {verb.upper()} ON {table} "
        f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
        for table in _PROTECTED
        for verb in ("update", "delete")
    },
    "ledger_appends": "CREATE TRIGGER ledger_appends BEFORE INSERT ON ledger "
    f"WHEN NEW.sequence IS NOT {_APPEND} OR NEW.previous_hash IS NOT {_TAIL} "
    "BEGIN SELECT RAISE(ABORT, 'ledger is append-only: not the next entry'); END",
}

_REFUSE_FUNCTION = "BEGIN RAISE EXCEPTION USING MESSAGE = TG_TABLE_NAME || ' is append-only'; END"
_APPEND_FUNCTION = (
    f"BEGIN IF NEW.sequence IS DISTINCT FROM {_APPEND} OR NEW.previous_hash IS DISTINCT FROM {_TAIL} THEN "
    "RAISE EXCEPTION 'ledger is append-only: not the next entry'; END IF; RETURN NEW; END"
)
_FUNCTIONS = {"qualify_refuse": _REFUSE_FUNCTION, "qualify_append": _APPEND_FUNCTION}

_POSTGRESQL = {
    **{
        f"{table}_refuses_change": f"CREATE TRIGGER {table}_refuses_change BEFORE UPDATE OR DELETE OR TRUNCATE "
        f"ON {table} FOR EACH STATEMENT EXECUTE FUNCTION qualify_refuse()"
        for table in _PROTECTED
    },
    "ledger_appends": "CREATE TRIGGER ledger_appends BEFORE INSERT ON ledger "
    "FOR EACH ROW EXECUTE FUNCTION qualify_append()",
}


def create(connection: Connection) -> None:
    """Put every trigger in force; the tables must exist and the triggers must not."""
    if connection.dialect.name == "postgresql":
        for name, body in _FUNCTIONS.items():
            connection.exec_driver_sql(f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $${body}$$")
    for statement in _triggers(connection).values():
        connection.exec_driver_sql(statement)


def drop(connection: Connection) -> None:
    """Remove every trigger; only a migration that removes the tables does this."""
    for name in _triggers(connection):
        table = "ledger_identity" if name.startswith("ledger_identity") else "ledger"
        on = f" ON {table}" if connection.dialect.name == "postgresql" else ""
        connection.exec_driver_sql(f"DROP TRIGGER {name}{on}")
    if connection.dialect.name == "postgresql":
        for name in _FUNCTIONS:
            connection.exec_driver_sql(f"DROP FUNCTION {name}()")


def check(connection: Connection) -> list[Finding]:
    """Return one finding per trigger, view or unique column that is missing, altered or switched off."""
    if connection.dialect.name == "postgresql":
        triggers = _stored_postgresql(connection)
        lost_views = [_finding("view", name, None) for name in views.missing(connection)]
    else:
        triggers = _stored_sqlite(connection, "trigger")
        lost_views = _different("view", dict(views.statements()), _stored_sqlite(connection, "view"))
    lost_columns = [_finding("unique column", f"ledger.{name}", None) for name in _UNIQUE - _unique_columns(connection)]
    return [*lost_views, *_different("trigger", _triggers(connection), triggers), *sorted(lost_columns, key=str)]


def _unique_columns(connection: Connection) -> set[str]:
    inspector = inspect(connection)
    found = [unique["column_names"] for unique in inspector.get_unique_constraints("ledger")]
    found.append(inspector.get_pk_constraint("ledger")["constrained_columns"])
    return {str(names[0]) for names in found if len(names) == 1}


def _different(kind: str, expected: Mapping[str, str], stored: Mapping[str, str]) -> list[Finding]:
    return [_finding(kind, name, stored.get(name)) for name, wanted in expected.items() if stored.get(name) != wanted]


def _finding(kind: str, name: str, stored: str | None) -> Finding:
    text = "is missing" if stored is None else "is altered or switched off"
    return Finding(code=Code.PROTECTION, place=f"{kind} {name}", text=text)


def _triggers(connection: Connection) -> dict[str, str]:
    return _POSTGRESQL if connection.dialect.name == "postgresql" else _SQLITE


def _stored_sqlite(connection: Connection, kind: str) -> dict[str, str]:
    rows = connection.execute(text("SELECT name, sql FROM sqlite_master WHERE type = :kind"), {"kind": kind})
    return {name: statement for name, statement in rows}


def _stored_postgresql(connection: Connection) -> dict[str, str]:
    """Return the definition of each trigger that is enabled and whose function is ours, in the form we wrote it."""
    rows = connection.execute(
        text(
            "SELECT t.tgname, t.tgenabled, p.proname, p.prosrc, pg_get_triggerdef(t.oid) FROM pg_trigger t "
            "JOIN pg_proc p ON p.oid = t.tgfoid WHERE NOT t.tgisinternal "
            "AND t.tgrelid IN (to_regclass('ledger'), to_regclass('ledger_identity'))"
        )
    )
    stored = {}
    for name, enabled, function, source, definition in rows:
        in_force = enabled in ("O", b"O") and _FUNCTIONS.get(function) == source
        expected = _POSTGRESQL.get(name, "")
        same = in_force and _words(definition) == _words(expected)
        stored[name] = expected if same else definition
    return stored


def _words(definition: str) -> frozenset[str]:
    """Return a trigger definition's words: PostgreSQL prints events in its own order and names the schema."""
    return frozenset(definition.replace("public.", "").split())
