"""What plans, decides and replays never needs torch: it starts at once, on any machine."""

import subprocess
import sys

import pytest

PURE = (
    "requests", "packing", "prefixes", "forecasting", "policies", "admission.budget", "admission.decide",
    "admission.ladder", "admission.planner", "admission.refusal", "admission.vote", "reports.report", "reports.replay",
    "reports.spool",
)  # fmt: skip


@pytest.mark.parametrize("module", PURE)
def test_a_pure_module_does_not_import_torch(module: str) -> None:
    code = f"import sys, trainer_rank.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
