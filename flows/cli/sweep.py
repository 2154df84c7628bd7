"""``qualify sweep``: close what killed runs left behind, with receipts marked recovered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer

from flows.cli.exits import ExitCode
from flows.recovering import recovery
from qualification.execution.probes.gpus import GpuReader
from qualification.execution.recovery import Recovered
from qualification.home import home
from qualification.records import ReceiptStatus

SCHEMA = "qualify.sweep/1"


def command(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False) -> int:
    """Close what killed runs left behind: sweep their processes, record a recovered receipt, close their leases.

    A run whose processes are still alive is left alone and named. Doing it again changes nothing.

    \b
    Exit code 6 when a recovered receipt is not CLEAN, else 0.

    \b
    Examples:
      qualify sweep
      qualify sweep --json | jq '.attempts[].receipt.status'
    """
    with GpuReader() as reader, recovery(reader) as recovering:
        swept = recovering.sweep(home() / "runs")
    if as_json:
        attempts = [{"folder": str(item.folder), "receipt": item.receipt, "reason": item.reason} for item in swept]
        typer.echo(msgspec.json.encode({"schema": SCHEMA, "attempts": attempts}))
    else:
        typer.echo("\n".join(_lines(swept)))
    dirty = any(item.receipt is not None and item.receipt.status is not ReceiptStatus.CLEAN for item in swept)
    return ExitCode.NOT_CLEAN if dirty else ExitCode.PASSED


def _lines(swept: Sequence[Recovered]) -> list[str]:
    if not swept:
        return ["nothing to recover"]
    return [
        f"{item.folder}: {item.receipt.status.value if item.receipt else 'left alone'}"
        + (f" ({reason})" if (reason := item.reason or (item.receipt.reason if item.receipt else None)) else "")
        for item in swept
    ]
