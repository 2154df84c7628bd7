"""The context-parallel workload on two real ranks, started as the pipeline does and judged from what they left."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from qualification.criteria.context_parallel import judge
from qualification.criteria.observation import Observation, understood
from qualification.execution.launch import launch
from qualification.execution.supervision import Ending
from qualification.execution.worker import Job
from qualification.records import Criterion, Ground, Verdict
from qualification.workloads.recompute import replays

ROOT = Path(__file__).parents[3]
UNSUMMED = "sum_over_ranks([each.grad for each in parameters if each.grad is not None], self._group)"


def qualify(folder: Path, subject: Path, **parameters: int) -> dict[str, Criterion]:
    output = folder / "output"
    job = Job(
        run="run-of-a-test",
        attempt=1,
        workload="context_parallel",
        ground=Ground.REHEARSAL,
        policy="forecast",
        subject=str(subject),
        output=str(output),
        parameters=parameters,
    )
    (folder / "job.json").write_bytes(msgspec.json.encode(job))
    launched = launch(
        folder / "job.json",
        run="r",
        token=f"context-{folder.name}",
        folder=folder / "work",
        ranks=2,
        environment={"OMP_NUM_THREADS": "1"},
    )
    assert launched.outcome.ending is Ending.EXITED
    files = {str(path.relative_to(output)): path for path in output.rglob("*") if path.is_file()}
    criteria = judge(
        Observation(
            workload="context_parallel",
            ground=Ground.REHEARSAL,
            exit_code=launched.outcome.exit_code,
            timed_out=False,
            events=understood(launched.events()),
            artifacts=files,
            replays=replays(files),
        )
    )
    return {each.name: each for each in criteria}


def test_the_incident_runs_to_its_end_on_two_ranks_that_stay_replicas(tmp_path: Path) -> None:
    criteria = qualify(tmp_path, ROOT)
    assert {name: each.reason for name, each in criteria.items() if each.verdict is not Verdict.PASSED} == {}
    assert criteria["plans_below_whole"].measured == 2


def test_a_head_that_does_not_sum_gradients_fails(tmp_path: Path) -> None:
    package = tmp_path / "head" / "trainer_rank"
    shutil.copytree(ROOT / "trainer_rank", package, ignore=shutil.ignore_patterns("__pycache__", "recordings"))
    source = (package / "replicas.py").read_text()
    assert source.count(UNSUMMED) == 1
    (package / "replicas.py").write_text(source.replace(UNSUMMED, "pass"))
    criteria = qualify(tmp_path, package.parent, scale=4000)
    failed = criteria["replica_tensors_differing"]
    assert failed.verdict is Verdict.FAILED
    assert "differs between the ranks, group tiny" in (failed.reason or "")
    assert criteria["replica_digests_differing"].verdict is Verdict.FAILED
