"""Where the experiment runs: a device, a model on it, and driver memory past PyTorch that narrows the card."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from trainer_rank.devices.protocol import Device
from trainer_rank.models.reference import ReferenceModel
from trainer_rank.policies import Policy

SLOTS = ("policy", "adversary")
GRANULE = 2 << 20


@dataclass(frozen=True)
class Ground:
    """``room``: bytes of the widest room beside what stays; ``token_bytes``: what a token takes there, roughly, and
    ``single_bytes`` one of a single request, whose working set nothing divides.

    ``take`` takes driver memory past PyTorch, for good; ``piece`` makes a tensor of so many bytes. Ordinary requests
    have up to ``longest`` tokens.
    ``steps`` are to be admitted, within ``seconds`` for everything. ``batches`` of the throughput arms.
    """

    name: str
    device: Device
    model: ReferenceModel
    policy: Policy
    take: Callable[[int], object]
    piece: Callable[[int], torch.Tensor]
    room: int
    token_bytes: int
    single_bytes: int
    longest: int
    steps: int
    seconds: float
    frontiers: int
    batches: int

    def clean(self) -> None:
        """Return everything unused to the driver."""
        gc.collect()
        self.device.empty_cache()

    def narrow(self) -> None:
        """Take all of the card but the widest room, by the driver, so that libraries feel it too."""
        self.clean()
        self.take((self.device.memory_info().free - self.room) // GRANULE * GRANULE)

    @contextmanager
    def narrowed(self, room: int) -> Iterator[None]:
        """Leave ``room`` bytes of the narrow card to what runs inside: a tensor of the caller's holds the rest.

        The cache is empty at the start and at the end. The driver's share stays: when it shrinks, admission takes that
        for a library that will want its memory back.
        """
        self.clean()
        rest = self.piece(max(0, self.device.memory_info().free - room) // GRANULE * GRANULE)
        try:
            yield
        finally:
            del rest
            self.clean()

    def draw_room(self, draw: random.Random) -> int:
        """Return a room between half of the widest and all of it."""
        return draw.randint(self.room // 2, self.room)

    def pieces(self, draw: random.Random, room: int) -> list[torch.Tensor]:
        """Hold random pieces of up to a tenth of the room, with holes between them, as a caller's tensors might lie."""
        left, held = draw.randint(0, room // 10), []
        smallest = min(GRANULE // 2, room // 64)
        while left > smallest:
            size = min(left, draw.randint(smallest, max(smallest, room // 20)))
            held.append(self.piece(size))
            left -= size
        return held[::2] + held[1::4]
