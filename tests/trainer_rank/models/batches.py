"""Packed batches, and the plain host as a device to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any, cast

import torch

from trainer_rank.devices.protocol import Device
from trainer_rank.geometry import ModelGeometry
from trainer_rank.models.protocol import PackedBatch


def packed(lengths: Sequence[int], geometry: ModelGeometry, device: torch.device, seed: int = 1) -> PackedBatch:
    """Pack sequences of random tokens, the same for the same seed on every device."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(geometry.vocabulary, (2, length), generator=generator) for length in lengths]
    tokens, targets = torch.cat(drawn, 1)
    boundaries = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return PackedBatch(tokens.to(device), targets.to(device), tuple(lengths), boundaries.to(device))


class _Host:
    """As much of a device as the reference model asks for, on plain CPU tensors."""

    name = "cpu"
    torch_device = torch.device("cpu")

    def activate(self) -> AbstractContextManager[None]:
        return nullcontext()

    def mark(self, stage: str) -> None:
        """Nothing is recorded."""


HOST = cast(Device, _Host())


def gradients(model: Any, slot: str = "policy") -> dict[str, torch.Tensor]:
    """Copies of a slot's gradients on the host."""
    return {name: p.grad.cpu() for name, p in model.adapter_parameters(slot).items() if p.grad is not None}
