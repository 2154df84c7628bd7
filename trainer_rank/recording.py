"""Record whole steps of a model on its own device: forward, the caller's loss, backward, optimizer; stages marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

import torch

from trainer_rank.admission.ladder import Plan, Retention
from trainer_rank.allocator.trace import Trace
from trainer_rank.devices.protocol import Recording
from trainer_rank.devices.steady import Steady, record_steady
from trainer_rank.errors import TapeError
from trainer_rank.execution import PlanRun
from trainer_rank.features import plan_features
from trainer_rank.models.protocol import ModelRuntime
from trainer_rank.optimizer import OptimizerSettings, SlotOptimizer
from trainer_rank.packing import GroupKey, Subforward
from trainer_rank.requests import Request, RequestShape
from trainer_rank.tapes.fit import fit
from trainer_rank.tapes.probing import Shape, candidate_lengths, most_telling

OPTIMIZER = "optimizer"
FEWEST = 3
"""Probes that are recorded before rules are compared: two give a line, the third checks it."""


class StepProbes:
    """Records steps of one adapter slot, planned one after the other until their rules agree.

    ``model`` is trained by it: record before the training, or on a copy.
    """

    def __init__(self, model: ModelRuntime, slot: str = "policy", *, retention: Retention = Retention.DEVICE) -> None:
        self._model = model
        self._slot = slot
        self._retention = retention
        self._optimizer = SlotOptimizer(model.adapter_parameters(slot), OptimizerSettings())
        self._optimizer.prepare_gradients()
        self._generator = torch.Generator().manual_seed(7)

    def shape(self, lengths: Sequence[int]) -> Shape:
        """Return a pack with its plan features."""
        adapters = self._model.adapter_parameters(self._slot).values()
        size = sum(each.numel() * each.element_size() for each in adapters)
        geometry, topology = self._model.geometry, self._model.topology
        return Shape(tuple(lengths), plan_features(lengths, geometry, topology, adapter_bytes=size))

    def record(self, shape: Shape) -> Steady:
        """Record a steady step of ``shape``; TraceError when it does not become steady."""
        shapes = tuple(RequestShape(index, length, self._slot) for index, length in enumerate(shape.lengths))
        plan = Plan("probe", (Subforward(GroupKey(self._slot, True, False), shapes),), self._retention)
        requests = {each.index: self._request(each.length) for each in shapes}
        self._model.device.empty_cache()
        steady = record_steady(self._model.device, lambda recording: self._step(plan, requests, recording))
        named = {
            **shape.features,
            "layers": self._model.geometry.layers,
            "context": self._model.topology.context,
        }
        lengths = "+".join(str(length) for length in shape.lengths)
        return replace(steady, trace=replace(steady.trace, features=named, source=f"{lengths}.json.gz"))

    def record_within(self, seconds: float, largest: int, sequences: int = 8) -> list[Steady]:
        """Record the smallest probes, then always the most telling one, until rules agree or the time is up.

        The largest probe is always among them while there is time: only there does a size show that it stopped growing.
        At least ``FEWEST`` probes are recorded, however long they take. TapeError when probes contradict each other.
        """
        begun = perf_counter()
        left = sorted(map(self.shape, candidate_lengths(largest, sequences)), key=lambda shape: sum(shape.lengths))
        final = left[-1]
        if len(left) < FEWEST:
            raise TapeError(f"only {len(left)} probes of up to {largest} rows; allow more rows")
        found: list[Steady] = []
        longest = 0.0
        while left:
            chosen = self._next([each.trace for each in found], left) or (final if final in left else None)
            if chosen is None or (len(found) >= FEWEST and perf_counter() - begun + longest > seconds):
                break
            left.remove(chosen)
            started = perf_counter()
            found.append(self.record(chosen))
            longest = max(longest, perf_counter() - started)
        return found

    def _next(self, traces: Sequence[Trace], left: Sequence[Shape]) -> Shape | None:
        if len(traces) < FEWEST:
            return left[0]
        return most_telling(fit(traces), left, self._model.topology.context, self._model.geometry.layers)

    def _step(self, plan: Plan, requests: dict[int, Request], recording: Recording) -> None:
        run = PlanRun(self._model, plan, requests, recording.mark)
        with self._model.device.activate():
            run.forward()
            outputs = [each.log_probabilities.mean() for each in run.outputs.values()]
            run.backward(-torch.stack(outputs).mean())
            del outputs
            recording.mark(OPTIMIZER)
            self._optimizer.step()

    def _request(self, length: int) -> Request:
        tokens = torch.randint(0, self._model.geometry.vocabulary, (length + 1,), generator=self._generator)
        return Request(tokens[:-1], tokens[1:], self._slot)
