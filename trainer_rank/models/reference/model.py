"""A small mixture-of-experts transformer in plain torch, the same on the host, the virtual device and CUDA.

Every layer is recomputed in backward; what lives between forward and backward is each layer's input. In a
context-parallel group each rank does this for its own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everyone uses
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from trainer_rank.errors import InvalidInputError
from trainer_rank.geometry import ModelGeometry, Topology
from trainer_rank.models.adapters import Adapters, AdapterSettings
from trainer_rank.models.context import Share, share_of
from trainer_rank.models.head import target_log_probabilities, top_log_probabilities
from trainer_rank.models.layout import lay_out
from trainer_rank.models.protocol import PackedBatch, PackedOutputs
from trainer_rank.models.reference.layer import EPSILON, Positions, positions_of, run_layer
from trainer_rank.models.reference.weights import Source, draw_adapters, draw_layer

if TYPE_CHECKING:
    from trainer_rank.devices.protocol import Device


class ReferenceModel:
    """Implements :class:`trainer_rank.models.protocol.ModelRuntime`; see :func:`build_reference`."""

    def __init__(
        self,
        geometry: ModelGeometry,
        device: Device,
        slots: Sequence[str],
        settings: AdapterSettings,
        source: Source,
        group: ProcessGroup | None = None,
    ) -> None:
        self._geometry = geometry
        self._device = device
        self._group = group
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
        """One process, or as many context-parallel ones as its group has."""
        return Topology() if self._group is None else Topology(context=self._group.size())

    @property
    def context_group(self) -> ProcessGroup | None:
        """The ranks among which rows are divided; None for one rank."""
        return self._group

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
        """On every device, and on one rank."""
        return self._group is None

    def executed_lengths(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """The lengths as they are on one rank; among several each is padded so that all ranks get equal shares."""
        return lay_out(lengths, self.topology.context, 0).lengths

    def adapter_parameters(self, slot: str) -> Mapping[str, torch.nn.Parameter]:
        """Trainable parameters of one slot, by stable name."""
        return self._adapters_of(slot).parameters()

    def forward(
        self, batch: PackedBatch, *, slot: str, gradients: bool, hidden: bool = False, top: int = 0
    ) -> PackedOutputs:
        """Run one subforward with the adapters of ``slot``; keeps a graph only when ``gradients``."""
        adapters = self._adapters_of(slot)
        with self._device.activate(), torch.set_grad_enabled(gradients):
            share = self._share(batch)
            states = self._run_layers(batch, share, adapters)
            self._device.mark("forward/head/0")
            states = F.rms_norm(states, states.shape[-1:], self._norm, EPSILON)
            targets = batch.targets if share is None else share.local(batch.targets)
            result = target_log_probabilities(states, self._head, targets, self._device.mark)
            largest = top_log_probabilities(states, self._head, top) if top else None
            return _collected(PackedOutputs(result, states if hidden else None, largest), share)

    def close(self) -> None:
        """Drop every tensor the model owns; it cannot be used afterwards, and closing it again does nothing."""
        self._adapters.clear()
        self._layers.clear()
        for name in ("_embedding", "_norm", "_head"):
            self.__dict__.pop(name, None)

    def _share(self, batch: PackedBatch) -> Share | None:
        if self._group is None:
            return None
        layout = lay_out(batch.lengths, self._group.size(), self._group.rank())
        return share_of(layout, self._group, batch.tokens.device)

    def _run_layers(self, batch: PackedBatch, share: Share | None, adapters: Adapters) -> torch.Tensor:
        geometry = self._geometry
        self._device.mark("forward/embedding")
        tokens = batch.tokens if share is None else share.local(batch.tokens)
        states = F.embedding(tokens, self._embedding)
        positions = self._positions(batch, share, states.dtype)
        for index in range(geometry.layers):
            self._device.mark(f"forward/layer/{index}")
            states = self._run_layer(index, states, adapters, positions)
            if states.requires_grad:
                hook = _marker(self._device.mark, f"backward/layer/{index}")
                states.register_hook(hook)  # type: ignore[no-untyped-call]
        return states

    def _positions(self, batch: PackedBatch, share: Share | None, dtype: torch.dtype) -> Positions:
        if share is None:
            return positions_of(batch, self._geometry.head_dimension, dtype)
        lengths, device = share.layout.lengths, batch.tokens.device
        boundaries = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)
        padded = PackedBatch(batch.tokens, batch.targets, lengths, boundaries)
        return positions_of(padded, self._geometry.head_dimension, dtype).shared(share)

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


def _collected(outputs: PackedOutputs, share: Share | None) -> PackedOutputs:
    """Return every rank's outputs in the caller's order."""
    if share is None:
        return outputs
    hidden, top = outputs.hidden, outputs.top
    return PackedOutputs(
        share.collected(outputs.log_probabilities),
        None if hidden is None else share.collected(hidden),
        None if top is None else (share.collected(top[0]), share.collected(top[1])),
    )


def _marker(mark: Callable[[str], None], stage: str) -> Callable[[torch.Tensor], None]:
    return lambda _: mark(stage)
