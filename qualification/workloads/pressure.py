"""Libraries need memory while the cache holds everything: at a backward, at a reduction, and once it was torn down.

After one ordinary step the backward's library memory is given back, as when handles are destroyed between rounds, and
the cache is filled until 0.034734 GB are free. Then (a) the backward, (b) a reduction outside any hand-off, and (c)
that reduction after its communicator was rebuilt each want memory that no allocator statistic shows. On a real card a
ballast narrows it first, and the backward wants a cuBLAS handle of its own; see ``library_demand``.

Parameters: ``capacity`` of the card (2,600,000,000 B), ``left_free`` (34,734,080 B), ``demand`` of each of (a), (b),
(c) beside what the card's own libraries want (8,388,608 B), and of the batch: ``requests`` (2), ``shortest`` (2,200)
and ``longest`` (2,600) tokens, so that no plan allocates less than is left free, ``seed`` and ``frozen``, as for the
workload full_step.
"""

from __future__ import annotations

import torch

from qualification.execution.worker import Context
from qualification.workloads.full_step import SLOTS, policy_loss, ragged_requests
from qualification.workloads.library_demand import BACKWARD, REDUCTION, Libraries, libraries

_SEGMENT = 2 << 20


def run(context: Context) -> None:
    """Make the pressure three times over; every call that got its memory is reported as ``met``."""
    contract, seed = context.contract, context.parameter("seed")
    size = context.parameter("demand")
    subject = contract.construct(
        ground=context.job.ground.value,
        policy=context.job.policy,
        seed=seed,
        slots=SLOTS,
        capacity=context.parameter("capacity"),
        demands=[("backward", BACKWARD, size, "cublas"), ("reduction", REDUCTION, size, "nccl")],
        recordings=context.output,
        on_event=context.emit_event,
    )
    wanted = libraries(context, subject)
    batch = ragged_requests(context, subject.vocabulary, torch.Generator().manual_seed(seed), "batch")
    train(context, subject, batch, "warm", wanted)
    context.emit("torn_down", phase=BACKWARD, size=wanted.tear_down(BACKWARD))
    fill(context, subject, "a")
    train(context, subject, batch, "a", wanted)
    fill(context, subject, "b")
    reduce(context, subject, "b", wanted)
    context.emit("torn_down", phase=REDUCTION, size=wanted.tear_down(REDUCTION))
    fill(context, subject, "c")
    reduce(context, subject, "c", wanted)
    wanted.close()
    context.close(subject)


def fill(context: Context, subject: object, name: str) -> None:
    """Cache in one segment all that is free but ``left_free`` bytes; recorded, with all up to the next step."""
    device = subject.device  # type: ignore[attr-defined]
    subject.recorder.record(f"pressure-{name}")  # type: ignore[attr-defined]
    size = (device.memory_info().free - context.parameter("left_free")) & -_SEGMENT
    torch.empty(max(size, 1), dtype=torch.uint8, device=device.torch_device)
    context.emit("filled", size=size, free=device.memory_info().free, reserved=device.reserved())


def train(context: Context, subject: object, batch: list[object], name: str, wanted: Libraries) -> None:
    """Run one batch; what is free is reported as the loss begins its backward, before any library is called there."""
    device = subject.device  # type: ignore[attr-defined]

    def begin(gradient: torch.Tensor) -> torch.Tensor:
        context.emit("call", name=name, free=device.memory_info().free)
        wanted.meet(BACKWARD)
        return gradient

    for micro_batch in context.contract.forward(subject, batch):
        loss = policy_loss(micro_batch.outputs)
        loss.register_hook(begin)  # type: ignore[no-untyped-call]
        context.contract.backward(subject, micro_batch, loss)
        context.emit("loss", step=micro_batch.step, value=round(float(loss.detach()), 9))
    context.emit("met", name=name)


def reduce(context: Context, subject: object, name: str, wanted: Libraries) -> None:
    """Reach the reduction, which stands for a collective's first call on its communicator."""
    with context.contract.collective(subject, f"reduction {name}"):
        context.emit("call", name=name, free=subject.device.memory_info().free)  # type: ignore[attr-defined]
        wanted.meet(REDUCTION)
    subject.recorder.finish()  # type: ignore[attr-defined]
    context.emit("met", name=name)
