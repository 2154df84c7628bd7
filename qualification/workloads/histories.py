"""The histories of the public incident reports, scaled down: their lengths, and a declared tree of what they share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

LENGTHS = (
    94017, 93189, 89049, 84906, 80763, 76618, 72480, 68338, 64202, 55505,
    51373, 47238, 43111, 38974, 32251, 28111, 23973, 16565, 12430,
)  # fmt: skip
"""Tokens of the 19 histories of the second report, whose sum is that of the first."""


def scaled(lengths: Sequence[int], scale: int) -> list[int]:
    """Return lengths divided by ``scale``, at least 2."""
    return [max(2, length // scale) for length in lengths]


def histories(
    lengths: Sequence[int], own_per_million: int, vocabulary: int, generator: torch.Generator
) -> list[torch.Tensor]:
    """Return token sequences of ``lengths`` + 1 that share one beginning and then go their own way.

    Each keeps ``own_per_million`` of its tokens to itself. How the real histories branched was not recorded: this tree
    is a construction that packs into the reported share of rows.
    """
    common = torch.randint(0, vocabulary, (max(lengths) + 1,), generator=generator)
    found = []
    for length in lengths:
        own = length + 1 - (length * (1_000_000 - own_per_million)) // 1_000_000
        found.append(torch.cat([common[: length + 1 - own], torch.randint(0, vocabulary, (own,), generator=generator)]))
    return found
