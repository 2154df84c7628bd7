"""What a report says of an execution that failed: where, on what, what was asked for, and what was forecast there."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainer_rank.admission.ladder import Plan
from trainer_rank.allocator.rules import round_size, segment_size
from trainer_rank.devices.protocol import Sighting
from trainer_rank.forecasting import PlanForecaster
from trainer_rank.outofmemory import FailureKind
from trainer_rank.packing import Subforward
from trainer_rank.reports.generated import Generated, generated_files
from trainer_rank.reports.memory import summarised
from trainer_rank.reports.watch import Scene, Watch
from trainer_rank.tapes.located import TapeEvent

_SUBFORWARD = re.compile(r"(?:forward|backward)/subforward/(\d+)")
_LAYER = re.compile(r"(?:^|/)layer/(\d+)$")


class Revision(NamedTuple):
    """What a slot's adapter is: optimizer steps so far, and the manifest of the checkpoint it was last in, if any."""

    steps: int
    checkpoint: str | None


@dataclass(frozen=True)
class Failure:
    """How an execution ended. Bytes; None where it was not seen.

    ``stage`` of the plan had begun, and inside it the model's ``part`` and ``layer``; ``requests`` are the original
    indices of its subforward. ``asked`` is what the driver was asked for, ``requested`` the block itself, which would
    have been number ``position`` of the stage, from 0; ``event`` is what the tapes have there. ``free``, ``allocated``,
    ``reserved`` and ``after`` were sampled by the out-of-memory observer before unwinding when
    ``sampled_before_unwinding``, else once the failure had been caught. ``before`` is what the forecast began with.
    ``sightings`` counts what the observer saw, ``out_of_memory_counted`` what the allocator counted. Peaks are lower
    bounds. ``generated`` are a compiler's files on the stack.
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
    event: TapeEvent | None
    sampled_before_unwinding: bool
    sightings: int
    out_of_memory_counted: int
    free: int
    allocated: int
    reserved: int
    partial_peak_allocated: int
    partial_peak_reserved: int
    before: dict[str, Any] | None
    after: dict[str, Any]
    generated: tuple[Generated, ...]


class Peaks(NamedTuple):
    """The highest figures that a device had reached, bytes."""

    allocated: int
    reserved: int


def describe_failure(
    kind: FailureKind,
    error: BaseException | None,
    plan: Plan,
    forecaster: PlanForecaster | None,
    watch: Watch,
    revision: Callable[[str], Revision],
    peaks: Peaks,
) -> Failure:
    """Put together what is known of a failure. ``error`` is None where the caller kept it to itself."""
    scene = watch.scene()
    number, subforward = failing_subforward(plan, scene.stage) or (None, None)
    slot = None if subforward is None else subforward.key.slot
    steps, checkpoint = (None, None) if slot is None else revision(slot)
    layer = None if scene.part is None else _LAYER.search(scene.part)
    sighting = scene.sighting
    return Failure(
        kind=kind.value,
        type=None if error is None else type(error).__name__,
        stage=scene.stage,
        part=scene.part,
        layer=None if layer is None else int(layer.group(1)),
        subforward=number,
        requests=() if subforward is None else subforward.indices,
        slot=slot,
        slot_steps=steps,
        slot_checkpoint=checkpoint,
        asked=None if sighting is None else sighting.asked,
        requested=None if sighting is None else sighting.requested,
        position=scene.position,
        event=None if forecaster is None else _event(forecaster, plan, scene),
        sampled_before_unwinding=sighting is not None,
        sightings=len(watch.scenes),
        out_of_memory_counted=watch.counted,
        free=scene.free,
        allocated=scene.allocated,
        reserved=scene.reserved,
        partial_peak_allocated=peaks.allocated,
        partial_peak_reserved=peaks.reserved,
        before=None if forecaster is None else summarised(forecaster.sample.snapshot),
        after=summarised(scene.snapshot),
        generated=() if error is None else generated_files(error),
    )


def failing_subforward(plan: Plan, stage: str) -> tuple[int, Subforward] | None:
    """Return the subforward that a stage of a plan's execution runs, with its number."""
    found = _SUBFORWARD.fullmatch(stage)
    return None if found is None else (int(found.group(1)), plan.subforwards[int(found.group(1))])


def _event(forecaster: PlanForecaster, plan: Plan, scene: Scene) -> TapeEvent | None:
    sighting = scene.sighting

    def same(size: int) -> bool:
        return sighting is not None and _is_size(size, sighting)

    return forecaster.locate(plan, scene.stage, scene.position, same)


def _is_size(size: int, sighting: Sighting) -> bool:
    """Say whether a forecast size is the request's; a real card tells only the segments that it would have taken."""
    if sighting.requested is not None:
        return size == sighting.requested
    return segment_size(round_size(size)) == sighting.asked
