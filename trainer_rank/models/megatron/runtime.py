"""The Megatron model behind the ModelRuntime protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch

from trainer_rank.geometry import Topology
from trainer_rank.models.adapters import AdapterSettings
from trainer_rank.models.context import Rows, share_of
from trainer_rank.models.head import target_log_probabilities, top_log_probabilities
from trainer_rank.models.megatron import block as megatron
from trainer_rank.models.megatron.geometry import HybridGeometry, require_layers, require_supported
from trainer_rank.models.megatron.layout import lay_out, longest_planned
from trainer_rank.models.megatron.slots import AdapterSlots
from trainer_rank.models.protocol import PackedBatch, PackedOutputs

if TYPE_CHECKING:
    from trainer_rank.devices.protocol import Device


_KERNEL_LIBRARIES = ("megatron-core", "transformer_engine", "flash-linear-attention", "triton", "tilelang")


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed as a package"


class _RequireGradient(torch.autograd.Function):
    """Make rows part of the graph so that recomputed layers run backward, without keeping a gradient for them."""

    @staticmethod
    def forward(_context: Any, rows: torch.Tensor, _switch: torch.Tensor) -> torch.Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(_context: Any, *_gradients: torch.Tensor) -> tuple[None, None]:
        return None, None


class MegatronRuntime:
    """Qwen3.6's hybrid geometry on one CUDA device per rank: a frozen BF16 base and named LoRA slots."""

    def __init__(
        self,
        geometry: HybridGeometry,
        device: Device,
        slots: Sequence[str],
        *,
        topology: Topology = Topology(),  # noqa: B008 - frozen
        rank: int = 1,
        alpha: float = 32.0,
        seed: int = 0,
    ) -> None:
        require_layers(geometry)
        require_supported(topology)
        megatron.require_megatron()
        self.geometry, self.topology, self.device = geometry, topology, device
        with device.activate():
            megatron.initialise_parallel(topology, seed)
            self._base: megatron.Base | None = megatron.Base(geometry, topology, seed)
            self._adapters: AdapterSlots | None = AdapterSlots(
                self._base.block, slots, AdapterSettings(rank, alpha), seed, device.mark
            )
            self._switch: torch.Tensor | None = torch.zeros((), device=device.torch_device, requires_grad=True)
        self.slots = tuple(slots)

    @property
    def kernel_settings(self) -> Mapping[str, str]:
        """BF16, full recompute of one layer at a time, and the versions of the libraries whose kernels run."""
        versions = {name: _version(name) for name in _KERNEL_LIBRARIES}
        return {"model": "megatron", "precision": "bfloat16", "recomputation": "full, uniform, one layer"} | versions

    @property
    def shares_prefixes(self) -> bool:
        """No: its kernels know sequences, not trees of them."""
        return False

    def executed_lengths(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """The lengths padded for the context-parallel ranks, and what fills the pack up to the size grid."""
        return lay_out(lengths, self.topology.context, 0).lengths

    @property
    def context_group(self) -> torch.distributed.ProcessGroup | None:
        """Megatron's context-parallel group; None for one rank."""
        if self.topology.context == 1:
            return None
        from megatron.core import parallel_state

        group: torch.distributed.ProcessGroup = parallel_state.get_context_parallel_group()
        return group

    def adapter_parameters(self, slot: str) -> Mapping[str, torch.nn.Parameter]:
        """Trainable parameters of one slot, by stable name."""
        return self._live()[1].parameters_of(slot)

    def forward(
        self, batch: PackedBatch, *, slot: str, gradients: bool, hidden: bool = False, top: int = 0
    ) -> PackedOutputs:
        """Run one subforward with the adapters of ``slot``; outputs are in the caller's row order on every rank."""
        base, adapters = self._live()
        adapters.parameters_of(slot)
        with self.device.activate(), nullcontext() if gradients else torch.no_grad():
            share = self._share(batch)
            rows = self._run_block(base, share, share.local(batch.tokens), slot)
            targets = share.local(batch.targets)
            self.device.mark("forward/head/0")
            chosen = target_log_probabilities(rows, base.head, targets, self.device.mark)
            largest = top_log_probabilities(rows, base.head, top) if top else None
            return PackedOutputs(
                log_probabilities=share.collected(chosen),
                hidden=share.collected(rows) if hidden else None,
                top=largest and (share.collected(largest[0]), share.collected(largest[1])),
            )

    def close(self) -> None:
        """Drop every tensor the model owns; closing it again does nothing."""
        self._base = self._adapters = self._switch = None

    def _live(self) -> tuple[megatron.Base, AdapterSlots]:
        if self._base is None or self._adapters is None:
            raise RuntimeError("this Megatron model is closed; build a new one")
        return self._base, self._adapters

    def _share(self, batch: PackedBatch) -> Rows:
        group = self.context_group
        if group is None:
            return Rows(lay_out(batch.lengths, 1, 0))
        return share_of(lay_out(batch.lengths, group.size(), group.rank()), group, batch.tokens.device)

    def _run_block(self, base: megatron.Base, share: Rows, tokens: torch.Tensor, slot: str) -> torch.Tensor:
        from trainer_rank.models.megatron.packed import slot_packed_sequences

        self.device.mark("forward/embedding")
        embedded = torch.nn.functional.embedding(tokens, base.embedding).unsqueeze(1)
        if torch.is_grad_enabled():
            embedded = _RequireGradient.apply(embedded, self._switch)  # type: ignore[no-untyped-call]
        result: torch.Tensor = base.block(
            hidden_states=embedded,
            attention_mask=None,
            rotary_pos_emb=base.rotary(longest_planned(share.layout), packed_seq=True),
            packed_seq_params=slot_packed_sequences(share.layout, slot, tokens.device),
        )
        return result.squeeze(1)
