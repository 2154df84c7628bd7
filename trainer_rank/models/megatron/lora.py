"""Low-rank adapters as plain tensor arithmetic: dense, and grouped over experts without a loop.

Source: LoRA (Hu et al., 2021): ``y = W x + alpha / rank * B (A x)``, W frozen.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from trainer_rank.errors import InvalidInputError

GROUPED_ALIGNMENT = 8
"""Grouped matrix products want rows of 16 bytes: a 16-bit rank below 8 is padded with zeros in the product."""


class DenseAdapter(torch.nn.Module):
    """``down`` (rank, inputs) and ``up`` (outputs, rank) of one linear map; ``up`` starts at zero.

    Made with the dtype and on the device of ``like``.
    """

    def __init__(self, inputs: int, outputs: int, rank: int, alpha: float, like: torch.Tensor) -> None:
        super().__init__()
        _require_rank(rank)
        self.scale = alpha / rank
        self.down = torch.nn.Parameter(like.new_empty(rank, inputs))
        self.up = torch.nn.Parameter(like.new_zeros(outputs, rank))
        torch.nn.init.normal_(self.down, std=inputs**-0.5)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """The adapter's addition, (..., outputs), for ``values`` (..., inputs)."""
        return functional.linear(functional.linear(values, self.down) * self.scale, self.up)


class GroupedAdapter(torch.nn.Module):
    """``down`` (experts, rank, inputs) and ``up`` (experts, outputs, rank) of a grouped map, made as ``like`` is."""

    def __init__(self, experts: int, inputs: int, outputs: int, rank: int, alpha: float, like: torch.Tensor) -> None:
        super().__init__()
        _require_rank(rank)
        self.scale = alpha / rank
        self.padding = -rank % GROUPED_ALIGNMENT
        self.down = torch.nn.Parameter(like.new_empty(experts, rank, inputs))
        self.up = torch.nn.Parameter(like.new_zeros(experts, outputs, rank))
        torch.nn.init.normal_(self.down, std=inputs**-0.5)

    def forward(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """The addition (rows, outputs) for ``rows`` (rows, inputs) sorted by expert.

        ``offsets``: int32 (experts,) on the same device, where each expert's rows end.
        """
        down: torch.Tensor = self.down
        up: torch.Tensor = self.up
        if self.padding:
            down = functional.pad(down, (0, 0, 0, self.padding))
            up = functional.pad(up, (0, self.padding))
        inner = functional.grouped_mm(rows, down.transpose(-2, -1), offs=offsets)
        return functional.grouped_mm(inner * self.scale, up.transpose(-2, -1), offs=offsets)


def _require_rank(rank: int) -> None:
    if rank < 1:
        raise InvalidInputError(f"adapter rank {rank}: give a rank of at least 1")
