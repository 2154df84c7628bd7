"""What a caller hands in: token sequences with targets, slot and options. Torch is never imported here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer_rank.errors import InvalidInputError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Request:
    """One sequence of n tokens.

    ``tokens`` and ``targets``: int64 (n,) on the host, n at least 1; ``targets[i]`` is the token whose
    log-probability is asked for at position i. ``slot`` names the adapter. Requests of one ``group`` are never
    put into different micro-batches. ``hidden`` asks for the last hidden states as well.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    slot: str = "policy"
    gradients: bool = True
    group: str | None = None
    hidden: bool = False


@dataclass(frozen=True)
class RequestShape:
    """What planning needs of a request: its original index, length in tokens, and options; never its tokens."""

    index: int
    length: int
    slot: str = "policy"
    gradients: bool = True
    group: str | None = None
    hidden: bool = False

    def __post_init__(self) -> None:
        if self.length < 1:
            raise InvalidInputError(f"request {self.index} has length {self.length}; give at least one token")


def shapes_of(requests: Sequence[Request], slots: Sequence[str]) -> tuple[RequestShape, ...]:
    """Check requests against the model's ``slots`` and return their shapes, in the caller's order.

    Reads shapes and types only, so that no device is waited for. Raises InvalidInputError naming the request.
    """
    if not requests:
        raise InvalidInputError("no requests were given; give at least one")
    known = frozenset(slots)
    return tuple(_shape_of(index, request, known) for index, request in enumerate(requests))


def _shape_of(index: int, request: Request, slots: frozenset[str]) -> RequestShape:
    for name, tensor in (("tokens", request.tokens), ("targets", request.targets)):
        if tensor.dim() != 1 or str(tensor.dtype) != "torch.int64":
            raise InvalidInputError(
                f"request {index}: {name} are {tensor.dtype} of {tensor.dim()} dimensions; give int64 of one"
            )
        if tensor.device.type != "cpu":
            raise InvalidInputError(f"request {index}: {name} are on {tensor.device}; give host tensors")
    length = request.tokens.shape[0]
    if request.targets.shape[0] != length:
        raise InvalidInputError(
            f"request {index}: {length} tokens but {request.targets.shape[0]} targets; give as many targets as tokens"
        )
    if request.slot not in slots:
        raise InvalidInputError(
            f"request {index}: slot {request.slot!r} does not exist; choose of {', '.join(sorted(slots))}"
        )
    return RequestShape(index, length, request.slot, request.gradients, request.group, request.hidden)
