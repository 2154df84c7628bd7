from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from bench._safety import peers, summary
from bench._safety.batches import budgeted
from bench._safety.experiment import keeper, run
from bench.admission import ground
from trainer_rank.requests import Request

PROBES = ((1,), (20, 9, 4), tuple(range(1, 41)), (31, 30, 29, 8, 2))


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    whole = ground()
    policy = replace(whole.policy, probe_lengths=PROBES, ladder=("whole", "split"))
    small = replace(whole, room=2 << 30, policy=policy, steps=3, seconds=100.0, frontiers=1, batches=1)
    path = tmp_path_factory.mktemp("safety") / "recording.json.gz"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "SHARES", (0.75, 1.1))
        run(small, keeper(path))
    whole.device.close()  # type: ignore[attr-defined]
    yield json.loads(gzip.decompress(path.read_bytes()))


def test_what_is_admitted_runs_within_its_bound(recording: dict[str, Any]) -> None:
    found = summary.steps_of(recording)
    assert (found.failed, found.retries) == (0, 0)
    assert found.admitted >= 3
    for row in recording["steps"]:
        if row["outcome"] == "ran":
            assert row["peak_reserved"] <= row["bound"] <= row["limit"]


def test_the_oracle_ran_at_least_what_was_admitted_and_nothing_that_failed(recording: dict[str, Any]) -> None:
    (row,) = recording["frontiers"]
    assert row["most"] >= row["admitted"] > 0
    assert row["tried"][str(row["most"])] is not None
    assert all(0 < each <= 1 for each in summary.ratios(recording))


def test_every_arm_trains_on_the_same_tokens(recording: dict[str, Any]) -> None:
    arms = [row for row in recording["arms"] if row["outcome"] == "finished"]
    assert [row["arm"] for row in (recording["arms"][0], recording["arms"][-1])] == ["admission", "admission"]
    assert len({row["tokens"] for row in arms}) == 1
    assert {"admission", "halving"} < {row["arm"] for row in arms}
    assert "against the best constant budget" in summary.summary(recording)


def test_a_constant_budget_groups_requests_in_order() -> None:
    import torch

    requests = [
        Request(torch.zeros(each, dtype=torch.int64), torch.zeros(each, dtype=torch.int64)) for each in (3, 4, 9, 1)
    ]
    assert [each.group for each in budgeted(requests, 8)] == ["0", "0", "1", "2"]
