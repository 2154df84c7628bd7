"""What plans take that lie outside of all probes: with more sequences, or smaller than every one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

from trainer_rank.allocator.rules import BLOCK_GRANULE, round_size
from trainer_rank.features import LARGEST, SEQUENCES
from trainer_rank.tapes.counts import counted
from trainer_rank.tapes.same import Same
from trainer_rank.tapes.tape import Part, Path, Tape


def more_sequences(tape: Tape, part: Part, paths: Sequence[Path], features: Mapping[str, int]) -> int:
    """Return what sequences beyond those of the paths' probes may hold: each as much as one more took in all.

    That is seen between the paths of the fewest and of the most sequences. Where all probes had as many, the blocks of
    the smallest size may all be sequences' own.
    """
    more = features.get(SEQUENCES, 0) - max(_sequences(path) for path in paths)
    if more <= 0 or not all(_sequences(path) for path in part.paths):
        return 0
    few, many = (pick(part.paths, key=_sequences) for pick in (min, max))
    apart = _sequences(many) - _sequences(few)
    blocks = _blocks(tape, part, many, features)
    if apart:
        taken = _total(blocks) - _total(_blocks(tape, part, few, features))
    else:
        apart, taken = _sequences(few), BLOCK_GRANULE * blocks[BLOCK_GRANULE]
    return more * max(BLOCK_GRANULE, -(-taken // apart))


def smallest_recorded(tape: Tape, path: Path, explanation: int, features: Mapping[str, int]) -> int | None:
    """Return the smallest recorded size where a growing rule reaches below it: a smaller plan takes no more than that.

    None when the plan is not smaller than every probe of the path in what the rule asks for.
    """
    rule = tape.explanations[explanation].rule
    known = [probe.features for probe in path.probes]
    smaller = all(features.get(name, LARGEST) <= each.get(name, 0) for name, _, _ in rule.terms for each in known)
    recorded = [rule.size(each) for each in known]
    return min((size for size in recorded if size), default=None) if rule.growing and smaller else None


def _sequences(path: Path) -> int:
    """Return the most sequences of a probe; 0 when none states them."""
    return max(probe.features.get(SEQUENCES, 0) for probe in path.probes)


def _blocks(tape: Tape, part: Part, path: Path, features: Mapping[str, int]) -> Counter[int]:
    """Return how many blocks of which bytes the path hands out."""
    found: Counter[int] = Counter()
    for explanation, count in _uses(Same(counted(part, path, features))).items():
        size = tape.size(explanation, features) or smallest_recorded(tape, path, explanation, features)
        found[round_size(size or 1)] += count
    return found


def _total(blocks: Mapping[int, int]) -> int:
    return sum(size * count for size, count in blocks.items())


@lru_cache(maxsize=64)
def _uses(path: Same[Path]) -> Counter[int]:
    return Counter(path.thing.allocations)
