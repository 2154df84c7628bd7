"""What a tape is: the event orders of recorded passes, and for every allocation the rule of its size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from trainer_rank.admission.budget import Term as Claim
from trainer_rank.tapes.explain import Explanation
from trainer_rank.tapes.passes import Operation


@dataclass(frozen=True)
class Probe:
    """One recording that a path was seen in: allocated bytes at its start, and its peaks."""

    features: dict[str, int]
    source: str
    allocated: int
    peak_allocated: int
    peak_reserved: int


@dataclass(frozen=True)
class Path:
    """One order of events, seen at the sizes of its probes.

    ``allocations[k]`` and ``ancestors[k]`` index the tape's explanations. ``stages`` are (first operation, name).
    """

    operations: tuple[Operation, ...]
    stages: tuple[tuple[int, str], ...]
    allocations: tuple[int, ...]
    ancestors: tuple[int, ...]
    probes: tuple[Probe, ...]


@dataclass(frozen=True)
class Part:
    """The paths of one topology and layer count, those of the smallest probes first."""

    context: int
    layers: int | None
    paths: tuple[Path, ...]


@dataclass(frozen=True)
class Kind:
    """Which kind of pass a rank recorded, and what it knows of it beside the tape; bytes, nanoseconds.

    A pass takes ``fixed_ns + token_ns x packed tokens`` and holds ``host_per_token`` in host memory; the first one in a
    process allocated up to ``first_pass_bytes`` more than those after it (workspaces, tuning). ``shared``: its
    prefixes were.
    """

    adapter_bytes: int
    gradients: bool
    hidden: bool
    retention: str
    fixed_ns: int
    token_ns: int
    host_per_token: int
    first_pass_bytes: int
    shared: bool = False


@dataclass(frozen=True)
class Tape:
    """Everything that was learned from the recordings; ``provenance`` says where they come from.

    ``claims``: what libraries took outside PyTorch's allocator, by phase. ``kind``: of a tape that a rank recorded.
    """

    explanations: tuple[Explanation, ...]
    parts: tuple[Part, ...]
    provenance: dict[str, str] = field(default_factory=dict)
    claims: tuple[Claim, ...] = ()
    kind: Kind | None = None

    @property
    def covers(self) -> frozenset[str]:
        """Return the stages that some recording names, with what they are part of (``forward`` of ``forward/head``)."""
        names = {name for part in self.parts for path in part.paths for _, name in path.stages}
        parents = (name.split("/") for name in names)
        return frozenset("/".join(parts[:count]) for parts in parents for count in range(1, len(parts) + 1))

    def part(self, context: int, layers: int | None) -> Part | None:
        """Return the part recorded with ``context`` ranks and ``layers`` layers (any, when None)."""
        return next((part for part in self.parts if part.context == context and layers in (None, part.layers)), None)

    def size(self, explanation: int, features: Mapping[str, int], *, upper: bool = False) -> int | None:
        """Return the bytes by the simplest rule, or with ``upper`` by the largest that the recordings allow."""
        explained = self.explanations[explanation]
        size = explained.rule.size(features)
        if upper:
            sizes = [rule.size(features) or 0 for rule in explained.others]
            return max([size or 0, *sizes]) or None
        return size


def describe(tape: Tape) -> dict[str, Any]:
    """Return what a tape holds, for people and as JSON: provenance, parts with their probes, and grounds counted."""
    grounds = Counter(
        str(tape.explanations[k].grounds) for part in tape.parts for path in part.paths for k in path.allocations
    )
    return {
        "provenance": tape.provenance,
        "parts": [
            {
                "context": part.context,
                "layers": part.layers,
                "paths": [
                    {
                        "operations": len(path.operations),
                        "allocations": len(path.allocations),
                        "stages": list(dict.fromkeys(name for _, name in path.stages)),
                        "probes": [{"source": probe.source, "features": probe.features} for probe in path.probes],
                    }
                    for path in part.paths
                ],
            }
            for part in tape.parts
        ],
        "grounds": dict(sorted(grounds.items())),
        "claims": [asdict(claim) for claim in tape.claims],
        "kind": None if tape.kind is None else asdict(tape.kind),
    }
