"""What may be assumed of a stage that no tape covers, by the stage's own name. Pure; bytes per rank.

An assumption never enters a forecast unless it was asked for by name, and is printed with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainer_rank.errors import InvalidInputError
from trainer_rank.features import PACKED_TOKENS, ROUTED_ROWS
from trainer_rank.models.megatron.geometry import HybridGeometry
from trainer_rank.planning.target import EXPERT_LORA, HEAD, OPTIMIZER, RAGGED, Target

RETAINED_PER_LAYER_TOKEN = 7_423
"""Bytes of graph kept per layer and packed token of this rank, BF16 with full recompute. Source: an H200, 4,096 and
65,536 tokens: 305,485 B a token at 40 layers and 38,273 B at 4, of which the difference is divided by 36 layers."""
STATE_BYTES = 16
"""Bytes that a slot holds for each adapter parameter once its optimizer has stepped: BF16 value and gradient, float32
copy and two moments."""
HEAD_ROWS = 1_024
"""Rows whose logits exist at once in the chunked head."""


class Load(NamedTuple):
    """Bytes that a stage adds: always there, kept from a subforward's forward to its backward, and for a moment."""

    resident: int = 0
    retained: int = 0
    working: int = 0


@dataclass(frozen=True)
class Assumption:
    """``meaning`` says in words what :attr:`load` computes from target, recorded layers, slots and plan features."""

    name: str
    meaning: str
    load: Callable[[Target, int, int, Mapping[str, int]], Load]


def further_weights(target: Target, recorded: int) -> int:
    """Return the BF16 bytes of the target's weights beyond those of ``recorded`` layers."""
    return 2 * (target.geometry.parameters() - target.geometry.with_layers(recorded).parameters())


def _layers(target: Target, recorded: int, _slots: int, features: Mapping[str, int]) -> Load:
    kept = (target.geometry.layers - recorded) * RETAINED_PER_LAYER_TOKEN * features[PACKED_TOKENS]
    return Load(retained=kept)


def _expert_lora(target: Target, _recorded: int, slots: int, features: Mapping[str, int]) -> Load:
    rows = features[ROUTED_ROWS] * target.geometry.hidden * 2
    return Load(resident=2 * adapter_parameters(target) * slots, working=rows)


def _head(target: Target, _recorded: int, _slots: int, features: Mapping[str, int]) -> Load:
    rows = features[PACKED_TOKENS]
    chunk = 2 * 4 * target.geometry.vocabulary * min(HEAD_ROWS, rows)
    return Load(retained=rows * (2 * target.geometry.hidden + 16), working=chunk)


def _optimizer(target: Target, _recorded: int, slots: int, _features: Mapping[str, int]) -> Load:
    return Load(resident=16 * adapter_parameters(target) * slots)


def _nothing(_target: Target, _recorded: int, _slots: int, _features: Mapping[str, int]) -> Load:
    return Load()


def assumptions_for(target: Target) -> dict[str, Assumption]:
    """Return every assumption that can be asked for, by name."""
    known = (
        Assumption(
            EXPERT_LORA,
            f"rank-{target.adapter_rank} adapters in BF16 on every linear map of every slot, and one BF16 buffer of "
            "routed rows x hidden at the peak, as in the public report's failing allocation",
            _expert_lora,
        ),
        Assumption(
            HEAD,
            f"the head keeps its BF16 input and 16 B a row, and holds {HEAD_ROWS} rows of float32 logits twice",
            _head,
        ),
        Assumption(OPTIMIZER, "16 B for each adapter parameter: gradient, float32 copy, two moments", _optimizer),
        Assumption(
            target.layers_stage,
            f"each further layer holds its BF16 weights and keeps {RETAINED_PER_LAYER_TOKEN:,} B a packed token until "
            "backward, as measured between 4 and 40 layers; one layer's working set at a time",
            _layers,
        ),
        Assumption(RAGGED, "sequences of unequal lengths take what equal ones of the same total take", _nothing),
    )
    return {each.name: each for each in known}


def chosen_assumptions(names: Sequence[str], target: Target) -> tuple[Assumption, ...]:
    """Return the assumptions of these names; InvalidInputError lists those that exist."""
    known = assumptions_for(target)
    for name in names:
        if name not in known:
            raise InvalidInputError(f"assumption {name!r} is not known; choose of {', '.join(known)}")
    return tuple(known[name] for name in dict.fromkeys(names))


def adapter_parameters(target: Target) -> int:
    """Return the parameters of one slot: rank x (inputs + outputs) of every adapted linear map."""
    geometry = target.geometry
    dense = geometry.attention_layers * _attention(geometry)
    dense += (geometry.layers - geometry.attention_layers) * _delta(geometry)
    expert = geometry.hidden + 2 * geometry.expert_hidden + geometry.expert_hidden + geometry.hidden
    shared = geometry.hidden + 2 * geometry.shared_expert_hidden + geometry.shared_expert_hidden + geometry.hidden
    return target.adapter_rank * (dense + geometry.layers * (geometry.experts * expert + shared))


def _attention(geometry: HybridGeometry) -> int:
    queries = geometry.query_heads * geometry.head_dimension
    keys = geometry.key_value_heads * geometry.head_dimension
    return geometry.hidden + 2 * queries + 2 * keys + queries + geometry.hidden


def _delta(geometry: HybridGeometry) -> int:
    keys = geometry.delta_key_heads * geometry.delta_head_dimension
    values = geometry.delta_value_heads * geometry.delta_head_dimension
    return geometry.hidden + 2 * keys + 2 * values + 2 * geometry.delta_value_heads + values + geometry.hidden
