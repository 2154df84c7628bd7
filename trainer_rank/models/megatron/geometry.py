"""The hybrid geometry of Qwen3.6-35B-A3B: gated delta net in three layers of four, full attention in the fourth."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainer_rank.errors import InvalidInputError, UnsupportedError
from trainer_rank.geometry import ModelGeometry, Topology

CONTEXT_SIZES = (1, 2)
"""Context-parallel sizes that the runtime is written for; every other parallel size must be 1."""


@dataclass(frozen=True, kw_only=True)
class HybridGeometry(ModelGeometry):
    """A mixture-of-experts model whose every ``attention_every``-th layer is full attention, the others delta nets.

    Source of the defaults' meaning: the public configuration of Qwen3.6-35B-A3B.
    """

    attention_every: int
    rotary_fraction_percent: int
    rotary_base: int
    delta_key_heads: int
    delta_value_heads: int
    delta_head_dimension: int
    convolution_kernel: int

    def with_layers(self, layers: int) -> HybridGeometry:
        """The same geometry with another number of layers (1 or more)."""
        return replace(self, layers=layers)

    @property
    def attention_layers(self) -> int:
        """How many layers are full attention."""
        return self.layers // self.attention_every

    def parameters(self) -> int:
        """Number of parameters of the frozen base, embeddings and head included."""
        experts = self.experts * 3 * self.hidden * self.expert_hidden
        shared = 3 * self.hidden * self.shared_expert_hidden + self.hidden
        mixture = self.hidden * self.experts + experts + shared + self.hidden
        delta = self.layers - self.attention_layers
        ends = 2 * self.vocabulary * self.hidden + self.hidden
        return (
            ends
            + self.layers * mixture
            + delta * self._delta_parameters()
            + self.attention_layers * self._attention_parameters()
        )

    def _delta_parameters(self) -> int:
        keys = self.delta_key_heads * self.delta_head_dimension
        values = self.delta_value_heads * self.delta_head_dimension
        projection = self.hidden * (2 * keys + 2 * values + 2 * self.delta_value_heads)
        convolution = (2 * keys + values) * self.convolution_kernel
        return (
            self.hidden
            + projection
            + convolution
            + 2 * self.delta_value_heads
            + self.delta_head_dimension
            + values * self.hidden
        )

    def _attention_parameters(self) -> int:
        queries = self.query_heads * self.head_dimension
        keys = self.key_value_heads * self.head_dimension
        return self.hidden + self.hidden * (2 * queries + 2 * keys) + 2 * self.head_dimension + queries * self.hidden


QWEN_36_35B_A3B = HybridGeometry(
    name="qwen3.6-35b-a3b",
    layers=40,
    hidden=2048,
    vocabulary=248_320,
    query_heads=16,
    key_value_heads=2,
    head_dimension=256,
    experts=256,
    experts_per_token=8,
    expert_hidden=512,
    shared_expert_hidden=512,
    attention_every=4,
    rotary_fraction_percent=25,
    rotary_base=10_000_000,
    delta_key_heads=16,
    delta_value_heads=32,
    delta_head_dimension=128,
    convolution_kernel=4,
)


def require_supported(topology: Topology) -> None:
    """Refuse by name every topology that this runtime would run or price wrongly.

    Raises:
        UnsupportedError: a parallel size that is not written for, with the sizes that are.
    """
    for name in ("data", "tensor", "pipeline", "expert"):
        if getattr(topology, name) != 1:
            raise UnsupportedError(
                f"the Megatron runtime does not support {name} parallel size {getattr(topology, name)}; "
                f"use 1 (context parallel may be {' or '.join(map(str, CONTEXT_SIZES))})"
            )
    if topology.context not in CONTEXT_SIZES:
        raise UnsupportedError(
            f"the Megatron runtime does not support context parallel size {topology.context}; "
            f"use {' or '.join(map(str, CONTEXT_SIZES))}"
        )


def require_layers(geometry: HybridGeometry) -> None:
    """Refuse a layer count outside 1 to 40.

    Raises:
        InvalidInputError: the count, and the range.
    """
    if not 1 <= geometry.layers <= QWEN_36_35B_A3B.layers:
        raise InvalidInputError(f"{geometry.layers} layers of {geometry.name}: give 1 to {QWEN_36_35B_A3B.layers}")
