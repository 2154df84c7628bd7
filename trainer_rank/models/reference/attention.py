"""Causal attention over sequences packed end to end, without memory that grows with the square of a length.

On a CUDA device PyTorch's fused kernels take packed sequences themselves. On the host, and so on the virtual device,
one operator walks through the sequences with the host's fused kernel; its outputs are all that it leaves behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

aten = torch.ops.aten
_CAUSAL_FROM_TOP_LEFT = 1


def packed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int], boundaries: torch.Tensor
) -> torch.Tensor:
    """Attend within each sequence; returns (N, Q, D).

    ``query`` (N, Q, D); ``key`` and ``value`` (N, K, D) with K dividing Q; ``lengths`` sum to N; ``boundaries`` int32
    (S + 1,) on the same device. Scores are scaled by 1 / sqrt(D).
    """
    if query.device.type != "cuda":
        output: torch.Tensor = _on_host(query, key, value, list(lengths))[0]
        return output
    longest = max(lengths)
    if query.dtype != torch.float32:
        flash: torch.Tensor = aten._flash_attention_forward(
            query, key, value, boundaries, boundaries, longest, longest, 0.0, True, False
        )[0]
        return flash
    group = query.size(1) // key.size(1)
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    efficient: torch.Tensor = aten._efficient_attention_forward(
        query[None], key[None], value[None], None, boundaries, boundaries, longest, longest, 0.0,
        _CAUSAL_FROM_TOP_LEFT, True,
    )[0]  # fmt: skip
    return efficient[0]


@torch.library.custom_op("trainer_rank::packed_attention", mutates_args=(), device_types="cpu")
def _on_host(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output (N, Q, D) and the log of each row's score sum, float32 (Q, N)."""
    output = torch.empty(query.shape, dtype=query.dtype)
    sums = torch.empty(query.size(1), query.size(0), dtype=torch.float32)
    group = query.size(1) // key.size(1)
    for rows in _sequences(lengths):
        part, part_sums = aten._scaled_dot_product_flash_attention_for_cpu(
            _batched(query[rows]), _batched(key[rows], group), _batched(value[rows], group), 0.0, True
        )
        output[rows] = part[0].transpose(0, 1)
        sums[:, rows] = part_sums[0]
    return output, sums


@torch.library.custom_op("trainer_rank::packed_attention_backward", mutates_args=(), device_types="cpu")
def _on_host_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    sums: torch.Tensor,
    lengths: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value."""
    gradients = tuple(torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in (query, key, value))
    group = query.size(1) // key.size(1)
    for rows in _sequences(lengths):
        parts = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _batched(gradient[rows]), _batched(query[rows]), _batched(key[rows], group), _batched(value[rows], group),
            _batched(output[rows]), sums[:, rows][None].contiguous(), 0.0, True,
        )  # fmt: skip
        for whole, part in zip(gradients, parts, strict=True):
            heads = part[0].unflatten(0, (whole.size(1), -1)).sum(1)
            whole[rows] = heads.transpose(0, 1)
    return gradients[0], gradients[1], gradients[2]


def _sequences(lengths: Sequence[int]) -> Iterator[slice]:
    start = 0
    for length in lengths:
        yield slice(start, start + length)
        start += length


def _batched(tensor: torch.Tensor, repeat: int = 1) -> torch.Tensor:
    """Return rows (n, heads, D) as (1, heads * repeat, n, D)."""
    heads = tensor.transpose(0, 1)[None]
    return heads.repeat_interleave(repeat, 1) if repeat > 1 else heads


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:  # noqa: ANN401
    query, key, value, lengths = inputs
    ctx.save_for_backward(query, key, value, *output)
    ctx.lengths = lengths


def _backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
    return (*_on_host_backward(gradient, *ctx.saved_tensors, ctx.lengths), None)


_on_host.register_autograd(_backward, setup_context=_keep)
