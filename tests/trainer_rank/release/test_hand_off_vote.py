"""Two whole ranks over real Gloo vote at each hand-off: any need, all valid, cost summed, most work; outputs always."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as distributed

from trainer_rank.admission.agree import Agreement
from trainer_rank.devices.virtual import VirtualDevice
from trainer_rank.models.reference import TINY, build_reference
from trainer_rank.policies import load_policy
from trainer_rank.rank import TrainerRank
from trainer_rank.release.account import Balance, Reason
from trainer_rank.requests import Request

CAPACITY = 1_358_757_888 + (1 << 29)
STEPS = ("calm", "one needs", "both need", "clock lost")


def main(rank: int, folder: str) -> None:
    """One rank: the steps of ``STEPS`` under the three-percent policy, and what it saw in each, as JSON."""
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    device = VirtualDevice("h200", capacity=CAPACITY)
    events: list[dict[str, Any]] = []
    trainer = TrainerRank(
        build_reference(TINY, device, seed=5),
        load_policy("trigger-3-percent"),
        on_event=lambda event: events.append(dict(event)),
        agreement=Agreement(store),
    )
    votes = _watched(trainer)
    found = {}
    for name in STEPS:
        if name != "calm":
            most = (device.memory_info().free - (1 << 20)) & -(2 << 20)
            size = 64 << 20 if name == "one needs" and rank == 0 else most
            torch.empty(size, dtype=torch.uint8, device=device.torch_device)
        if name == "clock lost" and rank == 0:
            trainer._headroom._account._clock = lambda: math.nan
        events.clear()
        votes.clear()
        outputs = _step(trainer)
        (release,) = [event for event in events if event["event"] == "release"]
        found[name] = {"outputs": outputs, "release": release, "vote": votes[0], "free": device.memory_info().free}
    sys.stdout.write(json.dumps(found))
    trainer.close()
    distributed.destroy_process_group()


def _watched(trainer: TrainerRank) -> list[dict[str, Any]]:
    """Note this rank's own balance each time it is exchanged."""
    votes: list[dict[str, Any]] = []
    exchange = trainer._headroom._exchange
    assert exchange is not None

    def watched(mine: Balance) -> Balance:
        votes.append(asdict(mine))
        return exchange(mine)

    trainer._headroom._exchange = watched
    return votes


def _step(trainer: TrainerRank) -> int:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, TINY.vocabulary, (61,), generator=generator)
    rows = 0
    for micro_batch in trainer.forward_micro_batches([Request(tokens[:-1], tokens[1:], "policy")]):
        rows += micro_batch.outputs[0].log_probabilities.shape[0]
        trainer.backward(micro_batch, -micro_batch.outputs[0].log_probabilities.mean())
    return rows


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    program = "from tests.trainer_rank.release.test_hand_off_vote import main; main({}, {!r})"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program.format(rank, str(folder))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    finished = [(*rank.communicate(timeout=120), rank.returncode) for rank in started]
    assert [code for _, _, code in finished] == [0, 0], finished
    return [json.loads(out) for out, _, _ in finished]


Of = Callable[[str, str], list[Any]]


@pytest.fixture
def of(ranks: list[dict[str, Any]]) -> Of:
    return lambda step, what: [rank[step][what] for rank in ranks]


def test_outputs_reach_the_caller_whatever_the_vote_says(of: Of) -> None:
    assert [of(step, "outputs") for step in STEPS] == [[60, 60]] * len(STEPS)


def test_nobody_needs_and_nothing_is_released(of: Of) -> None:
    for event in of("calm", "release"):
        assert (event["granted"], event["reason"], event["shrunk"]) == (False, Reason.NOT_NEEDED, {})


def test_the_need_of_any_rank_releases_on_all(of: Of) -> None:
    assert [vote["need"] for vote in of("one needs", "vote")] == [False, True]
    for event in of("one needs", "release"):
        assert (event["granted"], event["reason"]) == (True, Reason.FIRST)
        assert event["shrunk"]["virtual:0"] > 0
    assert min(of("one needs", "free")) > 200_000_000


def test_costs_are_summed_and_the_most_work_counts(of: Of) -> None:
    votes, events = of("both need", "vote"), of("both need", "release")
    assert all(vote["cost"] > 0 and vote["dearest"] > 0 and vote["work"] > 0 for vote in votes)
    for event in events:
        assert event["cost_ns"] == sum(vote["cost"] for vote in votes)
        assert event["dearest_ns"] == sum(vote["dearest"] for vote in votes)
        assert event["work_ns"] == max(vote["work"] for vote in votes)
        assert event["releases"] == 1
        assert event["charged_ns"] > 0, "what this rank was charged, not the sum less one rank's"
        within = (event["cost_ns"] + event["dearest_ns"]) * 20 <= event["work_ns"]
        assert (event["granted"], event["reason"]) == (within, Reason.WITHIN if within else Reason.OVER)


def test_one_rank_without_a_clock_denies_all(of: Of) -> None:
    for event in of("clock lost", "release"):
        assert (event["granted"], event["reason"], event["shrunk"]) == (False, Reason.CLOCK, {})
