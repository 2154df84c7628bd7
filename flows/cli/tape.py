"""``qualify tape``: fit allocation tapes from recordings, check them on others, show what they hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli.exits import ExitCode, strongest
from trainer_rank.allocator.trace import load_trace
from trainer_rank.tapes.check import Comparison, compare
from trainer_rank.tapes.fit import fit
from trainer_rank.tapes.forecast import Figures, Status
from trainer_rank.tapes.shipped import fit_shipped, shipped_tapes
from trainer_rank.tapes.storage import load_tape, save_tape

app = typer.Typer(no_args_is_help=True)

CHECK_SCHEMA = "qualify.tape.check/1"
FIT_SCHEMA = "qualify.tape.fit/1"

Traces = Annotated[list[Path], typer.Argument(help="Recordings: JSON, plain or gzipped.", show_default=False)]
TapeFile = Annotated[Path, typer.Argument(help="Tape file.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@app.callback()
def group() -> None:
    """Fit allocation tapes from recordings, check them on others, show what they hold."""


@app.command("fit")
def fit_command(
    traces: Traces,
    output: Annotated[Path, typer.Option("--output", "-o", help="Tape to write; gzipped when it ends in .gz.")],
    provenance: Annotated[
        list[str] | None, typer.Option("--provenance", help="NAME=VALUE stated in the tape; give it once per fact.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Fit one tape from recordings of any sizes and topologies.

    \b
    A recording that contradicts itself, was cut, or was made under other allocator settings is refused (exit 2),
    and no file is written.

    \b
    Examples:
      qualify tape fit small.json.gz large.json.gz -o model.tape.json.gz
      qualify tape fit *.json.gz -o model.tape.json.gz --provenance card=h200
    """
    tape = fit([load_trace(path) for path in traces], _facts(provenance or []))
    save_tape(tape, output)
    grounds: dict[str, int] = {}
    for part in tape.parts:
        for path in part.paths:
            for index in path.allocations:
                name = str(tape.explanations[index].grounds)
                grounds[name] = grounds.get(name, 0) + 1
    row: dict[str, Any] = {
        "schema": FIT_SCHEMA,
        "tape": str(output),
        "recordings": len(traces),
        "parts": [{"context": part.context, "layers": part.layers, "paths": len(part.paths)} for part in tape.parts],
        "allocations": grounds,
    }
    if as_json:
        typer.echo(json.dumps(row, indent=2))
    else:
        parts = ", ".join(f"{part['paths']} paths at {part['context']} context ranks" for part in row["parts"])
        counts = ", ".join(f"{count:,} {name}" for name, count in grounds.items())
        typer.echo(f"{output}: {len(traces)} recordings; {parts}; allocations: {counts}")
    return ExitCode.PASSED


@app.command()
def check(tape_file: TapeFile, traces: Traces, as_json: AsJson = False) -> int:
    """Forecast recordings, each from its own snapshot, and compare with what was observed.

    \b
    Exit code: 0 when every bound holds, 3 when one fails, 4 when a forecast is unknown.

    \b
    Examples:
      qualify tape check model.tape.json.gz unseen.json.gz
      qualify tape check --json model.tape.json.gz *.json.gz
    """
    tape = load_tape(tape_file)
    rows = [(path, compare(tape, load_trace(path))) for path in traces]
    if as_json:
        files = [_row(path, each) for path, each in rows]
        typer.echo(json.dumps({"schema": CHECK_SCHEMA, "files": files}, indent=2))
    else:
        typer.echo("\n".join(_line(path, each) for path, each in rows))
    return strongest(_code(each) for _, each in rows)


@app.command()
def ship() -> int:
    """Fit the tapes that come with the package again from the recordings that come with it.

    \b
    Example:
      qualify tape ship        # git diff then shows whether a tape changed
    """
    for shipped in shipped_tapes().values():
        save_tape(fit_shipped(shipped), shipped.path)
        typer.echo(str(shipped.path))
    return ExitCode.PASSED


def _facts(rows: list[str]) -> dict[str, str]:
    facts = {}
    for row in rows:
        name, equals, value = row.partition("=")
        if not equals or not name or not value:
            raise typer.BadParameter(f"{row!r} is not NAME=VALUE", param_hint="--provenance")
        facts[name] = value
    return facts


def _row(path: Path, comparison: Comparison) -> dict[str, Any]:
    made = comparison.forecast
    return {
        "file": str(path),
        "tokens": comparison.tokens,
        "allocated_error_pct": _rounded(comparison.allocated_error),
        "reserved_error_pct": _rounded(comparison.reserved_error),
        "bound_holds": comparison.bound_holds,
        "status": str(made.status),
        "observed": _figures(comparison.observed),
        "expected": _figures(made.expected),
        "bound": _figures(made.bound),
        "stage": made.stage,
        "uncovered": list(made.uncovered),
        "notes": list(made.notes),
    }


def _figures(figures: Figures | None) -> dict[str, int] | None:
    return None if figures is None else {"allocated": figures.allocated, "reserved": figures.reserved}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _line(path: Path, comparison: Comparison) -> str:
    made = comparison.forecast
    if made.status is Status.UNKNOWN:
        return f"{path}: unknown; {'; '.join(made.uncovered)}"
    holds = "holds" if comparison.bound_holds else "FAILS"
    text = (
        f"{path}: {comparison.tokens:,} tokens, {made.status}; allocated {comparison.allocated_error:+.4f} %, "
        f"reserved {comparison.reserved_error:+.4f} %; bound {holds}"
    )
    return "\n  ".join([text, *made.notes])


def _code(comparison: Comparison) -> ExitCode:
    if comparison.bound_holds is None:
        return ExitCode.HELD
    return ExitCode.PASSED if comparison.bound_holds else ExitCode.FAILED
