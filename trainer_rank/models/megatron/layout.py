"""Layouts whose pack is padded to the size grid, so that kernels tune once per size."""

from __future__ import annotations

from collections.abc import Sequence

from trainer_rank.models import layout
from trainer_rank.models.megatron.grid import padded_tokens
from trainer_rank.models.sharding import padded_length


def lay_out(lengths: Sequence[int], ranks: int, rank: int) -> layout.Layout:
    """Pad ``lengths`` for ``ranks`` context-parallel ranks and to the size grid, and cut out this rank's part."""
    rows = sum(padded_length(length, ranks) for length in lengths)
    return layout.lay_out(lengths, ranks, rank, padded_tokens(rows, 2 * ranks if ranks > 1 else 1))


def longest_planned(found: layout.Layout) -> int:
    """Return the longest padded sequence, raised to the grid so that attention kernels are planned once per size."""
    return padded_tokens(max(found.lengths))
