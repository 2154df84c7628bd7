"""How packed sequences are cut among context-parallel ranks: pure index arithmetic.

Source: Megatron-Core's load-balanced causal layout. Each sequence is padded to a multiple of twice the ranks and cut
into that many equal chunks; rank r holds chunks r and 2 * ranks - 1 - r, so that all ranks do equal causal work.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainer_rank.errors import InvalidInputError


def padded_length(length: int, ranks: int) -> int:
    """``length`` rounded up to a multiple of ``2 * ranks`` (unchanged on one rank)."""
    if ranks == 1:
        return length
    unit = 2 * ranks
    return -(-length // unit) * unit


def local_positions(lengths: Sequence[int], ranks: int, rank: int) -> list[tuple[int, int]]:
    """The [start, end) ranges of the padded packed batch that ``rank`` holds, in its order.

    ``lengths`` are the sequences' padded lengths.

    Raises:
        InvalidInputError: a rank outside the group, or a length that is not padded.
    """
    if not 0 <= rank < ranks:
        raise InvalidInputError(f"rank {rank} of {ranks} context-parallel ranks")
    ranges: list[tuple[int, int]] = []
    start = 0
    for index, length in enumerate(lengths):
        if padded_length(length, ranks) != length:
            raise InvalidInputError(f"sequence {index} has {length} rows; pad it to a multiple of {2 * ranks}")
        if ranks == 1:
            ranges.append((start, start + length))
        else:
            chunk = length // (2 * ranks)
            for part in (rank, 2 * ranks - 1 - rank):
                ranges.append((start + part * chunk, start + (part + 1) * chunk))
        start += length
    return ranges
