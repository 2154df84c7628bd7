"""How long the questions of ``qualify evidence`` take at 100,000 runs and 2 million artifacts, on SQLite.

The peer is plain SQLAlchemy in the same run: the one indexed SELECT that finds the rows, without what belongs to them.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Table, select

from db import models, queries
from db.engine import open_for_writing, reading, sqlite_url, writing
from qualification.reporting.lines import Filter

RUNS, ARTIFACTS, CALLS = 100_000, 20, 200
PAGE = 50
POLICIES = ("none", "budgeted", "forecast")
WORKLOADS = ("full_step", "pressure", "context_parallel")
VERDICTS = ("PASSED",) * 95 + ("FAILED",) * 3 + ("INCOMPLETE", "INCONCLUSIVE")
CARDS = ("h200",) * 9 + ("h100",)
_BATCH = 2_000


def digest(text: str) -> str:
    """Return 64 hex digits that stand for ``text``."""
    return sha256(text.encode()).hexdigest()


def commit(number: int) -> str:
    """Return the commit of a run: a hundred runs each."""
    return digest(f"commit {number // 100}")[:40]


def rows(number: int, source: random.Random) -> list[tuple[Table, dict[str, Any]]]:
    """Return the projected rows of one run: a result, two figures, twenty artifacts, a receipt and a decision."""
    run, sequence, policy = f"run-{number:06d}", 3 * number + 1, source.choice(POLICIES)
    started = f"2026-{1 + number // 10_000:02d}-{1 + number // 400 % 25:02d}T{number // 20 % 20:02d}:00:00Z"
    shared = {"run": run, "commit": commit(number)}
    policies = {"policy": policy, "policy_sha256": digest(policy), "rules_sha256": digest("rules")}
    made: list[tuple[Table, dict[str, Any]]] = [
        (
            models.runs,
            {
                **shared,
                **policies,
                "tree": commit(number),
                "repository": "example.org/training",
                "reference": None,
                "pull_request": number // 100 if number % 2 else None,
                "dirty": False,
                "ground": "native",
                "started_at": started,
            },
        ),
        (
            models.workload_results,
            {
                **shared,
                **policies,
                "attempt": 1,
                "workload": source.choice(WORKLOADS),
                "ground": "native",
                "card": source.choice(CARDS),
                "environment_sha256": digest("environment"),
                "verdict": source.choice(VERDICTS),
                "started_at": started,
                "duration_ms": 1000,
                "exit_code": 0,
                "reason": None,
            },
        ),
        (models.devices, {"position": 0, "run": run, "resource": f"gpu-{number % 8}", "token": number, "at": started}),
    ]
    for position, name in enumerate(("backwards", "allocated_worst_error")):
        figures = {"measured": str(number), "threshold": "18", "direction": "equal", "unit": "steps", "reason": None}
        made.append(
            (
                models.criteria,
                {"position": position, "name": name, "verdict": "PASSED", "basis": "measured", **figures},
            )
        )
    for position in range(ARTIFACTS):
        content = {"sha256": digest(f"{number} {position}"), "size": 10_000, "media_type": "application/gzip"}
        about = {"name": f"step-{position}", "private": False, "projection_of": None}
        made.append((models.artifacts, {"position": position, **about, **content}))
    proof = {"attempt": 1, "status": "CLEAN", "exit_code": 0, "timed_out": False, "recovered": False, "reason": None}
    answer = {"decision": "held", "row": "unapproved", "evidence_root": digest(run), "ledger_root": digest(run)}
    decided = {"rules_sha256": digest("rules"), "ledger_size": sequence, "decided_at": started}
    return [
        *((table, {"sequence": sequence, **values}) for table, values in made),
        (models.receipts, {"sequence": sequence + 1, **shared, "taken_at": started, **proof}),
        (models.decisions, {"sequence": sequence + 2, **shared, **answer, **decided}),
        (models.reasons, {"sequence": sequence + 2, "position": 0, "reason": "0 of 1 approvals"}),
    ]


def fill(connection: Connection) -> None:
    """Write the projected rows of all runs."""
    source = random.Random(7)
    gathered: dict[Table, list[dict[str, Any]]] = {}
    for number in range(RUNS):
        for table, values in rows(number, source):
            gathered.setdefault(table, []).append(values)
        if (number + 1) % _BATCH == 0:
            for table, values_list in gathered.items():
                connection.execute(table.insert(), values_list)
            gathered = {}


def measure(ask: Callable[[random.Random], object]) -> tuple[float, float]:
    """Return median and 95th percentile in milliseconds over many random questions."""
    source, times = random.Random(11), []
    for _ in range(CALLS):
        started = time.perf_counter()
        ask(source)
        times.append(1000 * (time.perf_counter() - started))
    times.sort()
    return times[CALLS // 2], times[CALLS * 95 // 100]


def questions(connection: Connection) -> dict[str, Callable[[random.Random], object]]:
    """Return what is asked, by name; random where the answer depends on it."""

    def page(wanted: Filter) -> Callable[[random.Random], object]:
        return lambda _: queries.list_runs(connection, wanted, PAGE)

    def any_run(source: random.Random) -> int:
        return source.randrange(RUNS)

    return {
        "one run by name": lambda source: queries.find_run(connection, f"run-{any_run(source):06d}"),
        "newest by commit": lambda source: queries.find_run(connection, commit=commit(any_run(source))),
        "latest per policy, workload": lambda source: queries.latest_result(
            connection, source.choice(POLICIES), source.choice(WORKLOADS)
        ),
        "by artifact": lambda source: queries.list_runs(
            connection, Filter(artifact=digest(f"{any_run(source)} 3")), PAGE
        ),
        "by pull request, page": lambda source: queries.list_runs(
            connection, Filter(pull_request=any_run(source) // 100), PAGE
        ),
        "by policy, page": page(Filter(policy="forecast")),
        "FAILED of a workload, page": page(Filter(verdict="FAILED", workload="pressure")),
        "PASSED on a card, page": page(Filter(verdict="PASSED", card="h100")),
        "month, page": page(Filter(since="2026-04-01", until="2026-05-01")),
        "trend of a figure, page": lambda _: queries.metric_history(
            connection, "allocated_worst_error", workload="pressure", policy="none", limit=PAGE
        ),
        "what ran on a GPU, page": lambda source: queries.device_history(
            connection, f"gpu-{source.randrange(8)}", since="2026-05-01", limit=PAGE
        ),
        "peer: SELECT by commit": lambda source: connection.execute(
            select(models.runs)
            .where(models.runs.c.commit == commit(any_run(source)))
            .order_by(models.runs.c.sequence.desc())
            .limit(1)
        ).all(),
        "peer: SELECT a page": lambda _: connection.execute(
            select(models.runs)
            .where(models.runs.c.policy == "forecast")
            .order_by(models.runs.c.sequence.desc())
            .limit(PAGE)
        ).all(),
    }


def main() -> None:
    """Fill a database and ask."""
    with tempfile.TemporaryDirectory() as folder:
        engine = open_for_writing(sqlite_url(Path(folder) / "evidence.db"))
        started = time.perf_counter()
        with writing(engine) as connection:
            fill(connection)
        print(f"{RUNS} runs, {RUNS * ARTIFACTS} artifacts, filled in {time.perf_counter() - started:.0f} s")
        with reading(engine) as connection:
            measured = {name: measure(ask) for name, ask in questions(connection).items()}
        engine.dispose()
    for name, (median, high) in measured.items():
        peer = measured["peer: SELECT a page" if "page" in name else "peer: SELECT by commit"][0]
        print(f"{name:30} median {median:7.2f} ms, p95 {high:7.2f} ms, {median / peer:5.1f} x peer")


if __name__ == "__main__":
    main()
