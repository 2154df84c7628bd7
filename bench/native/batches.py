"""Random packed batches on a device."""

from __future__ import annotations

import random
from itertools import accumulate

import torch

from trainer_rank.models.protocol import PackedBatch


def packed_batch(lengths: list[int], vocabulary: int, device: torch.device, seed: int = 0) -> PackedBatch:
    """A packed batch of uniformly random tokens and targets."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(16, vocabulary, (sum(lengths),), generator=generator)
    targets = torch.randint(16, vocabulary, (sum(lengths),), generator=generator)
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return PackedBatch(
        tokens=tokens.to(device), targets=targets.to(device), lengths=tuple(lengths), boundaries=ends.to(device)
    )


def ragged(tokens: int, seed: int, smallest: int = 32) -> list[int]:
    """Cut ``tokens`` into ragged sequences whose lengths spread over about two orders of magnitude."""
    generator = random.Random(seed)
    lengths: list[int] = []
    left = tokens
    while left > 0:
        share = int(tokens * 10 ** generator.uniform(-2, -0.3))
        lengths.append(min(left, max(smallest, share)))
        left -= lengths[-1]
    return lengths
