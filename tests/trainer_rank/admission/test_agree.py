"""Ranks agree on one plan with two collectives, or fail together within a second; real Gloo processes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer_rank.admission.agreeing import decide_together
from trainer_rank.admission.decide import Outcome
from trainer_rank.admission.vote import REASON_BYTES, Vote, admitted, proposed
from trainer_rank.errors import AdmissionRefused, PlanningError

ROOMY, NARROW = 10_000_000, 60_000


def _job(free: list[int], **options: Any) -> dict[str, Any]:
    return {"free": free, "lengths": [100] * 8, **options}


def test_ranks_decide_alike_with_two_collectives_each_time() -> None:
    faults = [
        _job([ROOMY] * 3, faulty=faulty, fault=f"raise:{point}")
        for faulty in range(3)
        for point in ("propose", "review")
    ]
    ranks = decide_together(
        3,
        _job([ROOMY, NARROW, ROOMY]),
        _job([ROOMY, NARROW, ROOMY], ungrouped=True),
        _job([ROOMY, 10, ROOMY]),
        _job([ROOMY, 10, ROOMY], oversize={1: True, 2: True}),
        _job([ROOMY, 10, ROOMY], oversize={0: True, 1: True, 2: True}),
        *faults,
    )
    narrowest, width, refused, some, everyone, *failed = zip(*ranks, strict=True)
    assert {(each["rung"], each["collectives"]) for each in narrowest} == {("split", 2)}
    assert len({each["digest"] for each in narrowest}) == 1
    assert {(each["units"], each["rung"], each["collectives"]) for each in width} == {(5, "whole", 2)}
    assert {each["error"] for each in refused} == {"AdmissionRefused"}
    assert all("rank 1: the smallest plan exceeds the budget" in each["text"] for each in refused)
    assert all("rank 0 does not allow an oversized plan" in each["text"] for each in some)
    assert len({each["digest"] for each in everyone}) == 1
    for job, answers in zip(faults, failed, strict=True):
        _check_told(job["faulty"], list(answers))


def _check_told(faulty: int, answers: list[dict[str, Any]]) -> None:
    """A rank that cannot plan fails its peers at once, with its reason."""
    own = answers.pop(faulty)
    assert (own["error"], own["text"]) == ("own", "no tape for this shape")
    for answer in answers:
        assert answer["error"] == "PlanningError"
        assert f"rank {faulty}: RuntimeError: no tape for this shape" in answer["text"]
        assert answer["at"] - own["at"] < 1.0


@pytest.mark.parametrize("faulty", [0, 1, 2])
@pytest.mark.parametrize("point", ["propose", "review"])
def test_a_rank_that_dies_fails_its_peers_within_a_second(faulty: int, point: str) -> None:
    ranks = decide_together(3, _job([ROOMY] * 3, faulty=faulty, fault=f"die:{point}"))
    died = ranks.pop(faulty)[0]["at"]
    for (answer,) in ranks:
        assert answer["error"] == "PlanningError"
        assert "lost a peer" in answer["text"]
        assert answer["at"] - died < 1.0


@pytest.mark.parametrize("point", ["propose", "review"])
def test_a_rank_that_lives_but_does_not_come_is_waited_for_only_so_long(point: str) -> None:
    job = _job([ROOMY] * 3, faulty=1, fault=f"sleep:{point}", patience=1.0, linger=4.0)
    for (answer,) in decide_together(3, job):
        assert answer["error"] in ("PlanningError", "_PeerError"), "the late one too: the others have given up"
        assert "a rank did not come within 1.0 s" in answer["text"]


votes = st.builds(
    Vote,
    st.sampled_from([Outcome.ADMITTED, Outcome.REFUSED, Outcome.UNKNOWN, Outcome.PLANNING_ERROR]),
    st.integers(1, 9), st.integers(0, 9), st.integers(0, 100), st.integers(0, 100), st.integers(0, 1 << 62),
    st.booleans(), st.text(max_size=REASON_BYTES // 4).filter(lambda text: "\0" not in text),
)  # fmt: skip


@given(votes)
def test_a_vote_survives_its_row(vote: Vote) -> None:
    assert Vote.of_row(vote.row()) == vote


@given(st.lists(votes, min_size=1, max_size=5))
def test_no_plan_runs_unless_the_largest_demand_fits_the_smallest_budget(found: list[Vote]) -> None:
    try:
        admitted(found)
    except (PlanningError, AdmissionRefused):
        return
    assert max(vote.required for vote in found) <= min(vote.available for vote in found)
    assert all(vote.outcome is Outcome.ADMITTED for vote in found)
    assert proposed(found).units == min(vote.units for vote in found)
