"""Random requests that share nothing; what differs is lengths, slots and what they ask for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from bench._safety.ground import SLOTS
from trainer_rank.requests import Request


@dataclass(frozen=True)
class Batches:
    """Draws requests for a vocabulary; ordinary ones have 1 to ``longest`` tokens, short ones more often."""

    vocabulary: int
    longest: int
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(11))

    def request(self, length: int, slot: str, gradients: bool = True) -> Request:
        """Draw one request."""
        row = torch.randint(0, self.vocabulary, (length + 1,), generator=self.generator)
        return Request(row[:-1], row[1:], slot, gradients)

    def queue(self, draw: random.Random, tokens: int, scoring: float = 0.0) -> list[Request]:
        """Draw ungrouped requests of about ``tokens`` in all; a share of ``scoring`` asks for no gradients."""
        return list(self._until(draw, tokens, scoring))

    def _until(self, draw: random.Random, tokens: int, scoring: float) -> Iterator[Request]:
        for length in lengths(draw, tokens, self.longest):
            yield self.request(length, draw.choice(SLOTS), draw.random() >= scoring)


def lengths(draw: random.Random, tokens: int, longest: int) -> Iterator[int]:
    """Draw lengths of 1 to ``longest``, half of them up to a quarter of it, until they have ``tokens``."""
    while tokens > 0:
        found = draw.randint(1, draw.choice((longest // 4, longest)))
        yield found
        tokens -= found


def grouped(requests: list[Request], name: str = "all") -> list[Request]:
    """Forbid that these requests are divided."""
    return [replace(each, group=name) for each in requests]


def budgeted(requests: list[Request], most: int) -> list[Request]:
    """Group requests in order, up to ``most`` tokens each: what a constant token budget runs together."""
    found, load, number = [], 0, 0
    for each in requests:
        length = each.tokens.shape[0]
        if load and load + length > most:
            load, number = 0, number + 1
        load += length
        found.append(replace(each, group=str(number)))
    return found
