"""Make a reported decision again, from nothing but the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trainer_rank.admission.budget import Budget, Status, Term
from trainer_rank.admission.decide import Candidate, Coverage, Decision, Demand, decide
from trainer_rank.admission.ladder import Plan, ladder, plans
from trainer_rank.admission.planner import admit_unseen
from trainer_rank.errors import InvalidInputError, PlanningError, TrainerRankError
from trainer_rank.packing import Work, layouts
from trainer_rank.prefixes import Prefixes
from trainer_rank.reports.report import FORMAT, identified
from trainer_rank.requests import RequestShape

MODIFIED = "device_or_modified_input"
NO_LAYOUT = "layout_inputs_unavailable"


@dataclass(frozen=True)
class Replayed:
    """Whether a report's decision was made again, and bit for bit the same.

    ``missing`` are the reasons why it could not be (or not wholly): ``device_or_modified_input`` when the report was
    altered or lacks the device's figures, ``layout_inputs_unavailable`` when it lacks what the cuts were made from.
    """

    same: bool | None
    decision: Mapping[str, Any] | None
    recorded: Mapping[str, Any] | None
    missing: tuple[str, ...]


def replay_report(document: Mapping[str, Any]) -> Replayed:
    """Decide again from a report. Raises InvalidInputError when it is no report of this format."""
    if document.get("format") != FORMAT:
        raise InvalidInputError(f"this is no planner report of format {FORMAT}; give a file of the report spool")
    try:
        return _replay(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidInputError(f"the planner report is malformed: {error!r}; give an unaltered one") from error


def _replay(document: Mapping[str, Any]) -> Replayed:
    recorded = document["decision"]
    if identified(document)["id"] != document["id"] or document["budget"] is None or not document["candidates"]:
        return Replayed(None, None, recorded, (MODIFIED,))
    candidates = [_candidate(row) for row in document["candidates"]]
    missing = () if "terms" not in document["omitted"] else (MODIFIED,)
    if "requests" in document["omitted"] or "cuts" in document["omitted"]:
        missing = (*missing, NO_LAYOUT)
    elif not _cuts_follow(document, candidates):
        return Replayed(False, None, recorded, ())
    try:
        decision = asdict(_decided(document, candidates))
    except PlanningError as error:
        return Replayed(document["kind"] == "planning_error", {"reason": str(error)}, recorded, missing)
    return Replayed(decision == recorded, decision, recorded, missing)


def _decided(document: Mapping[str, Any], candidates: list[Candidate]) -> Decision:
    budget = _budget(document["budget"])
    if not document["policy"]["forecasts"]:
        return admit_unseen(candidates[0], budget, document["policy"]["name"])
    demands = [_demand(row) for row in document["forecasts"]]
    return decide(demands, budget, candidates, oversize=document["oversize"])


def _cuts_follow(document: Mapping[str, Any], candidates: list[Candidate]) -> bool:
    """Say whether every candidate's cut is one that its rung makes of the reported requests."""
    sharing = document["sharing"]
    prefixes = None if sharing is None else Prefixes(tuple(sharing["order"]), tuple(sharing["shared"]))
    works = [Work(groups) for groups in layouts([RequestShape(*row) for row in document["requests"]], prefixes)]
    try:
        rungs = {rung.name: rung for rung in ladder([each.rung for each in candidates])}
    except TrainerRankError:
        return False
    made = {name: [plan for work in works for plan in plans(rung, work)] for name, rung in rungs.items()}
    return all(_is_cut(each, made[each.rung]) for each in candidates)


def _is_cut(candidate: Candidate, plans: list[Plan]) -> bool:
    return any((plan.indices, plan.packed_tokens) == (candidate.subforwards, candidate.packed_tokens) for plan in plans)


def _term(row: Mapping[str, Any]) -> Term:
    return Term(row["name"], row["size"], Status(row["status"]), row["source"])


def _budget(row: Mapping[str, Any]) -> Budget:
    return Budget(row["sample"], row["free"], row["total"], tuple(_term(each) for each in row["claims"]), row["host"])


def _demand(row: Mapping[str, Any]) -> Demand:
    changed = {
        "coverage": Coverage(row["coverage"]),
        "terms": tuple(_term(each) for each in row["terms"]),
        "uncovered": tuple(row["uncovered"]),
    }
    return Demand(**{**row, **changed})


def _candidate(row: Mapping[str, Any]) -> Candidate:
    cuts = tuple(tuple(indices) for indices in row["subforwards"])
    return Candidate(row["ordinal"], row["rung"], cuts, tuple(row["packed_tokens"]), row["cost_ns"])
