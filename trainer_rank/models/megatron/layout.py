"""From the caller's packed batch to the rows that the kernels see: padding to the grid, and context-parallel cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer_rank.models.megatron.grid import padded_tokens
from trainer_rank.models.megatron.sharding import local_positions, padded_length


@dataclass(frozen=True)
class Layout:
    """Where every row of a packed batch goes.

    ``lengths``: the padded sequences that the kernels see, the last one all padding when the grid asks for it;
    ``sources``: (start in the padded batch, start in the caller's batch, rows) of each run of rows that stay together;
    ``ranges``: the [start, end) ranges of padded rows that this rank holds.
    """

    lengths: tuple[int, ...]
    sources: tuple[tuple[int, int, int], ...]
    ranges: tuple[tuple[int, int], ...]
    tokens: int

    @property
    def longest(self) -> int:
        """The longest padded sequence, raised to the grid so that attention kernels are planned once per size."""
        return padded_tokens(max(self.lengths))


def lay_out(lengths: Sequence[int], ranks: int, rank: int) -> Layout:
    """Pad ``lengths`` for ``ranks`` context-parallel ranks and to the size grid, and cut out this rank's part."""
    padded = [padded_length(length, ranks) for length in lengths]
    filler = padded_tokens(sum(padded), 2 * ranks if ranks > 1 else 1) - sum(padded)
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
