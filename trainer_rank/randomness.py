"""Take and give back the state of the random number generators that a model may draw from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class RandomState:
    """States of PyTorch's host generator and, on a CUDA device, of that device's own: uint8 tensors on the host."""

    host: torch.Tensor
    device: torch.Tensor | None


def capture(device: torch.device) -> RandomState:
    """Return the generators' present states. Host-side bookkeeping only: no device is waited for."""
    own = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return RandomState(torch.get_rng_state(), own)


def restore(state: RandomState, device: torch.device) -> None:
    """Set the generators to ``state``."""
    torch.set_rng_state(state.host)
    if state.device is not None:
        torch.cuda.set_rng_state(state.device, device)


@contextmanager
def untouched(device: torch.device) -> Iterator[None]:
    """Leave the generators as they were before, whatever is drawn inside."""
    state = capture(device)
    try:
        yield
    finally:
        restore(state, device)
