"""Cold admission beside a raw ballast: 14 requests for hidden states, without gradients, are fitted or refused.

The public report admitted such a batch on a card of which a raw driver allocation held 68,451,041,280 B, and died. Here
a virtual card is filled, before anything was ever run on it, until less and less is free; the batch must run or be
refused each time, and never meet an out of memory.

Parameters: ``scale`` that the reported 172,687 logical tokens are divided by (16), ``levels`` of the ballast (6),
``most_free`` and ``least_free`` bytes that it leaves (640,000,000 and 40,000,000), ``seed`` (593015).
"""

from __future__ import annotations

import torch

from qualification.errors import ConfigurationError
from qualification.execution.worker import Context
from qualification.records import Ground
from qualification.workloads.histories import histories, scaled

REQUESTS = 14
LOGICAL = 172_687
OWN_PER_MILLION = 209_906
"""Share of each request that no other has, so that 45,981 of 172,687 rows are packed."""
SLOT = "policy"


def run(context: Context) -> None:
    """Try the batch on a fresh card at each level of the ballast."""
    if context.job.ground is not Ground.REHEARSAL:
        raise ConfigurationError("workload ballast needs a virtual card: it takes driver memory past PyTorch")
    levels = context.parameter("levels")
    most, least = context.parameter("most_free"), context.parameter("least_free")
    for level in range(levels):
        attempt(context, level, most - (most - least) * level // (levels - 1))


def attempt(context: Context, level: int, free: int) -> None:
    """Fill a fresh card until ``free`` bytes are left, then ask for the batch."""
    contract, seed = context.contract, context.parameter("seed")
    subject = contract.construct(
        ground=context.job.ground.value,
        policy=context.job.policy,
        seed=seed,
        slots=(SLOT,),
        index=level,
        recordings=context.output / f"level-{level}",
        on_event=lambda event: context.emit_event({**event, "level": level}),
    )
    lengths = scaled([LOGICAL // REQUESTS] * REQUESTS, context.parameter("scale"))
    sequences = histories(lengths, OWN_PER_MILLION, subject.vocabulary, torch.Generator().manual_seed(seed))
    batch = [
        contract.request(each[:-1], each[1:], slot=SLOT, gradients=False, group="batch", hidden=True)
        for each in sequences
    ]
    ballast = subject.device.memory_info().free - free
    subject.device.take_raw(ballast)
    context.emit("ballast", level=level, size=ballast, free=free)
    context.emit("answer", level=level, answer=_answer(context, subject, batch))
    subject.device.give_back_raw(ballast)
    context.emit("close", level=level, report=contract.close(subject))


def _answer(context: Context, subject: object, batch: list[object]) -> str:
    try:
        rows = 0
        for micro_batch in context.contract.forward(subject, batch):
            rows += sum(output.hidden.shape[0] for output in micro_batch.outputs.values())
    except Exception as error:  # whatever type the failure has, its name is the observation
        return type(error).__name__
    return f"fitted {rows} rows"
