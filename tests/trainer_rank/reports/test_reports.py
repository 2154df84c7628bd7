"""A report is the serialised input of a decision: replayed anywhere, bounded, sanitised, and safe on disk."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer_rank.admission.test_planner import RUNGS, _budget, _Linear, _requests
from trainer_rank.admission.planner import choose
from trainer_rank.errors import InvalidInputError
from trainer_rank.packing import units
from trainer_rank.policies import load_policy
from trainer_rank.reports.replay import replay_report
from trainer_rank.reports.report import Origin, Report, ReportKind, bounded, canonical, identified, projected


def _document(lengths: list[int], free: int, *, oversize: bool = False, step: int = 3) -> dict[str, Any]:
    shapes = _requests(lengths, group="secret-group")
    choice = choose(units(shapes), RUNGS, _Linear(), _budget(free), oversize=oversize)
    origin, policy = Origin("virtual:0", "h200", "tiny", "dp1-tp1-cp1-pp1-ep1", 0), load_policy("forecast")
    report = Report(ReportKind.MISS, origin, step, "caller 5", policy, tuple(shapes), choice, oversize)
    found: dict[str, Any] = json.loads(canonical(report.document()))
    return found


@given(st.lists(st.integers(1, 200), min_size=1, max_size=12), st.integers(0, 400_000), st.booleans())
def test_every_decision_is_made_again_bit_for_bit_from_its_report(
    lengths: list[int], free: int, oversize: bool
) -> None:
    document = _document(lengths, free, oversize=oversize)
    replayed = replay_report(document)
    assert (replayed.same, replayed.missing) == (True, ())
    assert replayed.decision == document["decision"]
    assert replay_report(json.loads(canonical(projected(document)))).same is True


def test_an_altered_report_says_so_and_an_altered_decision_differs() -> None:
    document = _document([10, 20], 1_000_000)
    altered = document | {"budget": document["budget"] | {"free": 5}}
    assert replay_report(altered).missing == ("device_or_modified_input",)
    assert replay_report(identified(altered)).same is False
    moved = document["candidates"][0] | {"subforwards": [[0], [1]]}
    assert replay_report(identified(document | {"candidates": [moved]})).same is False


def test_a_report_within_its_size_lists_what_was_left_out() -> None:
    document = _document([7] * 3000, 1_000_000)
    small = bounded(document)
    assert len(canonical(document)) > 64 << 10 >= len(canonical(small))
    assert small["omitted"]
    assert "layout_inputs_unavailable" in replay_report(small).missing
    assert replay_report(small).same is True
    tiny = bounded(document, 1200)
    assert "candidates" in tiny["omitted"]
    assert replay_report(tiny).missing == ("device_or_modified_input",)


def test_the_projection_names_no_slot_group_or_caller_and_its_original() -> None:
    document = _document([10, 20], 1_000_000)
    text = canonical(projected(document)).decode()
    for secret in ("secret-group", 'policy"', "caller 5"):
        assert secret in canonical(document).decode() or secret == 'policy"'
        assert secret not in text.replace('"policy":', "")
    assert projected(document)["projection_of"] == document["id"]


@pytest.mark.parametrize("content", [{}, {"format": 1}, {"format": 2}])
def test_what_is_no_report_is_refused(content: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=r"no planner report|malformed"):
        replay_report(content)
