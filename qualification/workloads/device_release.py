"""Two devices in one process; the second is current, with a stream of its own, when the first one's cache is released.

Once for every device of the process, once for the selected device alone. Each time both caches hold unused memory, and
both devices live values and gradients.

Parameters: ``capacity`` of each virtual card (2,600,000,000 B), ``cached`` on each (134,217,728 B), ``seed``.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from typing import Any

import torch

from qualification.execution.worker import Context

SCOPES = ("process", "device")


def run(context: Context) -> None:
    """Release for device 0 while device 1 is current, under both scopes."""
    subjects = [_construct(context, index) for index in range(2)]
    live = [_live(subject, context.parameter("seed")) for subject in subjects]
    for scope in SCOPES:
        for subject in subjects:
            subject.recorder.record(scope)
            torch.empty(context.parameter("cached"), dtype=torch.uint8, device=subject.device.torch_device)
        with ExitStack() as current:
            current.enter_context(subjects[1].device.activate())
            current.enter_context(subjects[1].device.side_stream())
            context.emit("before", scope=scope, place=_place(subjects), live=_digests(live))
            released = context.contract.release(subjects[0], scope)
            context.emit("after", scope=scope, place=_place(subjects), live=_digests(live), **released)
        for subject in subjects:
            subject.recorder.finish()
    del live
    for index, subject in enumerate(subjects):
        context.close(subject, device=index)


def _construct(context: Context, index: int) -> Any:  # noqa: ANN401 - the subject's types are its own
    return context.contract.construct(
        ground=context.job.ground.value,
        policy=context.job.policy,
        seed=context.parameter("seed"),
        slots=("policy",),
        index=index,
        capacity=context.parameter("capacity"),
        recordings=context.output / f"device-{index}",
        on_event=context.emit_event,
    )


def _live(subject: Any, seed: int) -> torch.Tensor:  # noqa: ANN401
    """Return a tensor with a gradient, both on the device."""
    values = torch.randn(1000, 100, generator=torch.Generator().manual_seed(seed))
    tensor = values.to(subject.device.torch_device).requires_grad_()
    (tensor * tensor).sum().backward()  # type: ignore[no-untyped-call]
    return tensor


def _digests(tensors: list[torch.Tensor]) -> list[str]:
    content = [each for tensor in tensors for each in (tensor, tensor.grad) if each is not None]
    return [hashlib.sha256(each.detach().cpu().numpy().tobytes()).hexdigest() for each in content]


def _place(subjects: list[Any]) -> list[int]:
    """Return the current device's index, then the calling thread's stream on each device."""
    kind = subjects[0].device.torch_device.type
    return [torch.empty(1, device=kind).device.index, *(subject.device.current_stream for subject in subjects)]
