"""One transformer layer: attention with rotary positions, then routed experts beside a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everyone uses

from trainer_rank.geometry import ModelGeometry
from trainer_rank.models.adapters import Adapters
from trainer_rank.models.context import Share, by_rank
from trainer_rank.models.protocol import PackedBatch
from trainer_rank.models.reference.attention import Seen, packed_attention, seen_by
from trainer_rank.models.reference.experts import mixture, swiglu

EPSILON = 1e-6
_ROTARY_BASE = 10_000.0


@dataclass(frozen=True, eq=False)
class Positions:
    """What attention knows of the packed sequences. ``cosine`` and ``sine``: (N, 1, D / 2), of a share its own rows."""

    seen: Seen
    cosine: torch.Tensor
    sine: torch.Tensor
    share: Share | None = None

    def shared(self, share: Share) -> Positions:
        """Return the positions of one rank's rows; attention still sees all sequences."""
        own = share.own
        return replace(self, cosine=self.cosine[own], sine=self.sine[own], share=share)


def positions_of(batch: PackedBatch, dimension: int, dtype: torch.dtype) -> Positions:
    """Count positions from 0 within each sequence, from its parent's end where it continues one; take rotary angles."""
    total, boundaries = sum(batch.lengths), batch.boundaries
    device, starts = boundaries.device, boundaries[:-1]
    if batch.parents is not None:
        starts = starts - torch.tensor(_depths(batch.lengths, batch.parents), dtype=torch.int32).to(device)
    place = torch.arange(total, device=device) - starts.repeat_interleave(boundaries.diff(), output_size=total)
    rates = _ROTARY_BASE ** (-torch.arange(0, dimension, 2, dtype=torch.float32, device=device) / dimension)
    angles = place[:, None, None] * rates
    return Positions(seen_by(batch), angles.cos().to(dtype), angles.sin().to(dtype))


def _depths(lengths: tuple[int, ...], parents: tuple[int, ...]) -> list[int]:
    """Return how many rows precede each sequence on its path."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + lengths[parent])
    return depths


def run_layer(
    hidden: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
    geometry: ModelGeometry,
    adapters: Adapters,
    name: str,
    positions: Positions,
) -> torch.Tensor:
    """Return the layer's output (N, H) for ``hidden`` (N, H)."""
    normed = F.rms_norm(hidden, hidden.shape[-1:], weights["attention_norm"], EPSILON)
    hidden = hidden + _attention(normed, weights, geometry, adapters, name, positions)
    normed = F.rms_norm(hidden, hidden.shape[-1:], weights["experts_norm"], EPSILON)
    mixed = mixture(normed, weights, adapters, name, geometry.experts_per_token)
    if geometry.shared_expert_hidden:
        inner = adapters.add(f"{name}.shared_in", normed, normed @ weights["shared_in"])
        inner = swiglu(inner)
        mixed = mixed + adapters.add(f"{name}.shared_out", inner, inner @ weights["shared_out"])
    return hidden + mixed


def _attention(
    hidden: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
    geometry: ModelGeometry,
    adapters: Adapters,
    name: str,
    positions: Positions,
) -> torch.Tensor:
    heads = (geometry.query_heads, geometry.key_value_heads, geometry.key_value_heads)
    projected = adapters.add(f"{name}.attention_in", hidden, hidden @ weights["attention_in"])
    query, key, value = projected.view(len(projected), -1, geometry.head_dimension).split(heads, 1)  # type: ignore[no-untyped-call]
    query, key = _rotate(query, positions), _rotate(key, positions)
    if positions.share is not None:
        query, key, value = _all_rows(query, key, value, positions.share)
    mixed = packed_attention(query, key, value, positions.seen)
    if positions.share is not None:
        mixed = positions.share.to_rows(mixed)
    mixed = mixed.flatten(1)
    return adapters.add(f"{name}.attention_out", mixed, mixed @ weights["attention_out"])


def _all_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, share: Share
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Exchange a rank's rows for all rows of its heads, in one collective."""
    ranks = share.group.size()
    counts = [each.size(1) // ranks for each in (query, key, value)]
    heads = share.to_heads(by_rank((query, key, value), ranks))
    return tuple(heads.split(counts, 1))  # type: ignore[no-untyped-call]


def _rotate(heads: torch.Tensor, positions: Positions) -> torch.Tensor:
    first, second = heads.chunk(2, -1)
    turned = (first * positions.cosine - second * positions.sine, first * positions.sine + second * positions.cosine)
    return torch.cat(turned, -1)
