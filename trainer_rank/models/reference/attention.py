"""Causal attention over sequences packed end to end, without memory that grows with the square of a length.

On a CUDA device PyTorch's fused kernels take packed sequences themselves; where sequences continue others, the rows
that each of them sees are gathered first. On the host, and so on the virtual device, one operator walks through the
sequences with the host's fused kernel; its outputs are all that it leaves behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everyone uses

from trainer_rank.models.head import wide
from trainer_rank.models.protocol import PackedBatch

aten = torch.ops.aten
_CAUSAL_FROM_BOTTOM_RIGHT = 2
"""The last query sees every key; without shared prefixes a sequence has as many of both."""


@dataclass(frozen=True, eq=False)
class Seen:
    """What each of the packed sequences attends to: its own rows, and before them those of what it continues.

    ``lengths`` and ``parents`` as in :class:`PackedBatch`; ``boundaries`` int32 (S + 1,) on the device. Where sequences
    continue others on a CUDA device, ``rows`` int64 (A,) are the rows that all of them see, one sequence after the
    other, and ``ends`` int32 (S + 1,) where each begins and ends in these; ``most`` rows are seen by one.
    """

    lengths: tuple[int, ...]
    parents: tuple[int, ...] | None
    boundaries: torch.Tensor
    rows: torch.Tensor | None
    ends: torch.Tensor
    most: int


def seen_by(batch: PackedBatch) -> Seen:
    """Return what the sequences of a batch attend to; gathered rows are counted once for all layers."""
    boundaries = batch.boundaries
    if batch.parents is None or boundaries.device.type != "cuda":
        return Seen(batch.lengths, batch.parents, boundaries, None, boundaries, batch.longest)
    rows = [_as_rows(each) for _, each in _sequences(batch.lengths, batch.parents)]
    ends = torch.tensor([0, *accumulate(map(len, rows))], dtype=torch.int32)
    gathered, bounds = (each.to(boundaries.device) for each in (torch.cat(rows), ends))
    return Seen(batch.lengths, batch.parents, boundaries, gathered, bounds, max(map(len, rows)))


def packed_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: Seen) -> torch.Tensor:
    """Attend within each sequence and to what it continues; returns (N, Q, D).

    ``query`` (N, Q, D); ``key`` and ``value`` (N, K, D) with K dividing Q. Scores are scaled by 1 / sqrt(D).
    """
    if query.device.type != "cuda":
        output: torch.Tensor = _on_host(query, key, value, list(seen.lengths), list(seen.parents or ()))[0]
        return output
    if seen.rows is not None:
        key, value = key[seen.rows], value[seen.rows]
    longest = max(seen.lengths)
    if query.dtype != torch.float32:
        flash: torch.Tensor = aten._flash_attention_forward(
            query, key, value, seen.boundaries, seen.ends, longest, seen.most, 0.0, True, False
        )[0]
        return flash
    group = query.size(1) // key.size(1)
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    efficient: torch.Tensor = aten._efficient_attention_forward(
        query[None], key[None], value[None], None, seen.boundaries, seen.ends, longest, seen.most, 0.0,
        _CAUSAL_FROM_BOTTOM_RIGHT, True,
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


def _as_rows(seen: slice | torch.Tensor) -> torch.Tensor:
    return torch.arange(seen.start, seen.stop) if isinstance(seen, slice) else seen


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
