"""The workload throughput, run whole by the worker: both arms do the same work, alternately."""

from __future__ import annotations

from pathlib import Path

from qualification.records import Verdict
from tests.qualification.workloads.test_releases import qualify


def test_both_arms_are_measured_alternately_on_the_same_work(tmp_path: Path) -> None:
    sizes = {"steps": 1, "requests": 2, "shortest": 8, "longest": 16}
    found = {one.name: one for one in qualify("throughput", "budgeted", tmp_path, **sizes)}
    assert found["exit_code"].verdict is Verdict.PASSED
    assert found["measurements"].measured == 10
    assert (found["work_differs"].measured, found["work_differs"].verdict) == (0, Verdict.PASSED)
    assert str(found["step_time_ratio"].reason).endswith("5 pairs")
