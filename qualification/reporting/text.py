"""Evidence as tables for a terminal. Without one, lines are never cut or wrapped, so that output can be searched."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from qualification.reporting.lines import (
    DecisionLine,
    DeviceUse,
    Difference,
    MetricPoint,
    ResultDetail,
    ResultLine,
    RunDetail,
    RunLine,
    WordLine,
)

_GOOD = {"PASSED", "CLEAN", "adopted", "approve"}
_BAD = {"FAILED", "DIRTY", "rejected", "reject"}
_PIPE_WIDTH = 10_000


def console() -> Console:
    """Return a console on standard output; as wide as need be where that is no terminal."""
    wide = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(width=wide, highlight=False, soft_wrap=not sys.stdout.isatty())


def word(text: str | None) -> Text:
    """Return a verdict, status or decision in its colour; absent reads as a dash."""
    style = "green" if text in _GOOD else "red" if text in _BAD else "yellow"
    return Text(text or "-", style=style if text else "dim")


def runs_table(runs: Sequence[RunLine], newest: int | None = None) -> RenderableType:
    """Return one row per run; ``newest`` is the sequence below which more may follow."""
    if not runs:
        return Text("no run matches")
    table = _table("run", "started (UTC)", "commit", "policy", "ground", "workloads", "receipt", "decision")
    for run in runs:
        shown = Text(", ").join(Text.assemble(f"{one.workload} ", word(one.verdict)) for one in run.results)
        table.add_row(
            run.run,
            run.started_at[:19].replace("T", " "),
            f"{run.commit[:12]}{' dirty' if run.dirty else ''}",
            run.policy,
            run.ground,
            shown,
            _worst_receipt(run),
            word(run.decision.decision if run.decision else None),
        )
    more = [Text(f"more: --before {newest}", style="dim")] if newest is not None else []
    return Group(table, *more)


def results_table(results: Iterable[ResultLine]) -> Table:
    """Return one row per result."""
    table = _table("run", "workload", "ground", "card", "verdict", "commit", "started (UTC)", "seconds", "reason")
    for one in results:
        started, seconds = one.started_at[:19].replace("T", " "), f"{one.duration_ms / 1000:.1f}"
        row = (one.commit[:12], started, seconds, one.reason or "")
        table.add_row(one.run, one.workload, one.ground, one.card or "-", word(one.verdict), *row)
    return table


def detail_tables(detail: RunDetail) -> RenderableType:
    """Return a run's tables: source, figures, artifacts, receipts, decisions, words."""
    run = detail.run
    about = _table("", "", header=False)
    for name in ("run", "commit", "tree", "repository", "reference", "ground", "policy", "rules_sha256", "started_at"):
        about.add_row(name.replace("_", " "), str(getattr(run, name) or "-"))
    about.add_row("uncommitted changes", "yes" if run.dirty else "no")
    parts: list[RenderableType] = [about]
    for one in detail.results:
        parts += ["", _heading(one), _criteria(one)]
        if one.artifacts:
            parts += ["", _artifacts(one)]
    receipts = _table("receipt", "status", "exit code", "taken (UTC)", "reason")
    for proof in run.receipts:
        code = "-" if proof.exit_code is None else str(proof.exit_code)
        taken = proof.taken_at[:19].replace("T", " ")
        receipts.add_row(f"attempt {proof.attempt}", word(proof.status), code, taken, proof.reason or "")
    parts += ["", receipts]
    if detail.decisions:
        parts += ["", _decisions(detail.decisions)]
    if detail.words:
        parts += ["", words_table(detail.words)]
    return Group(*parts)


def why_lines(run: RunLine) -> RenderableType:
    """Return the newest recorded decision of a run and its reasons."""
    made = run.decision
    if made is None:
        return Text(f"no decision on run {run.run} is recorded; qualify gate check {run.run} asks for one")
    head = Text.assemble(word(made.decision), f" (row {made.row}, sequence {made.sequence}): run {run.run}")
    return Group(head, *(Text(f"  - {reason}") for reason in made.reasons))


