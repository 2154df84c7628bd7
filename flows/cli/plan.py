"""``qualify plan``: forecast and plan a batch without a GPU."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli.exits import ExitCode, strongest
from flows.waiting import progress
from trainer_rank.admission.decide import Outcome
from trainer_rank.allocator.settings import require_supported
from trainer_rank.devices.cards import Card, load_card
from trainer_rank.errors import InvalidInputError
from trainer_rank.geometry import Topology
from trainer_rank.planning.assumptions import assumptions_for, chosen_assumptions
from trainer_rank.planning.batch import Batch, incident_names, load_incident, parse_batches
from trainer_rank.planning.choose_tape import best_shipped
from trainer_rank.planning.plan import BatchPlan, SubforwardForecast, plan_batch
from trainer_rank.planning.target import Target
from trainer_rank.policies import load_policy

SCHEMA = "qualify.plan/1"
LARGEST_INPUT = 64 << 20
"""Bytes of JSON that are read from a file or standard input."""
CODES = {Outcome.ADMITTED: ExitCode.PASSED, Outcome.REFUSED: ExitCode.FAILED, Outcome.UNKNOWN: ExitCode.HELD}


def command(
    batch: Annotated[
        str, typer.Argument(metavar="BATCH", help="incident-a, incident-b, a JSON file, or - for standard input.")
    ],
    card: Annotated[str, typer.Option(help="Card to plan for.")] = "h200",
    assume: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Assume the stage of this name, which no tape covers; repeat."),
    ] = None,
    capacity: Annotated[int | None, typer.Option(help="Bytes of the card, in place of its own.")] = None,
    policy: Annotated[str, typer.Option(help="Policy whose ladder, reserve and claims apply.")] = "forecast",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document for each batch.")] = False,
) -> int:
    """Forecast a batch on a card from shipped tapes, and choose the cheapest way that fits.

    \b
    A batch is {"lengths": [tokens, ...], "groups": [[request index, ...], ...]}, each index in exactly one group;
    "slots" (a name per request) and "context" (context-parallel ranks) may be added. Several batches: one a line.

    \b
    A stage that no tape covers makes the outcome unknown, unless it is assumed by name: the assumption is then part of
    the forecast and printed with it. Exit code: 0 when the batch fits, 3 when it does not, 4 when that is unknown.

    \b
    Examples:
      qualify plan incident-b --card h200
      qualify plan incident-b --assume 40-layers --assume expert-lora --json
      echo '{"lengths": [4096, 512], "groups": [[0, 1]]}' | qualify plan -
    """
    require_supported(os.environ)
    batches = _batches(batch)
    with progress([each.name for each in batches]) as position:
        plans = []
        for index, each in enumerate(batches):
            position[0] = index
            plans.append(_plan(each, _card(card, capacity), assume or [], policy))
    for plan in plans:
        if as_json:
            typer.echo(json.dumps(_document(plan), indent=2 if len(plans) == 1 else None))
        else:
            typer.echo("\n".join(_text(plan)))
        if plan.outcome is Outcome.REFUSED:
            print(f"qualify: {plan.batch.name} refused: {plan.reason}", file=sys.stderr)  # noqa: T201
    return strongest(CODES[plan.outcome] for plan in plans)


def _batches(name: str) -> tuple[Batch, ...]:
    if name in incident_names():
        return (load_incident(name),)
    if name == "-":
        return parse_batches(_limited(sys.stdin.buffer.read(LARGEST_INPUT + 1), "standard input"), "standard input")
    path = Path(name)
    if not path.exists():
        raise InvalidInputError(
            f"{name}: no such file, and no batch of that name; known are {', '.join(incident_names())}"
        )
    if not path.is_file():
        raise InvalidInputError(f"{name or repr(name)}: is no regular file; give a batch's file, a batch's name, or -")
    with path.open("rb") as stream:
        return parse_batches(_limited(stream.read(LARGEST_INPUT + 1), name), name)


def _limited(text: bytes, source: str) -> bytes:
    if len(text) > LARGEST_INPUT:
        raise InvalidInputError(f"{source}: more than {LARGEST_INPUT} bytes; give a batch by its lengths and groups")
    return text


def _card(name: str, capacity: int | None) -> Card:
    card = load_card(name)
    if capacity is None:
        return card
    if capacity < 1:
        raise InvalidInputError(f"--capacity is {capacity}; give the card's bytes, 1 or more")
    return replace(card, capacity=capacity, capacity_source="--capacity")


def _plan(batch: Batch, card: Card, assume: list[str], policy: str) -> BatchPlan:
    target = Target(batch.context)
    assumptions = chosen_assumptions(assume, target)
    return plan_batch(batch, card, best_shipped(target), load_policy(policy), assumptions)


def _document(plan: BatchPlan) -> dict[str, Any]:
    known = assumptions_for(plan.target)
    return {
        "schema": SCHEMA,
        "name": plan.batch.name,
        "outcome": str(plan.outcome),
        "rung": plan.rung,
        "reason": plan.reason,
        "card": {"name": plan.card.name, "capacity": plan.card.capacity},
        "topology": Topology(context=plan.batch.context).label,
        "requests": len(plan.batch.shapes),
        "logical_tokens": plan.batch.logical_tokens,
        "packed_tokens": sum(shape.length for shape in plan.batch.shapes),
        "subforwards": [_row(row) for row in plan.subforwards],
        "uncovered": list(plan.uncovered),
        "assumed": [{"name": each.name, "meaning": each.meaning} for each in plan.assumed],
        "can_assume": {name: known[name].meaning for name in plan.uncovered if name in known},
        "scope": plan.scope,
        "start": plan.start,
        "available": plan.available,
        "decisions": [
            {"outcome": str(d.outcome), "rung": d.rung, "required": d.required, "available": d.available,
             "shortfall": d.shortfall, "reason": d.reason}
            for d in plan.decisions
        ],
        "time_percent": plan.time_percent,
        "note": plan.batch.note,
    }  # fmt: skip


def _row(row: SubforwardForecast) -> dict[str, Any]:
    bound = row.bound or (None, None, None)
    return {
        "group": row.group,
        "requests": list(row.requests),
        "slot": row.slot,
        "packed_tokens": row.packed_tokens,
        "rung": row.rung,
        "status": row.status,
        "allocated": row.allocated,
        "reserved": row.reserved,
        "device_used": row.device_used,
        "bound": {"allocated": bound[0], "reserved": bound[1], "device_used": bound[2]},
        "notes": list(row.notes),
    }


def _text(plan: BatchPlan) -> Iterator[str]:
    requests = plan.batch.shapes
    under = f" under {len(plan.assumed)} assumptions" if plan.assumed else ""
    way = f": {plan.rung}, {plan.time_percent} % of the undivided plan's time" if plan.rung else f": {plan.reason}"
    yield f"{plan.batch.name}: {plan.outcome}{under}{way}"
    packed = sum(shape.length for shape in requests)
    count = "1 request" if len(requests) == 1 else f"{len(requests)} requests"
    yield (
        f"{count}, {plan.batch.logical_tokens:,} logical and {packed:,} packed tokens; "
        f"{Topology(context=plan.batch.context).label}; card {plan.card.name} of {plan.card.capacity:,} B"
    )
    if plan.batch.note:
        yield f"batch: {plan.batch.note}"
    yield f"figures: {plan.scope}"
    if plan.subforwards:
        yield ""
        yield from _table(plan)
        yield "GiB for each rank, expected / bound; requests by their index in the batch"
    for note in dict.fromkeys(note for row in plan.subforwards for note in row.notes):
        yield f"note: {note}"
    known = assumptions_for(plan.target)
    for each in plan.assumed:
        yield f"assumed {each.name}: {each.meaning}"
    for name in plan.uncovered:
        hint = f"; --assume {name}: {known[name].meaning}" if name in known else ""
        yield f"uncovered {name}{hint}"


def _table(plan: BatchPlan) -> Iterator[str]:
    heads = ("group", "slot", "rung", "packed", "status", "allocated", "reserved", "device used", "requests")
    rows = [heads, *(_cells(row) for row in plan.subforwards)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _cells(row: SubforwardForecast) -> tuple[str, ...]:
    bound = row.bound or (None, None, None)
    expected = (row.allocated, row.reserved, row.device_used)
    figures = (f"{_gib(one)} / {_gib(other)}" for one, other in zip(expected, bound, strict=True))
    requests = ",".join(map(str, row.requests))
    return (str(row.group), row.slot, row.rung, f"{row.packed_tokens:,}", row.status, *figures, requests)


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / (1 << 30):.2f}"
