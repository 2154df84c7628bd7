"""Adapter slots on a frozen Megatron block: which linear maps are adapted, and which slot is active.

A slot group's adapters must also be active when a layer is computed again in backward, perhaps while another group runs
its forward. So the slot travels with the packed-sequence parameters that the recompute boundary keeps, and every layer
reads it from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch.nn import functional

from trainer_rank.errors import InvalidInputError
from trainer_rank.models.adapters import Adapters, AdapterSettings

NORMALISED = ("self_attention.in_proj", "self_attention.linear_qkv")
"""Linear maps whose module also applies the input norm; the adapter sees the normalised rows."""
PLAIN = (
    "self_attention.out_proj",
    "self_attention.linear_proj",
    "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.linear_fc2",
)
GROUPED = ("mlp.experts.linear_fc1", "mlp.experts.linear_fc2")


class AdapterSlots:
    """Adapters of every slot for every adapted map of ``block``, and the hooks that add them.

    ``mark`` is told the stage as each layer begins.
    """

    def __init__(
        self, block: Any, slots: Sequence[str], settings: AdapterSettings, seed: int, mark: Callable[[str], None]
    ) -> None:
        if not slots or len(set(slots)) != len(slots):
            raise InvalidInputError(f"adapter slots {list(slots)}: give at least one name, each once")
        torch.manual_seed(seed)
        self._slots = {slot: _draw(block, settings) for slot in slots}
        self._active = self._slots[slots[0]]
        self._ends: tuple[Any, torch.Tensor] | None = None
        for index, layer in enumerate(block.layers):
            layer.register_forward_pre_hook(partial(self._begin, index, mark), with_kwargs=True)
        for name, module in block.named_modules():
            if name.endswith(NORMALISED):
                module.register_forward_hook(partial(self._add_normalised, name))
            elif name.endswith(PLAIN):
                module.register_forward_hook(partial(self._add, name))
            elif name.endswith(GROUPED):
                module.register_forward_hook(partial(self._add_grouped, name))

    def parameters_of(self, slot: str) -> Mapping[str, torch.nn.Parameter]:
        """Trainable parameters of one slot by stable name, for example ``layers.0.mlp.experts.linear_fc1.down``.

        Raises:
            InvalidInputError: no such slot, and the names that exist.
        """
        if slot not in self._slots:
            raise InvalidInputError(f"no adapter slot {slot!r}; this model has {', '.join(self._slots)}")
        return self._slots[slot].parameters()

    def _begin(
        self, index: int, mark: Callable[[str], None], _layer: torch.nn.Module, _inputs: object, named: dict[str, Any]
    ) -> None:
        """Before a layer runs: the first time without a graph, again in backward with one."""
        self._active = self._slots[named["packed_seq_params"].slot]
        mark(f"{'backward' if torch.is_grad_enabled() else 'forward'}/layer/{index}")

    def _add(self, name: str, _module: Any, inputs: tuple[Any, ...], result: tuple[Any, Any]) -> tuple[Any, Any]:
        return self._active.add(name, inputs[0], result[0]), result[1]

    def _add_normalised(
        self, name: str, module: Any, inputs: tuple[Any, ...], result: tuple[Any, Any]
    ) -> tuple[Any, Any]:
        weight = module.layer_norm_weight + 1 if module.zero_centered_gamma else module.layer_norm_weight
        rows = functional.rms_norm(inputs[0], weight.shape, weight, module.eps)
        return self._active.add(name, rows, result[0]), result[1]

    def _add_grouped(
        self, name: str, _module: Any, inputs: tuple[Any, ...], result: tuple[Any, Any]
    ) -> tuple[Any, Any]:
        rows, counts = inputs[0], inputs[1]
        return self._active.add_grouped(name, rows, result[0], self._ends_of(counts, rows.device)), result[1]

    def _ends_of(self, counts: Sequence[int], device: torch.device) -> torch.Tensor:
        """Where each expert's rows end; both maps of one expert block share the list, so the copy is made once."""
        if self._ends is None or self._ends[0] is not counts:
            ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32).to(device, non_blocking=True)
            self._ends = (counts, ends)
        return self._ends[1]


def _draw(block: Any, settings: AdapterSettings) -> Adapters:
    """Adapters for every adapted map, like its weight in type and place; their additions are zero at first."""
    down: dict[str, torch.nn.Parameter] = {}
    up: dict[str, torch.nn.Parameter] = {}
    for name, module in block.named_modules():
        if not name.endswith((*NORMALISED, *PLAIN, *GROUPED)):
            continue
        grouped = name.endswith(GROUPED)
        weight = module.weight0 if grouped else module.weight
        experts: tuple[int, ...] = (module.num_gemms,) if grouped else ()
        outputs, inputs = weight.shape
        spread = weight.new_empty(*experts, settings.rank, inputs).normal_(std=inputs**-0.5)
        down[name] = torch.nn.Parameter(spread)
        up[name] = torch.nn.Parameter(weight.new_zeros(*experts, settings.rank, outputs))
    return Adapters(settings, down, up)
