"""Two ranks through the whole pipeline: two leases, torchrun under the supervisor, one verdict, one receipt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.cli.main import execute
from qualification.criteria.context_parallel import judge
from qualification.criteria.observation import Observation
from qualification.records import Ground


def test_the_second_incident_runs_to_its_end_on_two_ranks_and_everything_is_cleaned_up(
    with_server: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = execute(["run", "--workload", "context_parallel", "--json"])
    summary = json.loads(capsys.readouterr().out)
    (result,) = summary["workloads"]
    assert (code, result["verdict"], result["reason"]) == (0, "PASSED", None)
    assert [lease["resource"].partition(":")[0] for lease in result["leases"]] == ["virtual", "virtual"]
    assert summary["receipt"]["status"] == "CLEAN"
    figures = {criterion["name"]: criterion for criterion in result["criteria"]}
    nothing = Observation("context_parallel", Ground.REHEARSAL, 0, False, ())
    assert figures.keys() == {criterion.name for criterion in judge(nothing)}
    assert figures["plans_below_whole"]["measured"] == 2
    assert execute(["verify"]) == 0
    assert list((with_server / "runs").iterdir()) != []
