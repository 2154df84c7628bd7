"""What a newcomer types first: the whole pipeline, with no server configured, on the checkout as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

READING = (
    ["--help"],
    ["trace", "check", "tests/data/traces/none.json"],
    ["plan", "incident-b", "--card", "h200"],
    ["evidence", "list"],
    ["evidence", "show"],
    ["verify"],
    ["gate", "check"],
    ["gate", "explain"],
    ["gpus"],
    ["db", "--help"],
    ["bundle", "--help"],
    ["tape", "--help"],
    ["replay", "--help"],
)


def _environment(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return kept | {"QUALIFY_HOME": str(home / "home"), "QUALIFY_TRUST": str(home / "trust")}


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Run ``qualify run --json`` once, as a process of its own, and return its folder and what it said."""
    home = tmp_path_factory.mktemp("newcomer")
    program = "from flows.cli.main import main; main()"
    command = [sys.executable, "-c", program, "run", "--json"]
    return home, subprocess.run(command, env=_environment(home), capture_output=True, text=True, check=False)


@pytest.mark.timeout(600)
def test_the_run_passes_cleans_up_and_is_held(newcomer: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    _, done = newcomer
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["schema"] == "qualify.run/1"
    assert [result["verdict"] for result in summary["workloads"]] == ["PASSED"]
    assert summary["receipt"]["status"] == "CLEAN"
    assert summary["decision"]["decision"] == "held"
    assert "full_step is rehearsal evidence, native is required" in summary["decision"]["reasons"]
    figures = {criterion["name"]: criterion for criterion in summary["workloads"][0]["criteria"]}
    assert figures["backwards"]["measured"] == 18
    assert {figure["basis"] for figure in figures.values()} == {"measured", "recomputed"}


def test_progress_is_told_on_standard_error(newcomer: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    _, done = newcomer
    for stage in ("prefect", "subject", "lease", "workload", "verdict", "receipt", "decision"):
        assert f"  {stage} " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", READING, ids=" ".join)
def test_reading_imports_neither_prefect_nor_torch(
    newcomer: tuple[Path, subprocess.CompletedProcess[str]], arguments: list[str]
) -> None:
    home, _ = newcomer
    program = (
        f"import sys; from flows.cli.main import execute; code = execute({arguments!r}); "
        "print(code, *sorted(set(sys.modules) & {'prefect', 'torch'}), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=_environment(home), capture_output=True, text=True, check=True
    )
    code, *heavy = done.stderr.splitlines()[-1].split()
    assert heavy == []
    assert code in ("0", "2", "4"), done.stderr
