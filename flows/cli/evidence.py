"""``qualify evidence``: what was recorded, in the terms in which people ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from sqlalchemy import Connection

from db import queries
from db.engine import open_for_reading, reading
from flows.cli.exits import ExitCode
from qualification.errors import ConfigurationError
from qualification.evidence.blobs import BlobStore
from qualification.git import require_commit
from qualification.home import home
from qualification.records import Ground, Verdict
from qualification.reporting import text
from qualification.reporting.difference import differences
from qualification.reporting.lines import Filter, RunDetail

app = typer.Typer(no_args_is_help=True)

SCHEMA = "qualify.evidence.{}/1"

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
LimitOption = Annotated[int, typer.Option("--limit", min=1, max=1000, help="At most this many.")]
PolicyOption = Annotated[str | None, typer.Option("--policy", help="A policy, by name or digest.")]
WorkloadOption = Annotated[str | None, typer.Option("--workload", help="A workload.")]
CommitOption = Annotated[
    str | None, typer.Option("--commit", parser=require_commit, metavar="SHA", help="A commit, 40 hex digits.")
]
RunName = Annotated[str | None, typer.Argument(help="A run, or a start of its name. Default: the newest.")]
SinceOption = Annotated[str | None, typer.Option("--since", help="From this UTC time on, for example 2026-11-30.")]


@app.callback()
def group() -> None:
    """List and show what was recorded. These commands only read; qualify verify says whether it is intact."""


@app.command("list")
def list_runs(
    commit: CommitOption = None,
    pull_request: Annotated[int | None, typer.Option("--pr", min=1, help="Runs of this pull request.")] = None,
    policy: PolicyOption = None,
    workload: WorkloadOption = None,
    verdict: Annotated[
        Verdict | None, typer.Option("--verdict", case_sensitive=False, help="Runs with a result of this verdict.")
    ] = None,
    card: Annotated[str | None, typer.Option("--card", help="Runs on this card, for example h200.")] = None,
    ground: Annotated[Ground | None, typer.Option("--ground", help="Runs on this ground.")] = None,
    artifact: Annotated[
        str | None, typer.Option("--artifact", help="Runs that hold this file (64 hex digits).")
    ] = None,
    since: SinceOption = None,
    until: Annotated[str | None, typer.Option("--until", help="Before this UTC time.")] = None,
    before: Annotated[int | None, typer.Option("--before", help="Go on below this sequence.")] = None,
    limit: LimitOption = 20,
    as_json: JsonOption = False,
) -> int:
    """List the newest runs that match, with verdicts, receipts and the newest decision.

    \b
    Examples:
      qualify evidence list
      qualify evidence list --workload full_step --verdict FAILED --since 2026-11-01
      qualify evidence list --pr 128 --json | jq -r '.runs[].run'
    """
    wanted = Filter(
        commit=commit,
        pull_request=pull_request,
        policy=policy,
        workload=workload,
        verdict=verdict.value if verdict else None,
        card=card,
        ground=ground.value if ground else None,
        artifact=artifact,
        since=_stamp("--since", since),
        until=_stamp("--until", until),
        before=before,
    )
    with _evidence() as connection:
        runs = queries.list_runs(connection, wanted, limit)
    if as_json:
        return _document("list", runs=runs)
    return _print(text.runs_table(runs, newest=runs[-1].sequence if len(runs) == limit else None))


@app.command()
def show(
    run: RunName = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a page with tables and plots to this new file.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Show one run: every figure against its threshold, artifacts, receipts, decisions and people's words.

    \b
    Examples:
      qualify evidence show
      qualify evidence show 20261130-2201 --json
      qualify evidence show --html run.html
    """
    with _evidence() as connection:
        detail = queries.run_detail(connection, queries.find_run(connection, run))
    if html is not None:
        from qualification.reporting.page import holds_events, page

        return _write(html, page(detail, _events(detail, holds_events)))
    if as_json:
        return _document("show", **msgspec.structs.asdict(detail))
    return _print(text.detail_tables(detail))


@app.command()
def why(
    run: RunName = None,
    commit: CommitOption = None,
    as_json: JsonOption = False,
) -> int:
    """Say why a run is held, as recorded; qualify gate explain asks again.

    \b
    Examples:
      qualify evidence why
      qualify evidence why --commit 0123456789abcdef0123456789abcdef01234567
    """
    with _evidence() as connection:
        line = queries.find_run(connection, run, commit)
    if as_json:
        return _document("why", run=line.run, decision=line.decision)
    return _print(text.why_lines(line))


