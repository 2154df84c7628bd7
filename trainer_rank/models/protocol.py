"""What TrainerRank asks of a model; implemented by the reference model and by Megatron."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from trainer_rank.devices.protocol import Device
    from trainer_rank.geometry import ModelGeometry, Topology


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Sequences packed end to end on one device. N packed tokens, S sequences.

    ``tokens`` and ``targets``: int64 (N,); ``lengths``: the S sequences' lengths, host integers so that no kernel
    launch waits for the device; ``boundaries``: int32 (S + 1,) their cumulative sums on the device, first 0, last N.
    ``parents``: where prefixes are shared, for each sequence the earlier one that it continues, -1 for none.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    lengths: tuple[int, ...]
    boundaries: torch.Tensor
    parents: tuple[int, ...] | None = None

    @property
    def longest(self) -> int:
        """The longest sequence."""
        return max(self.lengths)


@dataclass(frozen=True, eq=False)
class PackedOutputs:
    """Results of one subforward, N rows.

    ``log_probabilities``: float32 (N,) of each target; ``hidden``: (N, H) where asked for; ``top``: the largest
    log-probabilities, float32 (N, k), and their token ids, int64 (N, k), without gradients, where asked for.
    """

    log_probabilities: torch.Tensor
    hidden: torch.Tensor | None = None
    top: tuple[torch.Tensor, torch.Tensor] | None = None


class ModelRuntime(Protocol):
    """A model on one device, with a frozen base and named LoRA slots."""

    @property
    def geometry(self) -> ModelGeometry:
        """Sizes of the model."""

    @property
    def topology(self) -> Topology:
        """Parallel sizes it was built for."""

    @property
    def context_group(self) -> ProcessGroup | None:
        """The ranks that divide each batch's rows among them: adapters are replicas, their gradients parts of one sum.

        None for a model on one rank.
        """

    @property
    def device(self) -> Device:
        """Where it lives."""

    @property
    def kernel_settings(self) -> Mapping[str, str]:
        """What beside sizes and topology decides which kernels run and what they allocate; tapes are held against it.

        Precision, dropout, recomputation, versions of kernel libraries.
        """

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the adapter slots, in order of creation."""

    @property
    def shares_prefixes(self) -> bool:
        """Whether a batch may hold sequences that continue others (``PackedBatch.parents``)."""

    def executed_lengths(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """The sequences that kernels see for requests of ``lengths``, padding included; memory follows these."""

    def adapter_parameters(self, slot: str) -> Mapping[str, torch.nn.Parameter]:
        """Trainable parameters of one slot, by stable name."""

    def forward(
        self, batch: PackedBatch, *, slot: str, gradients: bool, hidden: bool = False, top: int = 0
    ) -> PackedOutputs:
        """Run one subforward with the adapters of ``slot``; keeps a graph only when ``gradients``.

        ``hidden`` asks for the last hidden states, ``top`` for that many of the largest log-probabilities of each row.
        """

    def close(self) -> None:
        """Drop every tensor the model owns; closing it again does nothing."""
