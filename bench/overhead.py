"""What the pipeline costs beyond the workload, with a temporary Prefect server, against an empty flow on the same.

``startup`` is the time until the flow's first line (interpreter, Prefect, its temporary server), ``pipeline`` what lies
between the first and the last line of the flow less the supervised workload itself: subject, evidence, lease,
supervision, judging, receipt, gate. Each figure is the median of three whole processes.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

REPEATS = 3
_EMPTY = (
    "from flows.orchestrator import on_prefect\n"
    "with on_prefect(lambda: None):\n"
    "    from prefect import flow\n"
    "    flow(lambda: None, name='empty')()\n"
)
_QUALIFY = "from flows.cli.main import main; main()"
_SMALL = ["run", "--json", "--parameter", "updates=1", "--parameter", "batches=1"]


def empty_flow(environment: dict[str, str]) -> float:
    """Return the wall seconds of a process that runs an empty flow on a temporary server."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", _EMPTY], env=environment, check=True, capture_output=True)
    return time.perf_counter() - started


def qualification(environment: dict[str, str]) -> tuple[float, float, float]:
    """Return wall seconds until the flow's first line, of the pipeline beyond the workload, and of the workload."""
    done = subprocess.run(
        [sys.executable, "-c", _QUALIFY, *_SMALL], env=environment, capture_output=True, text=True, check=False
    )
    workload = sum(result["duration_ms"] for result in json.loads(done.stdout)["workloads"]) / 1000
    stamps = {name: float(at) for at, name in re.findall(r"^ *([\d.]+) s  (\w+)", done.stderr, re.MULTILINE)}
    return stamps["subject"], stamps["decision"] - stamps["subject"] - workload, workload


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        environment = kept | {"QUALIFY_HOME": f"{folder}/home", "QUALIFY_TRUST": f"{folder}/trust"}
        empty = statistics.median(empty_flow(environment) for _ in range(REPEATS))
        runs = [qualification(environment) for _ in range(REPEATS)]
        startup, pipeline, workload = (statistics.median(column) for column in zip(*runs, strict=True))
        print(f"empty flow, whole process: {empty:.2f} s")
        print(
            f"qualify run: startup {startup:.2f} s, {startup / empty:.2f} x the empty flow; workload {workload:.1f} s"
        )
        print(f"pipeline beyond the workload: {pipeline:.2f} s (at most 2.5 s)")


if __name__ == "__main__":
    main()
