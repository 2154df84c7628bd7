"""Hold what a graph saves between forward and backward in host memory instead of on the device.

What autograd saves of the activations leaves for (pinned) host memory as it is saved, and comes back when its backward
asks for it. Copies are queued on the stream that computes: the host never waits for them. Parameters stay.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_WORTHWHILE = 512
"""Bytes below which a saved tensor stays where it is: the device's allocator hands out no less."""


class _Held(NamedTuple):
    host: torch.Tensor
    device: torch.device


class HostStore:
    """Counts what it holds: ``bytes`` of host memory at most, until the graph that saved them is gone.

    PyTorch takes pinned memory in powers of two, so a tensor may take up to twice its size there.
    """

    def __init__(self) -> None:
        self.bytes = 0

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return the context in which a forward must run for its saved activations to be held here."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Held:
        size = tensor.numel() * tensor.element_size()
        if tensor.is_leaf or not tensor.requires_grad or size < _WORTHWHILE:
            return tensor
        pinned = tensor.device.type == "cuda"
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        host.copy_(tensor.detach(), non_blocking=True)
        self.bytes += 2 * size if pinned else size
        return _Held(host, tensor.device)

    def _unpack(self, held: torch.Tensor | _Held) -> torch.Tensor:
        return held.host.to(held.device, non_blocking=True) if isinstance(held, _Held) else held