def trend_table(metric: str, points: Sequence[MetricPoint]) -> RenderableType:
    """Return one row per figure of a metric."""
    if not points:
        return Text(f"no figure {metric!r} is recorded")
    table = _table("run", "commit", "started (UTC)", "workload", "policy", metric, "threshold", "verdict")
    for one in points:
        started = one.started_at[:19].replace("T", " ")
        measured = "-" if one.measured is None else f"{one.measured} {one.unit or ''}".strip()
        row = (one.run, one.commit[:12], started, one.workload, one.policy, measured, one.threshold or "-")
        table.add_row(*row, word(one.verdict))
    return table


def diff_table(runs: Sequence[str], found: Sequence[Difference]) -> RenderableType:
    """Return one row per difference of two runs."""
    if not found:
        return Text(f"runs {runs[0]} and {runs[1]} do not differ in what was recorded")
    table = _table("", *runs)
    for one in found:
        table.add_row(one.what, one.first or "-", one.second or "-")
    return table


def device_table(resource: str, uses: Sequence[DeviceUse]) -> RenderableType:
    """Return one row per recorded use of a device."""
    if not uses:
        return Text(f"no use of device {resource!r} is recorded in that time")
    table = _table("at (UTC)", "run", "token", "sequence")
    for use in uses:
        table.add_row(use.at[:19].replace("T", " "), use.run, str(use.token), str(use.sequence))
    return table


def words_table(said: Sequence[WordLine]) -> RenderableType:
    """Return one row per person's word."""
    if not said:
        return Text("no approval expires in that time")
    table = _table("person", "word", "commit", "policy", "signed (UTC)", "expires (UTC)", "note")
    for one in said:
        signed, expires = (stamp[:19].replace("T", " ") for stamp in (one.signed_at, one.expires_at))
        table.add_row(one.person, word(one.action), one.commit[:12], one.policy, signed, expires, one.note or "")
    return table


def _table(*headings: str, header: bool = True) -> Table:
    table = Table(show_header=header, show_edge=False, pad_edge=False, box=None, header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _worst_receipt(run: RunLine) -> Text:
    statuses = {receipt.status for receipt in run.receipts}
    return word(next((status for status in ("DIRTY", "UNVERIFIED", "CLEAN") if status in statuses), None))


def _heading(one: ResultDetail) -> Text:
    result = one.result
    where = f"  {result.ground}, attempt {result.attempt}, {result.duration_ms / 1000:.1f} s, parameters: {one.given}"
    reason = f": {result.reason}" if result.reason else ""
    return Text.assemble((result.workload, "bold"), " ", word(result.verdict), where, reason)


def _criteria(one: ResultDetail) -> Table:
    table = _table("criterion", "measured", "", "threshold", "unit", "basis", "verdict", "reason")
    for criterion in one.criteria:
        sign = {"at_most": "<=", "at_least": ">=", "equal": "="}.get(criterion.direction or "", "")
        table.add_row(
            criterion.name,
            criterion.measured or "-",
            sign,
            criterion.threshold or "-",
            criterion.unit or "",
            criterion.basis,
            word(criterion.verdict),
            criterion.reason or "",
        )
    return table


def _artifacts(one: ResultDetail) -> Table:
    table = _table("artifact", "bytes", "kind", "sha256")
    for artifact in one.artifacts:
        kind = f"{artifact.media_type}{', private' if artifact.private else ''}"
        table.add_row(artifact.name, str(artifact.size), kind, artifact.sha256)
    return table


def _decisions(made: Sequence[DecisionLine]) -> Table:
    table = _table("decision", "row", "decided (UTC)", "sequence", "reasons")
    for one in made:
        decided = one.decided_at[:19].replace("T", " ")
        table.add_row(word(one.decision), one.row, decided, str(one.sequence), "; ".join(one.reasons))
    return table
