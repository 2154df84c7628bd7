"""``qualify trace``: check recorded allocator traces against the model of the allocator."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli.exits import ExitCode, strongest
from flows.waiting import progress
from trainer_rank.allocator.replay import ReplayResult, replay
from trainer_rank.allocator.trace import Trace, load_trace
from trainer_rank.errors import TraceError

app = typer.Typer(no_args_is_help=True)

SCHEMA = "qualify.trace.check/1"
TIMING_S = 0.02
"""Seconds for which a short trace is replayed again, so that its rate is not that of one cold pass."""


@app.callback()
def group() -> None:
    """Check recorded allocator traces against the model of the allocator."""


@app.command()
def check(
    files: Annotated[list[Path], typer.Argument(help="Traces: JSON, plain or gzipped.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Replay traces through the allocator model; name the first event that contradicts it.

    \b
    Exact means that every event and both peaks agree. Exit code: 0 when all are exact, 3 when one diverges, 2 when one
    cannot be read. Events per second are of the fastest pass, every row of "events" counted.

    \b
    Examples:
      qualify trace check recording.json.gz
      qualify trace check --json trainer_rank/tapes/recordings/*.gz
    """
    rows: list[dict[str, Any]] = []
    codes: list[ExitCode] = []
    with progress([path.name for path in files]) as position:
        for index, path in enumerate(files):
            position[0] = index
            try:
                result = _fastest(load_trace(path))
            except TraceError as error:
                print(f"qualify: {' '.join(str(error).split())}", file=sys.stderr)  # noqa: T201 - one line per file
                rows.append(_unreadable(path, error))
                codes.append(ExitCode.USAGE)
            else:
                rows.append(_row(path, result))
                codes.append(ExitCode.PASSED if result.exact else ExitCode.FAILED)
    readable = [row for row in rows if row["peak_allocated"] is not None]
    if as_json:
        typer.echo(json.dumps({"schema": SCHEMA, "files": rows}, indent=2))
    elif readable:  # the others have their line already
        typer.echo(_table(readable))
    return strongest(codes)


def _fastest(trace: Trace) -> ReplayResult:
    """Replay once, and a short trace again for a moment; the answer is the same each time, the rate is the best."""
    end = time.perf_counter() + TIMING_S
    best = replay(trace)
    while time.perf_counter() < end:
        best = max(best, replay(trace), key=lambda result: result.events_per_second)
    return best


def _row(path: Path, result: ReplayResult) -> dict[str, Any]:
    return {
        "file": str(path),
        "exact": result.exact,
        "peak_allocated": result.peak_allocated,
        "peak_reserved": result.peak_reserved,
        "events_per_second": round(result.events_per_second),
        "partial": result.partial,
        "divergence": result.divergence._asdict() if result.divergence else None,
        "notes": [*result.notes, *_incomplete(result)],
    }


def _incomplete(result: ReplayResult) -> Iterator[str]:
    if result.divergence is not None and result.divergence.event is not None:
        yield "the trace is incomplete, or was recorded under other allocator settings; no tape is fitted from it"


def _unreadable(path: Path, error: TraceError) -> dict[str, Any]:
    figures = dict.fromkeys(("peak_allocated", "peak_reserved", "events_per_second", "partial"))
    divergence = {"event": None, "expected": "a readable trace", "got": str(error)}
    return {"file": str(path), "exact": False, **figures, "divergence": divergence, "notes": []}


def _table(rows: list[dict[str, Any]]) -> str:
    heads = ("file", "result", "peak allocated B", "peak reserved B", "events/s")
    lines = [heads, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join(_padded(line, widths)) for line in lines]
    return "\n".join([*table, *(remark for row in rows for remark in _remarks(row))])


def _padded(line: tuple[str, ...], widths: list[int]) -> Iterator[str]:
    for column, (cell, width) in enumerate(zip(line, widths, strict=True)):
        yield cell.ljust(width) if column < 2 else cell.rjust(width)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    divergence = row["divergence"]
    if divergence is None:
        result = "exact up to out of memory" if row["partial"] else "exact"
    else:
        result = "peaks differ" if divergence["event"] is None else f"diverges at event {divergence['event']}"
    figures = (row["peak_allocated"], row["peak_reserved"], row["events_per_second"])
    return (row["file"], result, *(f"{figure:,}" for figure in figures))


def _remarks(row: dict[str, Any]) -> Iterator[str]:
    divergence = row["divergence"]
    if divergence is not None:
        yield f"{row['file']}: expected {divergence['expected']}; got {divergence['got']}"
    for note in row["notes"]:
        yield f"{row['file']}: {note}"
