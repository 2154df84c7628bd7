"""``qualify exec``: run any command under the supervisor, on leased GPUs if asked, and print the cleanup receipt."""

from __future__ import annotations

import signal
import uuid
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import typer

from flows.cli.exits import ExitCode
from qualification.execution.attempt import Attempt, host
from qualification.execution.holding import HeldLeases, acquire
from qualification.execution.identity import myself
from qualification.execution.inventory import requested, require_known, take_inventory
from qualification.execution.leases import Holding, LeaseRequest
from qualification.execution.probes.gpus import GpuReader, unreadable
from qualification.execution.receipt import RECLAIM_SECONDS, receipt_of_nothing
from qualification.execution.supervision import Ending, Limits, Outcome
from qualification.home import home
from qualification.providers.choose import provider_for
from qualification.records import Receipt, ReceiptStatus

COMMAND_FOLDER = "command"


def command(
    words: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="The command and its arguments.")],
    gpu: Annotated[
        list[str] | None, typer.Option(help="Lease this device, by UUID; give it once for each. Others stay invisible.")
    ] = None,
    timeout: Annotated[int | None, typer.Option(min=1, help="End the command after so many seconds.")] = None,
    silence: Annotated[int | None, typer.Option(min=1, help="End it after so many seconds without output.")] = None,
    grace: Annotated[int, typer.Option(min=0, help="Seconds between TERM and KILL.")] = 30,
    reclaim_wait: Annotated[
        float, typer.Option(min=0, help="Seconds that the GPUs have to return to their baseline.")
    ] = RECLAIM_SECONDS,
    image: Annotated[str | None, typer.Option(help="Run it in a container of this image, given by digest.")] = None,
    memory: Annotated[int | None, typer.Option(min=16, help="MiB of memory that the container may use.")] = None,
    priority: Annotated[int, typer.Option(help="Place in the queue for devices; higher goes first.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the receipt alone; output goes to the logs.")] = False,
) -> int:
    """Run any command under the supervisor and print its receipt.

    \b
    Exit code 6 when the receipt is not CLEAN, else 0 if the command exited 0 in time, 2 if it could not be started,
    else 3.

    \b
    Examples:
      qualify exec -- python train.py
      qualify exec --gpu GPU-0f6c1e9a-... --timeout 600 --json -- python train.py
      qualify exec --image sha256:5d0da3dc9764... -- python3 -V
    """
    signal.signal(signal.SIGTERM, _interrupt)
    run = f"exec-{uuid.uuid4().hex}"
    limits = Limits(wall_seconds=timeout, silence_seconds=silence, terminate_seconds=grace)
    provider = provider_for(image, memory)
    devices = requested(tuple(gpu or ()))
    reader = GpuReader()
    if devices:
        require_known(devices, take_inventory(reader))
        if reasons := unreadable(reader, devices):
            return _answer(receipt_of_nothing(run, reasons), None, as_json)
    folder = home() / "runs" / run / "1"
    attempt = Attempt(run=run, attempt=1, folder=folder, recorded=False, reader=reader, provider=provider)
    attempt.announce()
    try:
        attempt.held = _lease(run, devices, folder, reader, priority) if devices else None
    except BaseException:
        attempt.withdraw()
        raise
    outcome: Outcome | None = None
    try:
        attempt.begin()
        outcome = attempt.execute(words, COMMAND_FOLDER, limits=limits, echo=not as_json)
    finally:
        receipt = attempt.take_receipt(reclaim_seconds=reclaim_wait)
        attempt.close(receipt)
        code = _answer(receipt, outcome, as_json)
    typer.echo(f"logs: {folder / COMMAND_FOLDER}", err=True)
    return code


def _lease(run: str, devices: tuple[str, ...], folder: Path, reader: GpuReader, priority: int) -> HeldLeases:
    from db.engine import open_for_writing  # a command without devices touches no database
    from db.leases import DatabaseLeaseStore

    request = LeaseRequest(
        run=run,
        attempt=1,
        candidates=devices,
        count=len(devices),
        folder=str(folder),
        host=host(),
        holder=myself(),
        priority=priority,
    )
    return acquire(
        DatabaseLeaseStore(open_for_writing()),
        request,
        reader=reader,
        recover=lambda holding: _recover(holding, reader),
        waiting=lambda reason: typer.echo(f"waiting for {', '.join(devices)}: {reason}", err=True),
    )


def _recover(holding: Holding, reader: GpuReader) -> str | None:
    from flows.recovering import recovery  # heavy, and rarely needed: only when somebody else's lease expired

    with recovery(reader) as recovering:
        return recovering.holding(holding)


def _answer(receipt: Receipt, outcome: Outcome | None, as_json: bool) -> int:
    typer.echo(msgspec.json.encode(receipt) if as_json else "\n".join(describe(receipt)))
    if outcome is not None and outcome.ending is Ending.START_FAILED:
        typer.echo(f"qualify: the command was not started: {outcome.reason}; check its name and rights", err=True)
        return ExitCode.USAGE if receipt.status is ReceiptStatus.CLEAN else ExitCode.NOT_CLEAN
    if outcome is not None and outcome.reason:
        typer.echo(f"qualify: the command was ended: {outcome.reason}", err=True)
    if receipt.status is not ReceiptStatus.CLEAN:
        return ExitCode.NOT_CLEAN
    return ExitCode.PASSED if outcome is not None and outcome.succeeded else ExitCode.FAILED


def describe(receipt: Receipt) -> list[str]:
    """Return the lines that show a receipt to people."""
    ended = "nothing was started" if receipt.exit_code is None else f"exit code {receipt.exit_code}"
    lines = [f"{receipt.status.value}: {ended}{', ended by a limit' if receipt.timed_out else ''}"]
    for title, processes in (("swept", receipt.swept), ("left", receipt.leftovers)):
        lines += [f"  {title} pid {process.pid} {process.command} ({process.state})" for process in processes]
    lines += [f"  {probe.name:14} {probe.status.value}{_because(probe.reason)}" for probe in receipt.probes]
    return lines


def _because(reason: str | None) -> str:
    return f": {reason}" if reason else ""


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt
