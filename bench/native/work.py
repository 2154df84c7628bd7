"""How many floating-point operations a step of the hybrid geometry needs at least."""

from __future__ import annotations

from collections.abc import Sequence

from trainer_rank.models.megatron.geometry import HybridGeometry

PASSES = 3
"""Forward, the recomputed forward, and the gradients of activations; a frozen base needs no weight gradients."""


def step_operations(geometry: HybridGeometry, lengths: Sequence[int]) -> int:
    """Operations (a multiply and an add are two) of one forward and backward with full recompute.

    Counted: every matrix product with a weight that a token meets, and causal attention's two products. Not counted:
    the delta rule's state updates, norms, routing, adapters; so an achieved share computed from it is a lower bound.
    The head's products run once forward, again in backward, and once for the gradient: also three passes.
    """
    experts = (
        3 * geometry.hidden * (geometry.experts_per_token * geometry.expert_hidden + geometry.shared_expert_hidden)
    )
    keys = geometry.delta_key_heads * geometry.delta_head_dimension
    values = geometry.delta_value_heads * geometry.delta_head_dimension
    delta = geometry.hidden * (2 * keys + 3 * values + 2 * geometry.delta_value_heads)
    queries = geometry.query_heads * geometry.head_dimension
    attention = geometry.hidden * (3 * queries + 2 * geometry.key_value_heads * geometry.head_dimension)
    delta_layers = geometry.layers - geometry.attention_layers
    weights = (
        geometry.layers * (experts + geometry.hidden * geometry.experts)
        + delta_layers * delta
        + geometry.attention_layers * attention
        + geometry.hidden * geometry.vocabulary
    )
    products = sum(2 * length * length * queries for length in lengths) * geometry.attention_layers
    return PASSES * (2 * sum(lengths) * weights + products)
