"""``qualify replay``: make a reported admission decision again, from nothing but the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli.exits import ExitCode, strongest
from qualification.errors import ConfigurationError
from trainer_rank.reports.replay import Replayed, replay_report

SCHEMA = "qualify.replay/1"


def command(
    reports: Annotated[list[Path], typer.Argument(help="Planner reports of a run.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Make reported admission decisions again, on any machine, from nothing but the reports.

    \b
    Exit code: 0 when every decision is the same, 3 when one differs, 4 when a report lacks what is needed
    (device_or_modified_input, layout_inputs_unavailable), 2 when a file is no report.

    \b
    Examples:
      qualify replay reports/*.report.json
      qualify replay --json miss.report.json
    """
    rows = [_row(path, replay_report(_read(path))) for path in reports]
    typer.echo(json.dumps({"schema": SCHEMA, "reports": rows}, indent=2) if as_json else _lines(rows))
    return strongest([_code(row) for row in rows])


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"report {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(f"report {path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"report {path} is no JSON object; give a planner report")
    return content


def _row(path: Path, replayed: Replayed) -> dict[str, Any]:
    return {
        "file": str(path),
        "same": replayed.same,
        "missing": list(replayed.missing),
        "decision": replayed.decision,
        "recorded": replayed.recorded,
    }


def _code(row: dict[str, Any]) -> ExitCode:
    if row["same"] is False:
        return ExitCode.FAILED
    return ExitCode.HELD if row["missing"] else ExitCode.PASSED


def _lines(rows: list[dict[str, Any]]) -> str:
    answers = {True: "the same decision", False: "another decision", None: "cannot be replayed"}
    lines = []
    for row in rows:
        decision = row["decision"] or row["recorded"] or {}
        named = f": {decision['outcome']}, {decision['reason']}" if "outcome" in decision else ""
        missing = f" (missing: {', '.join(row['missing'])})" if row["missing"] else ""
        lines.append(f"{row['file']}: {answers[row['same']]}{named}{missing}")
    return "\n".join(lines)
