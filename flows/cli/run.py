"""``qualify run``: the whole pipeline once, on this machine."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from rich.console import Console

from flows.orchestrator import describe, on_prefect
from flows.progress import shared
from flows.request import DEFAULT_GRACE_SECONDS, DEFAULT_TIMEOUT_SECONDS, Request, parse_parameters, validate
from flows.summary import Summary, as_dict, table
from qualification.records import Ground


def command(
    workload: Annotated[
        list[str] | None,
        typer.Option(help="Run this workload; may be repeated. Default: those that the rules require."),
    ] = None,
    ground: Annotated[Ground, typer.Option(help="A virtual device, or the GPUs of this machine.")] = Ground.REHEARSAL,
    head: Annotated[str | None, typer.Option(help="Qualify this commit (40 hexadecimal digits).")] = None,
    repo: Annotated[str | None, typer.Option(help="Where the head is: a folder, or an https or ssh URL.")] = None,
    policy: Annotated[str, typer.Option(help="A policy that the subject ships.")] = "forecast",
    rules: Annotated[str, typer.Option(help="Gate rules: a shipped name, or the path of a .toml file.")] = "standard",
    parameter: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for every workload; may be repeated.", metavar="NAME=VALUE")
    ] = None,
    timeout: Annotated[int, typer.Option(help="Seconds that each workload may take.", min=1)] = DEFAULT_TIMEOUT_SECONDS,
    grace: Annotated[int, typer.Option(help="Seconds between TERM and KILL.", min=0)] = DEFAULT_GRACE_SECONDS,
    image: Annotated[str | None, typer.Option(help="Run the workers in containers of this image, by digest.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> int:
    """Qualify a policy: run workloads, prove cleanup, record evidence, ask the gate.

    Without --head the checkout that trainer_rank is imported from is qualified as it is, uncommitted changes and all,
    and the evidence says so.

    \b
    Exit code: 0 when every workload PASSED and the receipt is CLEAN, though the decision is held; 3 when one FAILED,
    4 when one is INCOMPLETE or INCONCLUSIVE, 6 when the receipt is not CLEAN, 5 when the evidence does not verify.

    \b
    Examples:
      qualify run
      qualify run --workload full_step --json
      qualify run --ground native --policy forecast
      qualify run --head 0123456789abcdef0123456789abcdef01234567 --repo ../trainer
    """
    request, _ = validate(
        Request(
            head=head,
            repository=repo,
            policy=policy,
            ground=ground,
            workloads=tuple(workload or ()),
            rules=rules,
            parameters=parse_parameters(parameter or ()),
            timeout_seconds=timeout,
            grace_seconds=grace,
            image=image,
        )
    )
    summary = run_flow(request)
    show(summary, as_json=as_json)
    return summary.exit_code


def show(summary: Summary, *, as_json: bool) -> None:
    """Print a run's summary, for people or as JSON."""
    if as_json:
        typer.echo(msgspec.json.encode(as_dict(summary)))
    else:
        Console(highlight=False).print(table(summary), f"\nnext: {summary.next}")


def run_flow(request: Request) -> Summary:
    """Run the Prefect flow in this process, on the configured server or a temporary one.

    What refuses the request is found before Prefect is there.
    """
    from flows.pipeline import require_runnable  # heavy: help comes without it

    shared().stage("prefect", describe())
    with on_prefect(lambda: require_runnable(request)):
        from flows.qualify import qualify

        return msgspec.convert(qualify(**msgspec.to_builtins(request)), Summary)
