"""What a report says of an execution that failed: where, on what, what was asked for, and what was forecast there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from trainer_rank.tapes.located import TapeEvent


class Revision(NamedTuple):
    """What a slot's adapter is: optimizer steps so far, and the manifest of the checkpoint it was last in, if any."""

    steps: int
    checkpoint: str | None


@dataclass(frozen=True)
class Generated:
    """A file that a compiler generated: its name inside its cache, bytes, and SHA-256."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Failure:
    """How an execution ended. Bytes; None where it was not seen.

    ``stage`` of the plan had begun, and inside it the model's ``part`` and ``layer``; ``requests`` are the original
    indices of its subforward. ``asked`` is what the driver was asked for, ``requested`` the block itself, which would
    have been number ``position`` of the stage, from 0, for ``stream``; ``event`` is what the tapes have there.
    ``free``, ``allocated``, ``reserved``, ``cap`` (what the allocator may reserve) and ``after`` were sampled by the
    out-of-memory observer before unwinding when ``sampled_before_unwinding``, else once the failure had been caught.
    ``before`` is what the forecast began with, where its blocks were read. ``sightings`` counts what the observer saw,
    ``out_of_memory_counted`` what the allocator counted. Peaks are lower bounds. ``generated`` are a compiler's files
    on the stack.
    """

    kind: str
    type: str | None
    stage: str
    part: str | None
    layer: int | None
    subforward: int | None
    requests: tuple[int, ...]
    slot: str | None
    slot_steps: int | None
    slot_checkpoint: str | None
    asked: int | None
    requested: int | None
    position: int
    stream: int
    event: TapeEvent | None
    sampled_before_unwinding: bool
    sightings: int
    out_of_memory_counted: int
    free: int
    allocated: int
    reserved: int
    cap: int | None
    partial_peak_allocated: int
    partial_peak_reserved: int
    before: dict[str, Any] | None
    after: dict[str, Any]
    generated: tuple[Generated, ...]
