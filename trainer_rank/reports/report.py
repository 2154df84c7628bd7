"""Planner reports: the serialised input of a decision, its outcome, and what was observed. Canonical JSON, versioned.

A report holds integers and strings only: shapes, budgets, forecasts and figures; no token, path or environment. Its id
is the SHA-256 of its own canonical bytes without the id.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from trainer_rank.admission.planner import Choice
from trainer_rank.policies import Policy
from trainer_rank.prefixes import Prefixes
from trainer_rank.reports.failure import Failure
from trainer_rank.reports.memory import without_layout
from trainer_rank.requests import RequestShape

FORMAT = 2
_FOLDERS = re.compile(r"(?<![\w.~])(?:~|[A-Za-z]:)?[/\\](?:[^\s/\\'\":,;()]+[/\\])+(?=[^\s/\\'\":,;()])")
LARGEST = 64 << 10
"""Bytes that a report may have by default."""


class ReportKind(StrEnum):
    """Why a report was written."""

    MISS = "miss"
    OUT_OF_MEMORY = "out_of_memory"
    FAILURE = "failure"
    REFUSAL = "refusal"
    PLANNING_ERROR = "planning_error"


@dataclass(frozen=True)
class Origin:
    """Where a report was made: device, its card, the model's geometry by name, its topology, and the rank (0 alone)."""

    device: str
    card: str
    model: str
    topology: str
    rank: int


@dataclass(frozen=True)
class Observed:
    """What a complete step took, bytes; None in a report of a step that was interrupted.

    Errors are those of the forecast, per million of what was observed: above zero where it said too much, None where it
    gave no figure.
    """

    peak_allocated: int
    peak_reserved: int
    allocated_error_per_million: int | None
    reserved_error_per_million: int | None


@dataclass(frozen=True)
class Report:
    """One planner report; ``prefixes`` are what its requests share."""

    kind: ReportKind
    origin: Origin
    step: int
    caller_step: str | None
    policy: Policy
    requests: tuple[RequestShape, ...]
    choice: Choice | None
    oversize: bool
    observed: Observed | None = None
    failure: Failure | None = None
    reason: str | None = None
    prefixes: Prefixes | None = None

    def document(self) -> dict[str, Any]:
        """Return the report as plain data, with its id."""
        choice = self.choice
        content: dict[str, Any] = {
            "format": FORMAT,
            "kind": self.kind.value,
            "origin": asdict(self.origin),
            "step": self.step,
            "caller_step": self.caller_step,
            "policy": {
                "name": self.policy.name,
                "sha256": self.policy.sha256,
                "forecasts": self.policy.forecasts,
                "ladder": list(self.policy.ladder),
            },
            "requests": [list(asdict(shape).values()) for shape in self.requests],
            "sharing": None if self.prefixes is None else asdict(self._sharing(self.prefixes)),
            "oversize": self.oversize,
            "budget": None if choice is None else asdict(choice.budget),
            "candidates": [] if choice is None else [asdict(each) for each in choice.candidates],
            "forecasts": [] if choice is None else [asdict(each) for each in choice.demands],
            "decision": None if choice is None else asdict(choice.decision),
            "observed": None if self.observed is None else asdict(self.observed),
            "failure": None if self.failure is None else asdict(self.failure),
            "reason": None if self.reason is None else without_folders(self.reason),
            "omitted": [],
        }
        return identified(content)

    def _sharing(self, prefixes: Prefixes) -> Prefixes:
        return prefixes.restricted([shape.index for shape in self.requests])


def canonical(content: Mapping[str, Any]) -> bytes:
    """Return the canonical bytes of integers, strings, lists and objects (RFC 8785 for these types)."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def identified(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content with ``id`` set to the SHA-256 of everything else."""
    rest = {name: value for name, value in content.items() if name != "id"}
    return rest | {"id": hashlib.sha256(canonical(rest)).hexdigest()}


def bounded(document: Mapping[str, Any], limit: int = LARGEST) -> dict[str, Any]:
    """Return the report within ``limit`` bytes: what is largest and replay needs least goes first, and is listed."""
    found = dict(document)
    for name in ("layouts", "cuts", "requests", "terms", "candidates"):
        if len(canonical(found)) <= limit:
            break
        found = identified(_without(found, name) | {"omitted": [*found["omitted"], name]})
    return found


def _without(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = dict(document)
    if name == "layouts":
        if failure := found["failure"]:
            found["failure"] = failure | {each: without_layout(failure[each]) for each in ("before", "after")}
    elif name == "requests":
        found["requests"], found["sharing"] = [], None
    elif name == "cuts":
        found["candidates"] = [each | {"subforwards": []} for each in found["candidates"]]
    elif name == "terms":
        found["forecasts"] = [each | {"terms": []} for each in found["forecasts"]]
    else:
        found["candidates"], found["forecasts"] = [], []
    return found


def projected(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return what may leave the machine: without names of slots, groups, files and the caller's step, or reasons.

    ``projection_of`` is the id of the original.
    """
    slots = {row[2] for row in document["requests"]}
    names = {slot: f"slot-{number}" for number, slot in enumerate(sorted(slots))}
    groups = {row[4] for row in document["requests"] if row[4] is not None}
    labels = {group: f"group-{number}" for number, group in enumerate(sorted(groups))} | {None: None}
    failure = document["failure"]
    content = dict(document) | {
        "requests": [[*row[:2], names[row[2]], row[3], labels[row[4]], *row[5:]] for row in document["requests"]],
        "failure": None if failure is None else failure | _anonymous(failure, names),
        "caller_step": None,
        "reason": None,
        "projection_of": document["id"],
    }
    return identified(content)


def _anonymous(failure: Mapping[str, Any], slots: Mapping[str, str]) -> dict[str, Any]:
    generated = [{"size": each["size"], "sha256": each["sha256"]} for each in failure["generated"]]
    return {"slot": slots.get(failure["slot"]), "generated": generated}


def without_folders(text: str) -> str:
    """Return a text with every absolute path in it cut down to its last part."""
    return _FOLDERS.sub("", text)
