"""Target log-probabilities over a large vocabulary in chunks of rows; all logits never exist at once."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

ROWS_PER_CHUNK = 1024
"""Rows whose logits exist at a time: 1,024 x 248,320 logits are 0.5 GB in BF16 and 1 GB in float32."""


class _TargetLogProbabilities(torch.autograd.Function):
    """Keeps hidden rows, targets and the log-sum-exp; backward computes each chunk's logits again."""

    @staticmethod
    def forward(
        context: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        rows: int,
    ) -> torch.Tensor:
        chosen = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        normaliser = torch.empty_like(chosen)
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            logits = functional.linear(hidden[part], weight).float()
            torch.logsumexp(logits, dim=-1, out=normaliser[part])
            chosen[part] = logits.gather(-1, targets[part, None]).squeeze(-1)
            del logits
        context.save_for_backward(hidden, weight, targets, normaliser)
        context.rows = rows
        return chosen - normaliser

    @staticmethod
    def backward(
        context: Any,
        *gradients: torch.Tensor,
    ) -> tuple[torch.Tensor | None, None, None, None]:
        hidden, weight, targets, normaliser = context.saved_tensors
        (gradient,) = gradients
        result = torch.empty_like(hidden)
        for start in range(0, hidden.shape[0], context.rows):
            part = slice(start, start + context.rows)
            weights = functional.linear(hidden[part], weight).float()
            weights.sub_(normaliser[part, None]).exp_().neg_()
            weights.scatter_add_(-1, targets[part, None], torch.ones_like(weights[:, :1]))
            weights.mul_(gradient[part, None])
            torch.mm(weights.to(weight.dtype), weight, out=result[part])
            del weights
        return result, None, None, None


def target_log_probabilities(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, rows: int = ROWS_PER_CHUNK
) -> torch.Tensor:
    """Log-probability of each row's target: float32 (N,), for ``hidden`` (N, H) and a frozen ``weight`` (V, H).

    ``targets``: int64 (N,). At most ``rows`` rows of logits exist at a time, forward and backward.
    """
    result: torch.Tensor = _TargetLogProbabilities.apply(hidden, weight, targets, rows)  # type: ignore[no-untyped-call]
    return result


@torch.no_grad()
def top_log_probabilities(
    hidden: torch.Tensor, weight: torch.Tensor, count: int, rows: int = ROWS_PER_CHUNK
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` largest log-probabilities of each row, float32 (N, count), and their token ids, int64."""
    values, indices = [], []
    for start in range(0, hidden.shape[0], rows):
        logits = functional.linear(hidden[start : start + rows], weight).float()
        top = (logits - torch.logsumexp(logits, dim=-1, keepdim=True)).topk(count, dim=-1)
        values.append(top.values)
        indices.append(top.indices)
    return torch.cat(values), torch.cat(indices)
