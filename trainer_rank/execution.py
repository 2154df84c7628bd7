"""Run an admitted plan: forwards in order, outputs handed over detached, backwards one subforward at a time.

Outputs are leaves of the caller's loss. Its gradient is collected there first and then driven through one subforward
after the other, the last one first, so that retained and rerun subforwards meet the same gradients in the same order.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate

import torch

from trainer_rank.admission.ladder import Plan, Retention
from trainer_rank.hostheld import HostStore
from trainer_rank.microbatch import RequestOutput
from trainer_rank.models.context import together
from trainer_rank.models.protocol import ModelRuntime, PackedBatch, PackedOutputs
from trainer_rank.packing import Subforward
from trainer_rank.prefixes import spans
from trainer_rank.randomness import RandomState, capture, restore
from trainer_rank.requests import Request

KEY_BYTES = 16
"""Bytes of a position in :func:`prefix_keys`: its token and its target."""


def prefix_keys(requests: Mapping[int, Request]) -> dict[int, bytes]:
    """Return each request's tokens and targets as bytes: where two begin alike, one row serves both."""
    found = {}
    for index, request in requests.items():
        pairs = torch.stack([request.tokens, request.targets], 1).contiguous()
        found[index] = ctypes.string_at(pairs.data_ptr(), pairs.numel() * pairs.element_size())
    return found


def pack(subforward: Subforward, requests: Mapping[int, Request], device: torch.device) -> PackedBatch:
    """Lay a subforward's requests end to end on the device, or the segments of what they share."""
    pieces = [(index, slice(None)) for index in subforward.indices]
    layout = subforward.layout
    if layout is not None:
        pieces = [(each.owner, slice(each.start, each.start + each.length)) for each in layout.segments]
    boundaries = torch.tensor([0, *accumulate(subforward.lengths)], dtype=torch.int32)
    return PackedBatch(
        tokens=torch.cat([requests[index].tokens[rows] for index, rows in pieces]).to(device, non_blocking=True),
        targets=torch.cat([requests[index].targets[rows] for index, rows in pieces]).to(device, non_blocking=True),
        lengths=subforward.lengths,
        boundaries=boundaries.to(device, non_blocking=True),
        parents=None if layout is None else tuple(segment.parent for segment in layout.segments),
    )


def unpack_rows(subforward: Subforward, device: torch.device) -> torch.Tensor | None:
    """Return, where segments are shared, the packed row of each request's position, int64 (logical tokens,)."""
    layout = subforward.layout
    if layout is None:
        return None
    rows = spans(layout)
    pieces = [torch.arange(*rows[number]) for index in subforward.indices for number in layout.path(index)]
    return torch.cat(pieces).to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class _Leaves:
    """Outputs as the caller sees them: detached from the graph, with gradients of their own."""

    log_probabilities: torch.Tensor
    hidden: torch.Tensor | None

    @classmethod
    def of(cls, outputs: PackedOutputs, gradients: bool) -> _Leaves:
        hidden = outputs.hidden
        return cls(
            outputs.log_probabilities.detach().requires_grad_(gradients),
            None if hidden is None else hidden.detach().requires_grad_(gradients),
        )

    def tensors(self) -> list[torch.Tensor]:
        return [self.log_probabilities] if self.hidden is None else [self.log_probabilities, self.hidden]


