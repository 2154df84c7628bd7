"""Mixture of experts: top-k routing and one grouped product over all experts, without a loop over them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everyone uses

from trainer_rank.models.adapters import Adapters
from trainer_rank.models.head import wide


def mixture(
    hidden: torch.Tensor, weights: Mapping[str, torch.Tensor], adapters: Adapters, name: str, per_token: int
) -> torch.Tensor:
    """Return the experts' weighted sum for each row of ``hidden`` (N, H).

    ``weights``: ``router`` (E, H), ``experts_in`` (E, H, 2 F), ``experts_out`` (E, F, H). Every row goes to
    ``per_token`` experts, so N * ``per_token`` rows are computed however they fall.
    """
    chances = F.softmax(hidden @ weights["router"].t(), -1, dtype=wide(hidden.dtype))
    shares, chosen = chances.topk(per_token, -1)
    shares = (shares / shares.sum(-1, keepdim=True)).to(hidden.dtype)
    order = chosen.flatten().argsort(stable=True)
    counts = torch.zeros(weights["router"].size(0), dtype=torch.int32, device=hidden.device)
    counts.scatter_add_(0, chosen.flatten(), torch.ones_like(order, dtype=torch.int32))
    ends = counts.cumsum(0, dtype=torch.int32)
    back = order.argsort()
    rows: torch.Tensor = _ToExperts.apply(hidden, order, back, per_token)  # type: ignore[no-untyped-call]
    inner = F.grouped_mm(rows, weights["experts_in"], offs=ends)
    inner = swiglu(adapters.add_grouped(f"{name}.experts_in", rows, inner, ends))
    outer = F.grouped_mm(inner, weights["experts_out"], offs=ends)
    outer = adapters.add_grouped(f"{name}.experts_out", inner, outer, ends)
    returned: torch.Tensor = _FromExperts.apply(outer, order, back)  # type: ignore[no-untyped-call]
    return (returned.view(-1, per_token, hidden.size(1)) * shares[:, :, None]).sum(1)


def swiglu(inner: torch.Tensor) -> torch.Tensor:
    """Return silu(first half) * second half of the last dimension."""
    gate, value = inner.chunk(2, -1)
    return F.silu(gate) * value


class _ToExperts(torch.autograd.Function):
    """Copy each row to its experts, sorted by expert. Backward gathers, so that it is deterministic everywhere."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: torch.Tensor,
        order: torch.Tensor,
        back: torch.Tensor,
        per_token: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(back)
        ctx.per_token = per_token
        return hidden[order // per_token]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        (back,) = ctx.saved_tensors
        return gradient[back].view(-1, ctx.per_token, gradient.size(1)).sum(1), None, None, None


class _FromExperts(torch.autograd.Function):
    """Undo the sorting by expert."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        ctx.save_for_backward(order)
        return rows[back]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        (order,) = ctx.saved_tensors
        return gradient[order], None, None
