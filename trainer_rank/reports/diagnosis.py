"""Put together what is known of an execution that failed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from trainer_rank.admission.ladder import Plan
from trainer_rank.allocator.rules import round_size, segment_size
from trainer_rank.devices.protocol import Sighting
from trainer_rank.forecasting import PlanForecaster
from trainer_rank.outofmemory import FailureKind
from trainer_rank.packing import Subforward
from trainer_rank.reports.failure import Failure, Revision
from trainer_rank.reports.generated import generated_files
from trainer_rank.reports.memory import summarised
from trainer_rank.reports.watch import Scene, Watch
from trainer_rank.tapes.located import TapeEvent

_SUBFORWARD = re.compile(r"(?:forward|backward)/subforward/(\d+)")
_LAYER = re.compile(r"(?:^|/)layer/(\d+)$")


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
    sighting, sample = scene.sighting, None if forecaster is None else forecaster.sample
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
        stream=scene.stream,
        event=None if forecaster is None else _event(forecaster, plan, scene),
        sampled_before_unwinding=sighting is not None,
        sightings=len(watch.scenes),
        out_of_memory_counted=watch.counted,
        free=scene.free,
        allocated=scene.allocated,
        reserved=scene.reserved,
        cap=scene.cap,
        partial_peak_allocated=peaks.allocated,
        partial_peak_reserved=peaks.reserved,
        before=None if sample is None or not sample.seen else summarised(sample.snapshot),
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
