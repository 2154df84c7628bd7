"""Adapter slots on a frozen Megatron block: which linear maps are adapted, and which slot is active.

A slot group's adapters must also be active when a layer is computed again in backward, perhaps while another group runs
its forward. So the slot travels with the packed-sequence parameters that the recompute boundary keeps, and every layer
reads it from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.nn import functional

from trainer_rank.errors import InvalidInputError
from trainer_rank.models.megatron.lora import DenseAdapter, GroupedAdapter

NORMALISED = ("self_attention.in_proj", "self_attention.linear_qkv")
"""Linear maps whose module also applies the input norm; the adapter sees the normalised rows."""
PLAIN = (
    "self_attention.out_proj",
    "self_attention.linear_proj",
    "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.linear_fc2",
)
GROUPED = ("mlp.experts.linear_fc1", "mlp.experts.linear_fc2")


class AdapterSlots(torch.nn.Module):
    """Adapters of every slot for every adapted map of ``block``, and the hooks that add them."""

    def __init__(self, block: Any, slots: Sequence[str], rank: int, alpha: float, seed: int) -> None:
        super().__init__()
        if not slots or len(set(slots)) != len(slots):
            raise InvalidInputError(f"adapter slots {list(slots)}: give at least one name, each once")
        self.active: str | None = None
        self.slots = torch.nn.ModuleDict({slot: torch.nn.ModuleDict() for slot in slots})
        self._offsets: tuple[Any, torch.Tensor] | None = None
        torch.manual_seed(seed)
        for layer in block.layers:
            layer.register_forward_pre_hook(self._select, with_kwargs=True)
        for name, module in block.named_modules():
            for endings, attach in (
                (NORMALISED, self._attach_dense),
                (PLAIN, self._attach_dense),
                (GROUPED, self._attach_grouped),
            ):
                if name.endswith(endings):
                    attach(name, module, rank, alpha, endings is NORMALISED)

    def parameters_of(self, slot: str) -> Mapping[str, torch.nn.Parameter]:
        """Trainable parameters of one slot by stable name, for example ``layers.0.mlp.experts.linear_fc1.down``.

        Raises:
            InvalidInputError: no such slot, and the names that exist.
        """
        if slot not in self.slots:
            raise InvalidInputError(f"no adapter slot {slot!r}; this model has {', '.join(self.slots)}")
        return {name.replace("/", "."): parameter for name, parameter in self.slots[slot].named_parameters()}

    def _select(self, _layer: torch.nn.Module, _inputs: object, named: dict[str, Any]) -> None:
        self.active = named["packed_seq_params"].slot

    def _adapter(self, name: str) -> Any:
        if self.active is None:
            raise InvalidInputError("no adapter slot is active; run the block through the runtime's forward")
        return self.slots[self.active][name]  # type: ignore[index]

    def _attach(
        self, name: str, module: torch.nn.Module, build: Callable[[], torch.nn.Module], hook: Callable[..., Any]
    ) -> None:
        for adapters in self.slots.values():
            adapters[name.replace(".", "/")] = build()  # type: ignore[operator]
        module.register_forward_hook(hook)

    def _attach_dense(self, name: str, module: Any, rank: int, alpha: float, normalised: bool) -> None:
        weight: torch.Tensor = module.weight
        outputs, inputs = weight.shape
        key = name.replace(".", "/")

        def add(module: Any, arguments: tuple[Any, ...], result: tuple[Any, Any]) -> tuple[Any, Any]:
            rows = _normalised(module, arguments[0]) if normalised else arguments[0]
            return result[0] + self._adapter(key)(rows), result[1]

        self._attach(
            name,
            module,
            lambda: DenseAdapter(inputs, outputs, rank, alpha, weight),
            add,
        )

    def _attach_grouped(self, name: str, module: Any, rank: int, alpha: float, _normalised: bool) -> None:
        weight: torch.Tensor = module.weight0
        outputs, inputs = weight.shape
        key = name.replace(".", "/")

        def add(_module: Any, arguments: tuple[Any, ...], result: tuple[Any, Any]) -> tuple[Any, Any]:
            rows, counts = arguments[0], arguments[1]
            return result[0] + self._adapter(key)(rows, self._ends(counts, rows.device)), result[1]

        self._attach(
            name,
            module,
            lambda: GroupedAdapter(module.num_gemms, inputs, outputs, rank, alpha, weight),
            add,
        )

    def _ends(self, counts: Sequence[int], device: torch.device) -> torch.Tensor:
        """Where each expert's rows end; both maps of one expert block share the list, so the copy is made once."""
        if self._offsets is None or self._offsets[0] is not counts:
            ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32).to(device, non_blocking=True)
            self._offsets = (counts, ends)
        return self._offsets[1]


def _normalised(module: Any, rows: torch.Tensor) -> torch.Tensor:
    weight = module.layer_norm_weight + 1 if module.zero_centered_gamma else module.layer_norm_weight
    return functional.rms_norm(rows, (rows.shape[-1],), weight, module.eps)
