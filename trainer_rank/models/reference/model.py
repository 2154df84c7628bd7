"""A small mixture-of-experts transformer in plain torch, the same on the host, the virtual device and CUDA.

Every layer is recomputed in backward; what lives between forward and backward is each layer's input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everyone uses
from torch.utils.checkpoint import checkpoint

from trainer_rank.errors import InvalidInputError
from trainer_rank.geometry import ModelGeometry, Topology
from trainer_rank.models.adapters import Adapters, AdapterSettings
from trainer_rank.models.head import target_log_probabilities, top_log_probabilities
from trainer_rank.models.protocol import PackedBatch, PackedOutputs
from trainer_rank.models.reference.layer import EPSILON, Positions, positions_of, run_layer
from trainer_rank.models.reference.weights import Source, draw_adapters, draw_layer

if TYPE_CHECKING:
    from trainer_rank.devices.protocol import Device


class ReferenceModel:
    """Implements :class:`trainer_rank.models.protocol.ModelRuntime`; see :func:`build_reference`."""

    def __init__(
        self, geometry: ModelGeometry, device: Device, slots: Sequence[str], settings: AdapterSettings, source: Source
    ) -> None:
        self._geometry = geometry
        self._device = device
        self._dropout = settings.dropout
        self._embedding = source.draw(geometry.vocabulary, geometry.hidden)
        self._layers = [draw_layer(geometry, source) for _ in range(geometry.layers)]
        self._norm = source.ones(geometry.hidden)
        self._head = source.draw(geometry.vocabulary, geometry.hidden)
        self._adapters = {slot: draw_adapters(geometry, settings, source) for slot in slots}

    @property
    def geometry(self) -> ModelGeometry:
        """Sizes of the model."""
        return self._geometry

    @property
    def topology(self) -> Topology:
        """One process, no parallelism."""
        return Topology()

    @property
    def device(self) -> Device:
        """Where it lives."""
        return self._device

    @property
    def kernel_settings(self) -> Mapping[str, str]:
        """Plain torch: the weights' precision, the adapters' dropout, and every layer recomputed."""
        precision = str(self._norm.dtype).removeprefix("torch.")
        return {
            "model": "reference",
            "precision": precision,
            "dropout": str(self._dropout),
            "recomputation": "every layer",
        }

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the adapter slots, in order of creation."""
        return tuple(self._adapters)

    @property
    def shares_prefixes(self) -> bool:
        """On the host and the virtual device: there one operator of ours attends."""
        return self._device.torch_device.type != "cuda"

    def executed_lengths(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """The lengths as they are: nothing is padded."""
        return tuple(lengths)

    def adapter_parameters(self, slot: str) -> Mapping[str, torch.nn.Parameter]:
        """Trainable parameters of one slot, by stable name."""
        return self._adapters_of(slot).parameters()

    def forward(
        self, batch: PackedBatch, *, slot: str, gradients: bool, hidden: bool = False, top: int = 0
    ) -> PackedOutputs:
        """Run one subforward with the adapters of ``slot``; keeps a graph only when ``gradients``."""
        adapters = self._adapters_of(slot)
        with self._device.activate(), torch.set_grad_enabled(gradients):
            states = self._run_layers(batch, adapters)
            self._device.mark("forward/head/0")
            states = F.rms_norm(states, states.shape[-1:], self._norm, EPSILON)
            result = target_log_probabilities(states, self._head, batch.targets, self._device.mark)
            largest = top_log_probabilities(states, self._head, top) if top else None
        return PackedOutputs(result, states if hidden else None, largest)

    def close(self) -> None:
        """Drop every tensor the model owns; it cannot be used afterwards."""
        self._adapters.clear()
        self._layers.clear()
        del self._embedding, self._norm, self._head

    def _run_layers(self, batch: PackedBatch, adapters: Adapters) -> torch.Tensor:
        geometry = self._geometry
        self._device.mark("forward/embedding")
        states = F.embedding(batch.tokens, self._embedding)
        positions = positions_of(batch, geometry.head_dimension, states.dtype)
        for index in range(geometry.layers):
            self._device.mark(f"forward/layer/{index}")
            states = self._run_layer(index, states, adapters, positions)
            if states.requires_grad:
                hook = _marker(self._device.mark, f"backward/layer/{index}")
                states.register_hook(hook)  # type: ignore[no-untyped-call]
        return states

    def _run_layer(self, index: int, states: torch.Tensor, adapters: Adapters, positions: Positions) -> torch.Tensor:
        run = partial(
            run_layer,
            weights=self._layers[index],
            geometry=self._geometry,
            adapters=adapters,
            name=f"layers.{index}",
            positions=positions,
        )
        if not torch.is_grad_enabled():
            return run(states)
        keep_random_state = adapters.settings.dropout > 0
        result: torch.Tensor = checkpoint(run, states, use_reentrant=False, preserve_rng_state=keep_random_state)
        return result

    def _adapters_of(self, slot: str) -> Adapters:
        if slot not in self._adapters:
            raise InvalidInputError(f"slot {slot!r} does not exist; choose of {', '.join(self._adapters)}")
        return self._adapters[slot]


def _marker(mark: Callable[[str], None], stage: str) -> Callable[[torch.Tensor], None]:
    return lambda _: mark(stage)
