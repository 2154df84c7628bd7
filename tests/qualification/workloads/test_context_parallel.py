"""The context-parallel workload on two real ranks, started as the pipeline does and judged from what they left."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from qualification.criteria.context_parallel import judge
from qualification.criteria.observation import Observation, understood
from qualification.errors import ConfigurationError
from qualification.execution.launch import launch
from qualification.execution.supervision import Ending
from qualification.execution.worker import Context, Job
from qualification.records import Criterion, Ground, Verdict
from qualification.workloads import context_parallel, devices_needed, ranks_needed
from qualification.workloads.recompute import replays

ROOT = Path(__file__).parents[3]
UNSUMMED = "sum_over_ranks([each.grad for each in parameters if each.grad is not None], self._group)"


def job_for(folder: Path, subject: Path, ground: Ground, **parameters: int) -> Job:
    return Job(
        run="run-of-a-test",
        attempt=1,
        workload="context_parallel",
        ground=ground,
        policy="forecast",
        subject=str(subject),
        output=str(folder / "output"),
        parameters=parameters,
    )


def qualify(folder: Path, subject: Path, gpus: Sequence[str] = (), **parameters: int) -> dict[str, Criterion]:
    output, ground = folder / "output", Ground.NATIVE if gpus else Ground.REHEARSAL
    job = job_for(folder, subject, ground, **parameters)
    (folder / "job.json").write_bytes(msgspec.json.encode(job))
    launched = launch(
        folder / "job.json",
        run="r",
        token=f"context-{folder.name}",
        folder=folder / "work",
        ranks=2,
        gpus=gpus,
        environment={"OMP_NUM_THREADS": "1"},
    )
    assert launched.outcome.ending is Ending.EXITED
    files = {str(path.relative_to(output)): path for path in output.rglob("*") if path.is_file()}
    criteria = judge(
        Observation(
            workload="context_parallel",
            ground=ground,
            exit_code=launched.outcome.exit_code,
            timed_out=False,
            events=understood(launched.events()),
            artifacts=files,
            replays=replays(files),
        )
    )
    return {each.name: each for each in criteria}


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


@pytest.mark.gpu
def test_two_real_cards_run_it_through_nccl(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices; run on a host with two GPUs")
    uuids = [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(2)]
    criteria = qualify(tmp_path, ROOT, uuids)
    assert {name: each.reason for name, each in criteria.items() if each.verdict is not Verdict.PASSED} == {}


def test_it_asks_for_two_devices_and_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices_needed(["full_step", "context_parallel"]) == ranks_needed("context_parallel") == 2
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for ground, layers, words in (
        (Ground.NATIVE, 0, "needs 2 GPUs on ground native; 1 seen here"),
        (Ground.REHEARSAL, 0, "needs 2 ranks; start its worker with torchrun"),
        (Ground.REHEARSAL, 4, "the Megatron model on ground native alone"),
    ):
        context = Context(job_for(tmp_path, ROOT, ground, layers=layers), None, tmp_path, 1)
        with pytest.raises(ConfigurationError, match=words):
            context_parallel.run(context)
