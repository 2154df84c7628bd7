"""Plan probes: which shape to record next so that it settles the most, and when nothing is left to settle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainer_rank.errors import InvalidInputError
from trainer_rank.tapes.compose import PlannedPass
from trainer_rank.tapes.explain import Explanation
from trainer_rank.tapes.paths import choose
from trainer_rank.tapes.tape import Tape

UNSETTLED = 1 << 62
"""Bytes by which rules disagree where one of them gives no size at all."""


@dataclass(frozen=True)
class Shape:
    """A pack that could be recorded: its sequences' lengths and its plan features."""

    lengths: tuple[int, ...]
    features: Mapping[str, int]


def candidate_lengths(largest: int, sequences: int) -> Iterator[tuple[int, ...]]:
    """Yield packs worth a probe, the smallest first: one sequence, equal ones and ragged ones, up to ``largest`` rows.

    Rows grow by about four; no two kinds of pack share their rows, so that rows, sequences and lengths come apart, and
    lengths are odd, so that whole blocks of rows come apart from rows.
    """
    if largest < 64 or sequences < 2:
        raise InvalidInputError(f"probes of up to {largest} rows and {sequences} sequences; give 64 and 2, or more")
    rows = 33
    while rows <= largest:
        yield (rows,)
        equal = rows // sequences
        if equal > 1:
            yield (equal | 1,) * sequences
        ragged = tuple(max(1, rows * (index + 1) // (sequences * sequences) | 1) for index in range(sequences))
        if sum(ragged) <= largest:
            yield ragged
        rows = rows * 4 + 5


def disagreement(tape: Tape, features: Mapping[str, int], context: int = 1, layers: int | None = None) -> int:
    """Return by how many bytes, summed over allocations, the rules that explain the recordings differ there."""
    choice = choose(PlannedPass(tape, features, context, layers))
    if choice.expected is None:
        return UNSETTLED
    spread = {k: _spread(tape.explanations[k], features) for k in set(choice.expected.path.allocations)}
    worst = sum(spread[k] for k in choice.expected.path.allocations)
    if choice.other is not None:
        worst = max(worst, abs(sum(choice.other.sizes) - sum(choice.expected.sizes)))
    return worst


def _spread(explanation: Explanation, features: Mapping[str, int]) -> int:
    sizes = [rule.size(features) or 0 for rule in (explanation.rule, *explanation.others)]
    return max(sizes) - min(sizes)


def most_telling(tape: Tape, shapes: Sequence[Shape], context: int = 1, layers: int | None = None) -> Shape | None:
    """Return the shape at which the tape's rules disagree most, the smaller of equals; None when they nowhere do."""
    scored = [(disagreement(tape, shape.features, context, layers), -index) for index, shape in enumerate(shapes)]
    best = max(scored, default=(0, 0))
    return shapes[-best[1]] if best[0] > 0 else None
