"""Cold admission beside a raw ballast: 14 requests for hidden states, without gradients, are fitted or refused.

The public report admitted such a batch on a card of which a raw driver allocation held 68,451,041,280 B, and died. Here
that much is taken first, then more, past PyTorch's allocator too, as the report's model held it, until as much is free
as the report's admission had to give: 4,652,784,333 B. Then the same with less and less. The batch must run or be
refused each time, and never meet an out of memory.

Parameters: ``scale`` that the reported 172,687 logical tokens are divided by (16), ``levels`` after the report's own
(6), ``most_free`` and ``least_free`` bytes that they leave (640,000,000 and 40,000,000), ``seed`` (593015).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from qualification.errors import ConfigurationError
from qualification.execution.worker import Context
from qualification.records import Ground
from qualification.workloads.driver_memory import DriverMemory
from qualification.workloads.histories import histories, scaled

REQUESTS = 14
LOGICAL = 172_687
OWN_PER_MILLION = 209_906
"""Share of each request that no other has, so that 45,981 of 172,687 rows are packed."""
BALLAST = 68_451_041_280
AVAILABLE = 4_652_784_333
"""Bytes of the report: what a raw driver allocation held, and what its admission had to give."""
SLOT = "policy"


def run(context: Context) -> None:
    """Try the batch at each level of the ballast; on a virtual card each is a fresh one."""
    levels = context.parameter("levels")
    most, least = context.parameter("most_free"), context.parameter("least_free")
    attempt(context, 0, AVAILABLE)
    for level in range(levels):
        attempt(context, 1 + level, most - (most - least) * level // (levels - 1))


def attempt(context: Context, level: int, free: int) -> None:
    """Fill the card until ``free`` bytes are left, then ask for the batch."""
    contract, seed = context.contract, context.parameter("seed")
    subject = contract.construct(
        ground=context.job.ground.value,
        policy=context.job.policy,
        seed=seed,
        slots=(SLOT,),
        index=level if context.job.ground is Ground.REHEARSAL else 0,
        recordings=context.output / f"level-{level}",
        on_event=lambda event: context.emit_event({**event, "level": level}),
    )
    lengths = scaled([LOGICAL // REQUESTS] * REQUESTS, context.parameter("scale"))
    sequences = histories(lengths, OWN_PER_MILLION, subject.vocabulary, torch.Generator().manual_seed(seed))
    batch = [
        contract.request(each[:-1], each[1:], slot=SLOT, gradients=False, group="batch", hidden=True)
        for each in sequences
    ]
    with _held(context.job.ground, subject.device, BALLAST):
        rest = subject.device.memory_info().free - free
        with _held(context.job.ground, subject.device, rest):
            context.emit("ballast", level=level, size=BALLAST, rest=rest, free=free)
            context.emit("answer", level=level, answer=_answer(context, subject, batch))
    context.emit("close", level=level, report=contract.close(subject))


@contextmanager
def _held(ground: Ground, device: Any, size: int) -> Iterator[None]:  # noqa: ANN401 - the subject's own
    """Hold ``size`` bytes of the card past PyTorch's allocator."""
    free = device.memory_info().free
    if not 0 < size < free:
        raise ConfigurationError(f"{device.name} has {free} B free and {size} B are to be held; use a larger card")
    with ExitStack() as held:
        if ground is Ground.REHEARSAL:
            device.take_raw(size)
            held.callback(device.give_back_raw, size)
        else:
            driver = DriverMemory()
            held.callback(driver.give_back, driver.take(size, f"{device.name} refused a ballast of {size} B"))
        yield


def _answer(context: Context, subject: object, batch: list[object]) -> str:
    try:
        rows = 0
        for micro_batch in context.contract.forward(subject, batch):
            rows += sum(output.hidden.shape[0] for output in micro_batch.outputs.values())
    except Exception as error:  # whatever type the failure has, its name is the observation
        return type(error).__name__
    return f"fitted {rows} rows"
