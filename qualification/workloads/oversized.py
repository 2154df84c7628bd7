"""The oversized admission of the public report, scaled down: the smaller plan is found, or the failure is explained.

First the batch of 19 requests meets a card that cannot hold it whole, and runs through. Then all but a little of the
card is held by the caller, the caller allows an oversized plan, and it fails; what the report holds is the evidence.
At last the caller lets go, and a plan of one request is admitted.

Parameters: ``capacity`` of the virtual card (1,500,000,000 B), ``scale`` that the reported lengths are divided by (64),
``left_free`` (4,194,304 B) in the second part, ``seed`` (593015).
"""

from __future__ import annotations

import torch

from qualification.errors import ConfigurationError
from qualification.execution.worker import Context
from qualification.records import Ground
from qualification.workloads.full_step import policy_loss
from qualification.workloads.histories import LENGTHS, histories, scaled

SLOT = "policy"
FORCED = "forced"
"""What the caller calls the step that fails."""
OWN_PER_MILLION = 271_632
"""Share of each history that no other has, so that 359,965 of 1,073,093 rows are packed."""


def run(context: Context) -> None:
    """Run the three parts; every step is recorded."""
    if context.job.ground is not Ground.REHEARSAL:
        raise ConfigurationError("workload oversized needs a virtual card: it makes a plan fail on purpose")
    contract, seed = context.contract, context.parameter("seed")
    subject = contract.construct(
        ground=context.job.ground.value,
        policy=context.job.policy,
        seed=seed,
        slots=(SLOT,),
        capacity=context.parameter("capacity"),
        recordings=context.output,
        on_event=context.emit_event,
    )
    lengths = scaled(LENGTHS, context.parameter("scale"))
    sequences = histories(lengths, OWN_PER_MILLION, subject.vocabulary, torch.Generator().manual_seed(seed))
    batch = [contract.request(each[:-1], each[1:], slot=SLOT, group="batch") for each in sequences]
    context.emit("batch", requests=len(batch), logical=sum(lengths))
    train(context, subject, batch, "smaller")
    fail(context, subject, batch)
    train(context, subject, batch[-1:], "after")
    context.emit("close", report=contract.close(subject))


def train(context: Context, subject: object, batch: list[object], name: str) -> None:
    """Run a batch through to its gradients."""
    for micro_batch in context.contract.forward(subject, batch):
        loss = policy_loss(micro_batch.outputs)
        context.contract.backward(subject, micro_batch, loss)
        context.emit("loss", step=micro_batch.step, value=round(float(loss.detach()), 9))
    context.emit("part", name=name)


def fail(context: Context, subject: object, batch: list[object]) -> None:
    """Let the caller hold the card, allow oversize, and note how the plan failed."""
    device = subject.device  # type: ignore[attr-defined]
    device.empty_cache()
    held = device.memory_info().free - context.parameter("left_free")
    ballast = torch.empty(max(held, 1), dtype=torch.uint8, device=device.torch_device)
    before = device.allocated()
    try:
        next(context.contract.forward(subject, batch, allow_oversize=True, caller_step=FORCED))
    except Exception as error:  # whatever type the failure has, it is the observation
        context.emit("failed", type=type(error).__name__, notes=list(getattr(error, "__notes__", [])))
    context.emit("part", name="oversized", allocated=device.allocated(), before=before)
    del ballast
    device.empty_cache()
