"""The reference model: a small mixture-of-experts transformer with adapter slots, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed import ProcessGroup

from trainer_rank.errors import InvalidInputError
from trainer_rank.geometry import ModelGeometry
from trainer_rank.models.adapters import AdapterSettings
from trainer_rank.models.reference.model import ReferenceModel
from trainer_rank.models.reference.weights import Source

if TYPE_CHECKING:
    from trainer_rank.devices.protocol import Device

__all__ = ["SMALL", "TINY", "ReferenceModel", "build_reference"]

TINY = ModelGeometry(
    name="reference-tiny", layers=2, hidden=64, vocabulary=512, query_heads=4, key_value_heads=2, head_dimension=16,
    experts=8, experts_per_token=2, expert_hidden=32, shared_expert_hidden=32,
)  # fmt: skip
"""For tests: a step of 1,000 tokens takes well under a second on one core."""

SMALL = ModelGeometry(
    name="reference-small", layers=4, hidden=128, vocabulary=2048, query_heads=4, key_value_heads=2, head_dimension=32,
    experts=16, experts_per_token=4, expert_hidden=64, shared_expert_hidden=64,
)  # fmt: skip
"""For rehearsals and recordings."""


def build_reference(
    geometry: ModelGeometry,
    device: Device,
    *,
    slots: Sequence[str] = ("policy",),
    rank: int = 1,
    alpha: float = 32.0,
    dropout: float = 0.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    group: ProcessGroup | None = None,
) -> ReferenceModel:
    """Build the model on ``device`` with equal weights for equal seeds, whatever the device.

    Each of ``slots`` gets adapters of ``rank`` on the attention projections, the experts and the shared expert; rank 0
    gives slots without any. ``dropout`` is the rate on the adapters' inputs. ``group``: the ranks that divide each
    batch's rows among them (context parallelism); every one builds the whole model. Raises InvalidInputError for sizes
    that cannot be built, torch.OutOfMemoryError when the device cannot hold the model.
    """
    if len(set(slots)) != len(slots) or not slots:
        raise InvalidInputError(f"adapter slots {', '.join(slots) or 'none'}; give at least one, each name once")
    if rank < 0 or not 0 <= dropout < 1:
        raise InvalidInputError(
            f"adapter rank {rank} with dropout {dropout}; give a rank of 0 or more and a rate below 1"
        )
    if geometry.query_heads % geometry.key_value_heads or geometry.head_dimension % 2:
        raise InvalidInputError(
            f"geometry {geometry.name}: key-value heads must divide query heads, head dimension be even"
        )
    if group is not None and geometry.key_value_heads % group.size():
        raise InvalidInputError(
            f"geometry {geometry.name}: {group.size()} context-parallel ranks must divide {geometry.key_value_heads} "
            "key-value heads"
        )
    with device.activate():
        source = Source(seed, device.torch_device, dtype)
        return ReferenceModel(geometry, device, slots, AdapterSettings(rank, alpha, dropout), source, group)
