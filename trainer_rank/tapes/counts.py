"""Give a path as many instances of each section as a plan has: head chunks grow with rows, layers do not."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from trainer_rank.errors import TapeError
from trainer_rank.tapes.explain import Explanation, Grounds, explain
from trainer_rank.tapes.same import Same
from trainer_rank.tapes.sections import section_counts, with_count
from trainer_rank.tapes.tape import Part, Path

LAYER = "layer"
"""The section whose instances are the model's layers: stages ``forward/layer/0`` and so on."""


def counted(part: Part, path: Path, features: Mapping[str, int]) -> Path:
    """Return ``path``, or a path of the same part, with the plan's number of instances of every section.

    Numbers are explained by the plan's features over all probes of the part, as sizes are. TapeError when a number has
    no explanation, or when no path has two alike instances that could be repeated.
    """
    wanted = {section: _count(section, rule, features) for section, rule in _counts(Same(part)).items()}
    reasons = []
    for candidate in (path, *(other for other in part.paths if other is not path)):
        try:
            return _with_counts(candidate, wanted)
        except TapeError as error:
            reasons.append(error)
    raise reasons[0]


@lru_cache(maxsize=64)
def _counts(part: Same[Part]) -> dict[str, Explanation]:
    """Explain the number of instances of every section but the layers, which the plan's topology gives."""
    paths = [(path, section_counts(path)) for path in part.thing.paths]
    sections = dict.fromkeys(section for _, counts in paths for section in counts if section != LAYER)
    return {
        section: explain([(probe.features, counts.get(section, 0)) for path, counts in paths for probe in path.probes])
        for section in sections
    }


def _count(section: str, explanation: Explanation, features: Mapping[str, int]) -> int:
    count = explanation.rule.size(features)
    if count is None or explanation.grounds is Grounds.INEXACT:
        raise TapeError(f"section {section}: no feature explains how often it repeats; record probes that tell")
    return count


def _with_counts(path: Path, wanted: Mapping[str, int]) -> Path:
    for section, count in wanted.items():
        path = _with_count(Same(path), section, count)
    return path


@lru_cache(maxsize=64)
def _with_count(path: Same[Path], section: str, count: int) -> Path:
    return with_count(path.thing, section, count)