class SubforwardRun:
    """One subforward from its forward to its backward."""

    def __init__(
        self, model: ModelRuntime, subforward: Subforward, requests: Mapping[int, Request], retention: Retention
    ) -> None:
        self.subforward = subforward
        self._model = model
        self._requests = requests
        self._retention = retention
        self._graph: PackedOutputs | None = None
        self._leaves: _Leaves | None = None
        self._random: RandomState | None = None
        self._store = HostStore() if retention is Retention.HOST else None

    @property
    def host_bytes(self) -> int:
        """Bytes that its graph holds in host memory."""
        return 0 if self._store is None else self._store.bytes

    def forward(self) -> None:
        """Compute the outputs; keeps the graph only when it is retained on the device."""
        rerun = self._retention is Retention.RERUN and self.subforward.key.gradients
        if rerun:
            self._random = capture(self._model.device.torch_device)
        outputs = self._compute(self.subforward.key.gradients and not rerun)
        self._leaves = _Leaves.of(outputs, self.subforward.key.gradients)
        if self.subforward.key.gradients and not rerun:
            self._graph = outputs

    def outputs(self) -> dict[int, RequestOutput]:
        """Return the outputs by original request index: views of the packed ones, copies where rows are shared."""
        assert self._leaves is not None
        rows = unpack_rows(self.subforward, self._model.device.torch_device)
        lengths = [request.length for request in self.subforward.requests]
        found = []
        for leaf in self._leaves.tensors():
            found.append(torch.split(leaf if rows is None else leaf[rows], lengths))
        return {
            index: RequestOutput(*(parts[place] for parts in found))
            for place, index in enumerate(self.subforward.indices)
        }

    def backward(self) -> None:
        """Drive the gradients that the caller's loss left on the outputs into the adapters, and free the graph."""
        leaves, self._leaves = self._leaves, None
        if leaves is None or not self.subforward.key.gradients:
            return
        gradients = [leaf.grad for leaf in leaves.tensors()]
        for leaf in leaves.tensors():
            leaf.grad = None
        if all(gradient is None for gradient in gradients):
            self._graph = None
            return
        outputs, self._graph = self._graph or self._again(), None
        roots = [outputs.log_probabilities] if outputs.hidden is None else [outputs.log_probabilities, outputs.hidden]
        pairs = [
            (root, grad) for root, grad in zip(roots, gradients, strict=True) if grad is not None and root.requires_grad
        ]
        del leaves, outputs, roots
        if not pairs:  # a slot without adapters
            return
        try:
            torch.autograd.backward([root for root, _ in pairs], [grad for _, grad in pairs])
        except BaseException:
            _drop_queued()
            raise

    def _again(self) -> PackedOutputs:
        """Run the forward once more under the random state of its first run, this time with a graph."""
        assert self._random is not None
        device = self._model.device.torch_device
        present = capture(device)
        restore(self._random, device)
        try:
            return self._compute(gradients=True)
        finally:
            restore(present, device)

    def _compute(self, gradients: bool) -> PackedOutputs:
        key = self.subforward.key
        batch = pack(self.subforward, self._requests, self._model.device.torch_device)
        hooks = self._store.hooks() if self._store is not None and gradients else nullcontext()
        with torch.set_grad_enabled(gradients), hooks:
            return self._model.forward(batch, slot=key.slot, gradients=gradients, hidden=key.hidden)


def _drop_queued() -> None:
    """Have autograd let go of what a failed backward left in this thread's queue, and of the graph that hangs on it.

    It does so when the next backward begins; until then the queue would hold memory that nothing else knows of.
    """
    torch.zeros((), requires_grad=True).backward()  # type: ignore[no-untyped-call]


_OWN_STAGE = re.compile(r"(forward|backward)/subforward/\d+|caller|after|optimizer")


def in_phases(marks: Sequence[tuple[int, str]]) -> tuple[tuple[int, str], ...]:
    """Put a recording's marks under the phase of the plan in which they were set.

    A model marks ``forward/...`` also where a subforward runs again during the backward; there it becomes
    ``backward/forward/...``.
    """
    phase, found = "", []
    for index, stage in marks:
        if _OWN_STAGE.fullmatch(stage):
            phase = stage.partition("/")[0]
        elif phase and stage.partition("/")[0] != phase:
            stage = f"{phase}/{stage}"
        found.append((index, stage))
    return tuple(found)


class PlanRun:
    """A plan in execution. ``stage`` is told the name of each stage before it begins."""

    def __init__(
        self,
        model: ModelRuntime,
        plan: Plan,
        requests: Mapping[int, Request],
        stage: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._stage = stage
        self._group = model.context_group
        self._runs = [
            SubforwardRun(model, each, {index: requests[index] for index in each.indices}, plan.retention)
            for each in plan.subforwards
        ]
        self.training_slots = frozenset(each.key.slot for each in plan.subforwards if each.key.gradients)
        self.outputs: dict[int, RequestOutput] = {}

    def forward(self) -> None:
        """Run every subforward in order and collect the outputs."""
        with together(self._group):
            for number, run in enumerate(self._runs):
                self._stage(f"forward/subforward/{number}")
                run.forward()
        self._stage("caller")
        for run in self._runs:
            self.outputs |= run.outputs()

    def backward(self, loss: torch.Tensor) -> None:
        """Propagate ``loss``, a scalar made from the outputs; the last subforward first; graphs are dropped."""
        loss.backward()  # type: ignore[no-untyped-call]
        with together(self._group):
            while self._runs:
                self._stage(f"backward/subforward/{len(self._runs) - 1}")
                self._runs.pop().backward()
        self._stage("after")

    @property
    def host_bytes(self) -> int:
        """Bytes that graphs hold in host memory now."""
        return sum(run.host_bytes for run in self._runs)

    def drop(self) -> None:
        """Let go of outputs and graphs; whoever keeps the mapping of outputs keeps an empty one."""
        self._runs.clear()
        self.outputs.clear()
