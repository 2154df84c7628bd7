"""``qualify tape``: fit allocation tapes from recordings, check them on others, show what they hold."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from flows.cli.exits import ExitCode, strongest
from trainer_rank.allocator.trace import load_trace
from trainer_rank.errors import TapeError
from trainer_rank.tapes.anatomy import anatomy
from trainer_rank.tapes.check import Comparison, compare
from trainer_rank.tapes.fit import fit
from trainer_rank.tapes.forecast import Figures, Status
from trainer_rank.tapes.shipped import fit_shipped, shipped_tapes
from trainer_rank.tapes.storage import load_tape, save_tape
from trainer_rank.tapes.tape import Path as TapePath
from trainer_rank.tapes.tape import Probe, Tape, describe

if TYPE_CHECKING:
    from typer._click import Context

app = typer.Typer(no_args_is_help=True)

SHOW_SCHEMA = "qualify.tape.show/1"
CHECK_SCHEMA = "qualify.tape.check/1"
FIT_SCHEMA = "qualify.tape.fit/1"

Traces = Annotated[list[Path], typer.Argument(help="Recordings: JSON, plain or gzipped.", show_default=False)]
TapeFile = Annotated[Path, typer.Argument(help="Tape file.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@app.callback()
def group() -> None:
    """Fit allocation tapes from recordings, check them on others, show what they hold."""


@app.command()
def record(
    folder: Annotated[Path, typer.Option("--output", "-o", help="Folder that gets one trace for each probe.")],
    tape_file: Annotated[Path | None, typer.Option("--tape", "-t", help="Fit a tape from the probes too.")] = None,
    device: Annotated[str, typer.Option(help="virtual:CARD or cuda:INDEX.")] = "virtual:h200",
    geometry: Annotated[str, typer.Option(help="Geometry of the reference model: small or tiny.")] = "small",
    seconds: Annotated[float, typer.Option(help="Begin no probe that would end later than this.", min=1)] = 60.0,
    largest: Annotated[int, typer.Option(help="Largest packed rows of a probe.", min=64)] = 2500,
    sequences: Annotated[int, typer.Option(help="Sequences in a ragged probe.", min=2)] = 8,
) -> int:
    """Record whole steps of the reference model: small shapes first, then whichever settles most, until rules agree.

    \b
    Examples:
      qualify tape record -o probes -t reference.tape.json.gz
      qualify tape record -o probes --device cuda:0 --seconds 120 --largest 4096
    """
    recorder = import_module("flows.cli.tape_record")  # needs PyTorch, which reading a tape does not
    probes, tape = recorder.record_probes(
        folder, device=device, geometry=geometry, seconds=seconds, largest=largest, sequences=sequences
    )
    for probe in probes:
        trace = probe.trace
        typer.echo(
            f"{folder / trace.source}: peak {trace.peak_allocated:,} B allocated, {trace.peak_reserved:,} B reserved; "
            f"{probe.passes} passes"
        )
        for reason in probe.disturbances:
            typer.echo(f"  recorded again, {reason}")
    taken = [f"{each.size:,} B first taken in {each.name}" for each in tape.claims if each.size]
    typer.echo(f"outside PyTorch: {', '.join(taken) or 'nothing was taken while it recorded'}")
    if tape_file is not None:
        save_tape(tape, tape_file)
        typer.echo(_fitted(tape, tape_file, len(probes)))
    return ExitCode.PASSED


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
    tape = fit([load_trace(path) for path in traces], _facts(provenance or [], "--provenance"))
    save_tape(tape, output)
    row = describe(tape) | {"schema": FIT_SCHEMA, "tape": str(output)}
    if as_json:
        typer.echo(json.dumps(row, indent=2))
    else:
        typer.echo(_fitted(tape, output, len(traces)))
    return ExitCode.PASSED


@app.command()
def check(
    tape_file: TapeFile,
    traces: Traces,
    target: Annotated[
        list[str] | None, typer.Option("--target", help="NAME=VALUE that the tape must state; give it once per fact.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Forecast recordings, each from its own snapshot, and compare with what was observed.

    \b
    Exit code: 0 when every bound holds, 3 when one fails, 4 when a forecast is unknown.

    \b
    Examples:
      qualify tape check model.tape.json.gz unseen.json.gz
      qualify tape check --json model.tape.json.gz *.json.gz --target card=h200
    """
    tape = load_tape(tape_file, target=_facts(target or [], "--target"))
    rows = [(path, compare(tape, load_trace(path))) for path in traces]
    if as_json:
        files = [_row(path, each) for path, each in rows]
        typer.echo(json.dumps({"schema": CHECK_SCHEMA, "files": files}, indent=2))
    else:
        typer.echo("\n".join(_line(path, each) for path, each in rows))
    return strongest(_code(each) for _, each in rows)


