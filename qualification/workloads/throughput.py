"""What a policy costs in time: the same batch under the policy and under ``none``, in the order A B B A.

Both arms live in one process, on devices of their own where the card is virtual. Each first trains one batch
unmeasured, so that probes, caches and libraries are there. The launcher's stamps of the events around a measurement are
the measurement; the worker's clock is never asked.

Parameters: ``steps`` per measurement (2), ``requests`` per batch (4), ``shortest`` (24) and ``longest`` (160) tokens
of a request, ``seed`` (593015), ``frozen`` as for the workload full_step.
"""

from __future__ import annotations

from typing import Any

import torch

from qualification.execution.worker import Context
from qualification.records import Ground
from qualification.statistics import MINIMUM_PAIRS, interleaved
from qualification.workloads.full_step import SLOTS, ragged_requests

BASELINE = "none"
ARMS = "AB"


def run(context: Context) -> None:
    """Measure both arms alternately and close them."""
    arms = {
        arm: _construct(context, policy, index)
        for index, (arm, policy) in enumerate(zip(ARMS, (BASELINE, context.job.policy), strict=True))
    }
    generator = torch.Generator().manual_seed(context.parameter("seed"))
    batch = ragged_requests(context, arms["A"].vocabulary, generator, "batch")
    for arm, subject in arms.items():
        context.emit("warm", arm=arm, log_probabilities=[_step(context, subject, batch)])
    for number, arm in enumerate(interleaved(MINIMUM_PAIRS)):
        context.emit("measure", number=number, arm=arm)
        found = [_step(context, arms[arm], batch) for _ in range(context.parameter("steps"))]
        context.emit("measured", number=number, arm=arm, log_probabilities=found)
    for arm, subject in arms.items():
        context.close(subject, arm=arm)


def _construct(context: Context, policy: str, index: int) -> Any:  # noqa: ANN401 - the subject's own type
    return context.contract.construct(
        ground=context.job.ground.value,
        policy=policy,
        seed=context.parameter("seed"),
        slots=SLOTS,
        index=index if context.job.ground is Ground.REHEARSAL else 0,
        on_event=context.emit_event,
    )


def _step(context: Context, subject: Any, batch: list[object]) -> list[float]:  # noqa: ANN401
    """Run one whole update and return each request's mean log-probability, in the batch's order.

    The loss does not depend on how a policy cuts the batch. Reading the values waits for the device, so that nothing
    runs on after the stamp.
    """
    found: dict[int, float] = {}
    for micro_batch in context.contract.forward(subject, batch):
        means = {index: output.log_probabilities.mean() for index, output in micro_batch.outputs.items()}
        signed = [mean if index % 4 < 2 else -mean for index, mean in sorted(means.items())]
        context.contract.backward(subject, micro_batch, torch.stack(signed).sum() / len(batch))
        found |= {index: round(float(mean.detach()), 9) for index, mean in means.items()}
    for report in context.contract.step(subject).values():
        float(report["gradient_norm"].detach())
    return [found[index] for index in range(len(batch))]
