"""Recognise a memory failure behind whatever wraps it, and let go of what a failed execution still holds.

By type first, through causes, contexts and exception groups; then by what a library says of its own allocation; then
by evidence: the device's allocator saw an out of memory while the work ran, although no exception names it.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from enum import StrEnum

import torch

_LIBRARY_WORDS = (
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "'out of memory'",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Failed to CUDA malloc",
    "Failed to CUDA host malloc",
)


class FailureKind(StrEnum):
    """What kind of failure ended an execution."""

    OUT_OF_MEMORY = "out_of_memory"
    LIBRARY_OUT_OF_MEMORY = "library_out_of_memory"
    UNNAMED_OUT_OF_MEMORY = "out_of_memory_unnamed"
    OTHER = "other"


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and everything behind it, each once, outermost first.

    Behind it are causes, contexts, members of groups, and what a wrapper keeps among its arguments or attributes.
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        found = waiting.pop(0)
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        waiting += [found.__cause__, found.__context__]
        if isinstance(found, BaseExceptionGroup):
            waiting += found.exceptions
        waiting += [each for each in (*found.args, *vars(found).values()) if isinstance(each, BaseException)]


def failure_kind(error: BaseException, sightings: int) -> FailureKind:
    """Classify a failure; ``sightings`` counts the out-of-memory events of the device while the work ran."""
    everything = list(chain(error))
    if any(isinstance(each, torch.OutOfMemoryError) for each in everything):
        return FailureKind.OUT_OF_MEMORY
    if any(word in str(each) for each in everything for word in _LIBRARY_WORDS):
        return FailureKind.LIBRARY_OUT_OF_MEMORY
    return FailureKind.UNNAMED_OUT_OF_MEMORY if sightings else FailureKind.OTHER


def forget_frames(error: BaseException) -> None:
    """Clear the local variables of every finished frame that the error keeps alive, so that their tensors die."""
    for each in chain(error):
        traceback.clear_frames(each.__traceback__)
