"""Adapters as replicas: each context-parallel rank holds the same, and its gradients are parts of one sum."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch

from trainer_rank.models.context import gather_equal, sum_over_ranks, take_over_first
from trainer_rank.models.protocol import ModelRuntime


class Replicas:
    """What keeps the adapters of a model equal on all ranks of its group; on one rank there is nothing to do.

    The first rank's adapters are the ones that all start from.
    """

    def __init__(self, model: ModelRuntime) -> None:
        self._model = model
        self._group = model.context_group
        if self._group is not None:
            for slot in model.slots:
                take_over_first(list(model.adapter_parameters(slot).values()), self._group)

    @property
    def several(self) -> bool:
        """Whether there is another rank."""
        return self._group is not None

    def sum_gradients(self, slots: Iterable[str]) -> None:
        """Replace each gradient of these slots by the sum over all ranks; every rank must name the same slots."""
        if self._group is not None:
            for slot in slots:
                parameters = self._model.adapter_parameters(slot).values()
                sum_over_ranks([each.grad for each in parameters if each.grad is not None], self._group)

    def digests(self, states: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, tuple[str, ...]]:
        """Return for each slot the SHA-256 of its state on every rank, in rank order; equal while they are replicas.

        ``states``: host tensors by name of each slot, here.
        """
        own = {slot: _digest(state) for slot, state in states.items()}
        if self._group is None:
            return {slot: (digest.hex(),) for slot, digest in own.items()}
        rows = torch.tensor([list(digest) for digest in own.values()], dtype=torch.uint8)
        everywhere = gather_equal(rows.to(self._model.device.torch_device), self._group)
        found = [[bytes(row) for row in each.tolist()] for each in everywhere]
        return {slot: tuple(rows[place].hex() for rows in found) for place, slot in enumerate(own)}


def _digest(state: Mapping[str, torch.Tensor]) -> bytes:
    total = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.digest()
