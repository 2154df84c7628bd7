"""From the caller's packed batch to the rows that one context-parallel rank computes. Pure index arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer_rank.models.sharding import local_positions, padded_length


@dataclass(frozen=True)
class Layout:
    """Where every row of a packed batch goes.

    ``lengths``: the padded sequences that the kernels see, the last one all padding when the whole is to be longer;
    ``sources``: (start in the padded batch, start in the caller's batch, rows) of each run of rows that stay together;
    ``ranges``: the [start, end) ranges of padded rows that this rank holds.
    """

    lengths: tuple[int, ...]
    sources: tuple[tuple[int, int, int], ...]
    ranges: tuple[tuple[int, int], ...]
    tokens: int


def lay_out(lengths: Sequence[int], ranks: int, rank: int, tokens: int = 0) -> Layout:
    """Pad ``lengths`` for ``ranks`` context-parallel ranks and up to ``tokens`` rows, and cut out this rank's part."""
    padded = [padded_length(length, ranks) for length in lengths]
    filler = max(0, tokens - sum(padded))
    sources: list[tuple[int, int, int]] = []
    start = source = 0
    for length, room in zip(lengths, padded, strict=True):
        if sources and sources[-1][0] + sources[-1][2] == start:
            first, its_source, run = sources.pop()
            sources.append((first, its_source, run + length))
        else:
            sources.append((start, source, length))
        start, source = start + room, source + length
    if filler:
        padded.append(filler)
    return Layout(tuple(padded), tuple(sources), tuple(local_positions(padded, ranks, rank)), sum(padded))
