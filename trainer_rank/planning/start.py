"""The memory that a composed plan starts from: a recorded step's start with its cache given back, grown to the target.

Weights, adapters, gradients and optimizer states of layers and slots that the recording lacks become one live block.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer_rank.allocator.rules import whole_granules
from trainer_rank.allocator.snapshot import ACTIVE, INACTIVE, Block, Segment, Snapshot
from trainer_rank.allocator.trace import load_trace
from trainer_rank.planning.assumptions import STATE_BYTES, adapter_parameters
from trainer_rank.planning.target import Target
from trainer_rank.tapes.shipped import RECORDINGS, RecordedStart


@dataclass(frozen=True, eq=False)
class Start:
    """``source`` says which recording it is, and what was added."""

    snapshot: Snapshot
    source: str


def start_of(recorded: RecordedStart, target: Target, slots: int) -> Start:
    """Return the start of a plan on ``target`` with so many ``slots``, each of whose optimizer has stepped."""
    trace = load_trace(RECORDINGS / recorded.recording)
    more = target.geometry.layers - (trace.features or {})["layers"]
    other_slots = STATE_BYTES * adapter_parameters(target) * (slots - 1)
    used = [segment for segment in trace.before.segments if any(block.state != INACTIVE for block in segment.blocks)]
    added = _live(used[-1].address + used[-1].total, more * recorded.layer_bytes + other_slots)
    source = f"{recorded.recording.rpartition('/')[2]}, cache given back"
    if more:
        source += f", and {more} layers of {recorded.layer_bytes} B each ({recorded.source})"
    if slots > 1:
        source += f", and {slots - 1} more slots of {STATE_BYTES} B for each adapter parameter"
    return Start(Snapshot((*used, *added)), source)


def _live(after: int, size: int) -> tuple[Segment, ...]:
    total, address = whole_granules(size), whole_granules(after)
    if not size:
        return ()
    return (Segment(address, total, "large", 0, (Block(address, total, size, ACTIVE),)),)