@app.command()
def latest(
    policy: Annotated[str, typer.Argument(help="A policy, by name or digest.", show_default=False)],
    workload: Annotated[str, typer.Argument(help="A workload.", show_default=False)],
    as_json: JsonOption = False,
) -> int:
    """Show the newest result of a workload under a policy.

    \b
    Example:
      qualify evidence latest forecast full_step
    """
    with _evidence() as connection:
        found = queries.latest_result(connection, policy, workload)
    if found is None:
        raise ConfigurationError(f"no result of workload {workload!r} under policy {policy!r} is recorded")
    return _document("latest", result=found) if as_json else _print(text.results_table([found]))


@app.command()
def trend(
    metric: Annotated[str, typer.Argument(help="A criterion's name.", show_default=False)],
    workload: WorkloadOption = None,
    policy: PolicyOption = None,
    limit: LimitOption = 20,
    as_json: JsonOption = False,
) -> int:
    """Show how a figure developed over commits, newest first.

    \b
    Example:
      qualify evidence trend allocated_worst_error --workload full_step
    """
    with _evidence() as connection:
        points = queries.metric_history(connection, metric, workload, policy, limit)
    return _document("trend", metric=metric, points=points) if as_json else _print(text.trend_table(metric, points))


@app.command()
def diff(
    first: Annotated[str, typer.Argument(help="A run.", show_default=False)],
    second: Annotated[str, typer.Argument(help="Another run.", show_default=False)],
    as_json: JsonOption = False,
) -> int:
    """Show in what two runs differ: source, policy, rules, figures and artifacts.

    \b
    Example:
      qualify evidence diff 20261129-0300 20261130-0300
    """
    with _evidence() as connection:
        details = [queries.run_detail(connection, queries.find_run(connection, name)) for name in (first, second)]
    found = differences(*details)
    if as_json:
        return _document("diff", runs=[one.run.run for one in details], differences=found)
    return _print(text.diff_table([one.run.run for one in details], found))


@app.command()
def device(
    resource: Annotated[str, typer.Argument(help="A device, as qualify gpus names it.", show_default=False)],
    since: SinceOption = None,
    limit: LimitOption = 20,
    as_json: JsonOption = False,
) -> int:
    """Show what ran on a device, newest first.

    \b
    Example:
      qualify evidence device virtual:0 --since 2026-11-30
    """
    with _evidence() as connection:
        uses = queries.device_history(connection, resource, _stamp("--since", since), limit)
    return _document("device", resource=resource, uses=uses) if as_json else _print(text.device_table(resource, uses))


@app.command()
def approvals(
    days: Annotated[int, typer.Option("--expire-within", min=0, help="Days from now.")] = 7,
    limit: LimitOption = 20,
    as_json: JsonOption = False,
) -> int:
    """Show which approvals expire soon, the soonest first.

    \b
    Example:
      qualify evidence approvals --expire-within 2
    """
    now = datetime.now(UTC)
    bounds = tuple(f"{moment:%Y-%m-%dT%H:%M:%SZ}" for moment in (now, now + timedelta(days=days)))
    with _evidence() as connection:
        words = queries.words(connection, expiring=(bounds[0], bounds[1]), limit=limit)
    return _document("approvals", approvals=words) if as_json else _print(text.words_table(words))


@contextmanager
def _evidence() -> Iterator[Connection]:
    engine = open_for_reading()
    try:
        with reading(engine) as connection:
            yield connection
    finally:
        engine.dispose()


def _stamp(option: str, given: str | None) -> str | None:
    """Return a time given by a person as a UTC stamp; a time without a zone is UTC."""
    if given is None:
        return None
    try:
        moment = datetime.fromisoformat(given)
    except ValueError:
        raise ConfigurationError(f"{option} {given!r} is no time; give 2026-11-30 or 2026-11-30T22:00:00Z") from None
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return aware.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _document(kind: str, **content: Any) -> int:  # noqa: ANN401 - typed lines of several kinds
    typer.echo(msgspec.json.encode({"schema": SCHEMA.format(kind), **content}))
    return ExitCode.PASSED


def _print(shown: Any) -> int:  # noqa: ANN401 - whatever rich can print
    text.console().print(shown)
    return ExitCode.PASSED


def _events(detail: RunDetail, wanted: Callable[[str], bool]) -> dict[int, bytes]:
    """Read the stamped events of each result that holds them, by the result's sequence; of its last process."""
    store = BlobStore(home())
    return {
        one.result.sequence: store.read(artifact.sha256)
        for one in detail.results
        for artifact in one.artifacts
        if wanted(artifact.name)
    }


def _write(path: Path, page: str) -> int:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(page)
    except FileExistsError:
        raise ConfigurationError(f"{path} is there already; name a new file") from None
    typer.echo(f"qualify: wrote {path}", err=True)
    return ExitCode.PASSED
