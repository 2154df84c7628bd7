"""Causal attention over sequences packed end to end, without memory that grows with the square of a length.

On a CUDA device PyTorch's fused kernels take packed sequences themselves. On the host, and so on the virtual device,
one operator walks through the sequences with the host's fused kernel; its outputs are all that it leaves behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everyone uses

from trainer_rank.errors import UnsupportedError
from trainer_rank.models.head import wide

aten = torch.ops.aten
_CAUSAL_FROM_TOP_LEFT = 1


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[int],
    boundaries: torch.Tensor,
    parents: Sequence[int] | None = None,
) -> torch.Tensor:
    """Attend within each sequence and to what it continues; returns (N, Q, D).

    ``query`` (N, Q, D); ``key`` and ``value`` (N, K, D) with K dividing Q; ``lengths`` sum to N; ``boundaries`` int32
    (S + 1,) on the same device; ``parents`` are earlier sequences, -1 for none. Scores are scaled by 1 / sqrt(D).
    Raises UnsupportedError for parents on a CUDA device.
    """
    if query.device.type != "cuda":
        output: torch.Tensor = _on_host(query, key, value, list(lengths), list(parents or ()))[0]
        return output
    if parents is not None:
        raise UnsupportedError("shared prefixes are not run on a CUDA device; pack the requests without them")
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
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int], parents: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output (N, Q, D) and the log of each row's score sum, float32 (float64 for itself) (Q, N)."""
    output = torch.empty(query.shape, dtype=query.dtype)
    sums = torch.empty(query.size(1), query.size(0), dtype=wide(query.dtype))
    group = query.size(1) // key.size(1)
    for rows, seen in _sequences(lengths, parents):
        own = rows.stop - rows.start
        part, part_sums = aten._scaled_dot_product_flash_attention_for_cpu(
            _batched(query[seen]), _batched(key[seen], group), _batched(value[seen], group), 0.0, True
        )
        output[rows] = part[0].transpose(0, 1)[-own:]
        sums[:, rows] = part_sums[0][:, -own:]
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
    parents: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value."""
    gradients = tuple(torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in (query, key, value))
    group = query.size(1) // key.size(1)
    for rows, seen in _sequences(lengths, parents):
        above = len(query[seen]) - (rows.stop - rows.start)
        own = F.pad(gradient[rows], (0, 0, 0, 0, above, 0)) if above else gradient[rows]
        parts = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _batched(own), _batched(query[seen]), _batched(key[seen], group), _batched(value[seen], group),
            _batched(output[seen]), sums[:, seen][None].contiguous(), 0.0, True,
        )  # fmt: skip
        for whole, part in zip(gradients, parts, strict=True):
            heads = part[0].unflatten(0, (whole.size(1), -1)).sum(1)
            whole[seen] += heads.transpose(0, 1)
    return gradients[0], gradients[1], gradients[2]


def _sequences(lengths: Sequence[int], parents: Sequence[int]) -> Iterator[tuple[slice, slice | torch.Tensor]]:
    """Yield the rows of each sequence, and the rows that it sees: with those of the sequences that it continues."""
    ends = list(accumulate(lengths))
    own = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    if not parents:
        yield from ((rows, rows) for rows in own)
        return
    paths: list[torch.Tensor] = []
    for rows, parent in zip(own, parents, strict=True):
        place = torch.arange(rows.start, rows.stop)
        paths.append(place if parent < 0 else torch.cat([paths[parent], place]))
        yield rows, rows if parent < 0 else paths[-1]


def _batched(tensor: torch.Tensor, repeat: int = 1) -> torch.Tensor:
    """Return rows (n, heads, D) as (1, heads * repeat, n, D)."""
    heads = tensor.transpose(0, 1)[None]
    return heads.repeat_interleave(repeat, 1) if repeat > 1 else heads


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:  # noqa: ANN401
    query, key, value, ctx.lengths, ctx.parents = inputs
    ctx.save_for_backward(query, key, value, *output)


def _backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
    return (*_on_host_backward(gradient, *ctx.saved_tensors, ctx.lengths, ctx.parents), None, None)


_on_host.register_autograd(_backward, setup_context=_keep)
