"""Context parallelism at the model's edges: every rank gets the whole batch, computes its rows, returns all results."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed


class _GatherRows(torch.autograd.Function):
    """All ranks' rows in rank order; backward keeps this rank's part, since every rank computes the same loss."""

    @staticmethod
    def forward(context: Any, rows: torch.Tensor, group: distributed.ProcessGroup) -> torch.Tensor:
        context.rank, context.count = distributed.get_rank(group), rows.shape[0]
        parts = [torch.empty_like(rows) for _ in range(distributed.get_world_size(group))]
        distributed.all_gather(parts, rows.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        start = context.rank * context.count
        return gradients[0][start : start + context.count], None


def gather_rows(rows: torch.Tensor, group: distributed.ProcessGroup) -> torch.Tensor:
    """Concatenate equally many rows (N, ...) of each rank of ``group`` in rank order, with gradients."""
    result: torch.Tensor = _GatherRows.apply(rows, group)  # type: ignore[no-untyped-call]
    return result
