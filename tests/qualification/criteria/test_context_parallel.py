"""Two ranks pass only with all of their work done, as replicas, and within what was forecast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from qualification.criteria.context_parallel import PHASES, RANKS, SLOTS, judge
from qualification.criteria.observation import Observation, Replay, StampedEvent
from qualification.records import Ground, Verdict

GOOD = Replay(True, 1000, 2000, 500, 0, 0, ("forward/subforward/0", "caller", "backward/subforward/0", "after"))
GROUP_SIZES = (4, 4, 10, 9)


def _said(rank: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for step, size in enumerate(GROUP_SIZES):
        figures = {"peak_allocated": 1001, "peak_reserved": 2000, "bound_allocated": 1010, "bound_reserved": 2000}
        plan = {"plan_sha256": f"{step}", "rung": "split", "subforwards": [[*range(size)]]}
        found.append({"event": "forecast", "step": step, **figures, **plan})
        found.append({"event": "observed", "step": step})
        found.append({"event": "loss", "step": step, "value": -0.25 * step})
    return found + [
        {"event": "replicas", "phase": phase, "digests": {slot: ["ab", "ab"] for slot in SLOTS}} for phase in PHASES
    ]


def _events(change: Callable[[int, dict[str, Any]], None] = lambda *_: None) -> tuple[StampedEvent, ...]:
    found: list[StampedEvent] = []
    for rank in RANKS:
        for body in _said(rank):
            change(rank, body)
            found.append(StampedEvent(len(found), len(found), rank, body))
    return tuple(found)


def _save(folder: Path, rank: int, group: str, slot: str, steps: float, value: float = 1.0) -> None:
    tensors = {"parameter/a": torch.full((3,), value)}
    if steps:
        tensors |= {"step/a": torch.tensor(steps), "exp_avg/a": torch.ones(3)}
    path = folder / f"rank-{rank}" / group / f"slot-{slot}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)


@pytest.fixture
def good(tmp_path: Path) -> Observation:
    for rank in RANKS:
        for group, steps in (("start", 0.0), ("tiny", 1.0), ("large", 1.0)):
            for slot in SLOTS:
                _save(tmp_path, rank, group, slot, steps)
    closed = replace(GOOD, allocated_after=0)
    replays = {f"rank-{rank}/step-{step:04d}": GOOD for rank in RANKS for step in range(4)}
    return Observation(
        workload="context_parallel",
        ground=Ground.REHEARSAL,
        exit_code=0,
        timed_out=False,
        events=_events(),
        artifacts={str(path.relative_to(tmp_path)): path for path in tmp_path.rglob("*.safetensors")},
        replays=replays | {f"rank-{rank}/close": closed for rank in RANKS},
    )


def _wrong(observation: Observation) -> dict[str, Verdict]:
    return {each.name: each.verdict for each in judge(observation) if each.verdict is not Verdict.PASSED}


def test_a_complete_run_passes(good: Observation) -> None:
    assert _wrong(good) == {}


def test_ranks_that_hold_different_tensors_fail_and_the_tensor_is_named(good: Observation, tmp_path: Path) -> None:
    _save(tmp_path, 1, "large", "policy", 1.0, value=1.0000001)
    assert _wrong(good) == {"replica_tensors_differing": Verdict.FAILED}
    (failed,) = [each for each in judge(good) if each.verdict is Verdict.FAILED]
    assert (failed.reason or "").endswith("parameter/a of slot policy differs between the ranks, group large")


def test_a_checkpoint_that_one_rank_lacks_is_incomplete(good: Observation) -> None:
    artifacts = {name: path for name, path in good.artifacts.items() if "rank-1/tiny/slot-policy" not in name}
    wrong = _wrong(replace(good, artifacts=artifacts))
    assert wrong == {"slot_updates": Verdict.INCOMPLETE, "replica_tensors_differing": Verdict.INCOMPLETE}


def test_state_that_a_phase_took_along_and_slots_that_begin_apart_fail(good: Observation, tmp_path: Path) -> None:
    for rank in RANKS:
        _save(tmp_path, rank, "large", "policy", 2.0)
        _save(tmp_path, rank, "start", "policy", 0.0, value=3.0)
    assert _wrong(good) == {"slot_updates": Verdict.FAILED, "slots_unlike_at_start": Verdict.FAILED}


@pytest.mark.parametrize(
    ("event", "key", "value", "criterion", "verdict"),
    [
        ("forecast", "plan_sha256", "other", "plans_differing", Verdict.FAILED),
        ("forecast", "plan_sha256", None, "plans_differing", Verdict.INCOMPLETE),
        ("loss", "value", 7.0, "losses_differing", Verdict.FAILED),
        ("replicas", "digests", {"policy": ["a", "b"], "adversary": ["a", "a"]}, "replica_digests_differing", "FAILED"),
        ("replicas", "digests", {"policy": ["a", "a"]}, "replica_digests_differing", Verdict.INCOMPLETE),
        ("replicas", "phase", "tiny", "replica_digests_differing", Verdict.INCOMPLETE),
        ("forecast", "bound_reserved", 1999, "reserved_above_bound", Verdict.FAILED),
        ("forecast", "peak_allocated", 306_000, "allocated_worst_error", Verdict.FAILED),
        ("forecast", "subforwards", [[0]], "requests_run", Verdict.INCOMPLETE),
    ],
)
def test_what_the_second_rank_says_counts_too(
    good: Observation, event: str, key: str, value: object, criterion: str, verdict: Verdict
) -> None:
    def change(rank: int, body: dict[str, Any]) -> None:
        if rank == 1 and body["event"] == event:
            body[key] = value

    assert _wrong(replace(good, events=_events(change))) == {criterion: verdict}


def test_a_card_that_held_it_all_shows_nothing_in_rehearsal_and_is_no_matter_natively(good: Observation) -> None:
    def change(_: int, body: dict[str, Any]) -> None:
        if body["event"] == "forecast":
            body["rung"] = "whole"

    observation = replace(good, events=_events(change))
    assert _wrong(observation) == {"plans_below_whole": Verdict.FAILED}
    assert _wrong(replace(observation, ground=Ground.NATIVE)) == {}