class _PlotWithoutName(TyperCommand):
    """Lets ``--plot`` come without a file; typer's own options always take a value or never one."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Give a bare ``--plot`` its value, the empty path."""
        values = [*args[1:], "-"]
        bare = [each == "--plot" and value.startswith("-") for each, value in zip(args, values, strict=True)]
        return super().parse_args(
            ctx, [part for each, named in zip(args, bare, strict=True) for part in ([each, ""] if named else [each])]
        )


@app.command(cls=_PlotWithoutName)
def show(
    tape_file: TapeFile,
    plot: Annotated[
        str | None,
        typer.Option("--plot", metavar="[FILE]", help="Draw live memory by stage; without FILE, into TAPE.png here."),
    ] = None,
    probe: Annotated[str | None, typer.Option("--probe", help="Recording to take apart; the largest if none.")] = None,
    as_json: AsJson = False,
) -> int:
    """Show what a tape was fitted from, and what the peak of one of its recordings consists of.

    \b
    Examples:
      qualify tape show model.tape.json.gz
      qualify tape show model.tape.json.gz --plot memory.png
      qualify tape show model.tape.json.gz --plot
    """
    tape = load_tape(tape_file)
    path, chosen = _probe(tape, probe)
    parts = anatomy(tape, path, chosen)
    if plot is not None:
        from flows.cli.tape_plot import draw  # matplotlib takes a second to import

        drawn = Path(plot or f"{tape_file.name}.png")
        draw(parts, f"{tape_file.name}: {chosen.source}", drawn)
        typer.echo(f"{drawn}: live memory of {chosen.source}", err=True)
    row = describe(tape) | {
        "schema": SHOW_SCHEMA,
        "tape": str(tape_file),
        "probe": chosen.source,
        "peak_allocated": chosen.peak_allocated,
        "peak_stage": parts.stage,
        "composition": parts.composition,
    }
    typer.echo(json.dumps(row, indent=2) if as_json else _shown(row))
    return ExitCode.PASSED


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


def _fitted(tape: Tape, file: Path, recordings: int) -> str:
    counts = ", ".join(f"{count:,} {name}" for name, count in describe(tape)["grounds"].items())
    contexts = ", ".join(str(part.context) for part in tape.parts)
    return f"{file}: {recordings} recordings, context ranks {contexts}; allocations: {counts}"


def _probe(tape: Tape, name: str | None) -> tuple[TapePath, Probe]:
    found = [(path, probe) for part in tape.parts for path in part.paths for probe in path.probes]
    named = [each for each in found if name in (None, each[1].source)]
    if not named:
        known = ", ".join(probe.source for _, probe in found)
        raise TapeError(f"no recording {name!r} in this tape; choose of {known}")
    return max(named, key=lambda each: each[1].peak_allocated)


def _shown(row: dict[str, Any]) -> str:
    lines = [f"{name}: {value}" for name, value in row["provenance"].items()]
    for part in row["parts"]:
        lines.append(f"{part['context']} context ranks, {part['layers'] or 'unstated'} layers")
        for path in part["paths"]:
            probes = "; ".join(
                f"{probe['source']} ({', '.join(f'{k} {v:,}' for k, v in probe['features'].items())})"
                for probe in path["probes"]
            )
            lines.append(f"  {path['operations']:,} operations, {path['allocations']:,} allocations: {probes}")
    counts = ", ".join(f"{count:,} {name}" for name, count in row["grounds"].items())
    lines += [f"allocations by what explains them: {counts}"]
    lines += [f"outside PyTorch, {each['name']}: {each['size']:,} B, {each['source']}" for each in row["claims"]]
    lines += [f"peak of {row['probe']}: {row['peak_allocated']:,} B allocated, in {row['peak_stage']}"]
    lines += [f"  {size:>18,} B  {name}" for name, size in row["composition"].items()]
    return "\n".join(lines)


def _facts(rows: list[str], option: str) -> dict[str, str]:
    facts = {}
    for row in rows:
        name, equals, value = row.partition("=")
        if not equals or not name or not value:
            raise typer.BadParameter(f"{row!r} is not NAME=VALUE", param_hint=option)
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
        "reserved_by_stream": dict(made.streams),
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
    streams = [f"reserved for stream {stream}: {size:,} B" for stream, size in made.streams]
    return "\n  ".join([text, *streams, *made.notes])


def _code(comparison: Comparison) -> ExitCode:
    if comparison.bound_holds is None:
        return ExitCode.HELD
    return ExitCode.PASSED if comparison.bound_holds else ExitCode.FAILED
