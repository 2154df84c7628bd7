"""The reference model's weights, drawn from a seed on the host, so that they are equal on every device."""

from __future__ import annotations

import torch

from trainer_rank.geometry import ModelGeometry
from trainer_rank.models.adapters import Adapters, AdapterSettings

_SPREAD = 0.02


class Source:
    """Draws weights of standard deviation 0.02 in a fixed order and puts them on ``device`` as ``dtype``."""

    def __init__(self, seed: int, device: torch.device, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._device, self._dtype = device, dtype

    def draw(self, *shape: int) -> torch.Tensor:
        """Return the next weight."""
        values = torch.empty(shape).normal_(std=_SPREAD, generator=self._generator)
        return values.to(self._device, self._dtype)

    def ones(self, *shape: int) -> torch.Tensor:
        """Return a norm's weight."""
        return torch.ones(shape, dtype=self._dtype, device=self._device)


def layer_shapes(geometry: ModelGeometry) -> dict[str, tuple[int, ...]]:
    """Return the shapes of one layer's matrices that adapters stand beside, inputs before outputs."""
    attention = geometry.query_heads * geometry.head_dimension
    projected = attention + 2 * geometry.key_value_heads * geometry.head_dimension
    shapes: dict[str, tuple[int, ...]] = {
        "attention_in": (geometry.hidden, projected),
        "attention_out": (attention, geometry.hidden),
        "experts_in": (geometry.experts, geometry.hidden, 2 * geometry.expert_hidden),
        "experts_out": (geometry.experts, geometry.expert_hidden, geometry.hidden),
    }
    if geometry.shared_expert_hidden:
        shapes["shared_in"] = (geometry.hidden, 2 * geometry.shared_expert_hidden)
        shapes["shared_out"] = (geometry.shared_expert_hidden, geometry.hidden)
    return shapes


def draw_layer(geometry: ModelGeometry, source: Source) -> dict[str, torch.Tensor]:
    """Return one layer's frozen weights."""
    weights = {name: source.draw(*shape) for name, shape in layer_shapes(geometry).items()}
    weights["router"] = source.draw(geometry.experts, geometry.hidden)
    weights["attention_norm"] = source.ones(geometry.hidden)
    weights["experts_norm"] = source.ones(geometry.hidden)
    return weights


def draw_adapters(geometry: ModelGeometry, settings: AdapterSettings, source: Source) -> Adapters:
    """Return one slot's adapters. Neither side starts at zero, so that every gradient flows from the first step."""
    down: dict[str, torch.nn.Parameter] = {}
    up: dict[str, torch.nn.Parameter] = {}
    for layer in range(geometry.layers if settings.rank else 0):
        for name, (*groups, inputs, outputs) in layer_shapes(geometry).items():
            down[f"layers.{layer}.{name}"] = torch.nn.Parameter(source.draw(*groups, settings.rank, inputs))
            up[f"layers.{layer}.{name}"] = torch.nn.Parameter(source.draw(*groups, settings.rank, outputs))
    return Adapters(settings, down, up)
