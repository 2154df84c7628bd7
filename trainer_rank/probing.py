"""Record tapes from a few small passes of the real model on its own device, leaving no trace in its state.

Every kind of pass is run at the shapes of the policy: once to warm up, once recorded. The last shape first checks what
the others say, then joins them. Weights, generators, gradients and optimizer states stay as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import pairwise
from time import perf_counter_ns
from typing import NamedTuple

import torch

from trainer_rank.admission.budget import Budget
from trainer_rank.admission.decide import Demand
from trainer_rank.admission.ladder import Plan, Retention
from trainer_rank.allocator.trace import Trace
from trainer_rank.devices.protocol import MemoryInfo, Recording
from trainer_rank.devices.steady import record_steady
from trainer_rank.errors import AdmissionUnknown, TapeError
from trainer_rank.events import Announcer
from trainer_rank.execution import PlanRun, in_phases
from trainer_rank.features import ATTENDED_ROWS, LOGICAL_TOKENS, plan_features
from trainer_rank.forecasting import Library, PassKey, PlanForecaster, Recorded, Sample
from trainer_rank.microbatch import RequestOutput
from trainer_rank.models.protocol import ModelRuntime
from trainer_rank.packing import GroupKey, Subforward
from trainer_rank.policies import Policy
from trainer_rank.prefixes import Prefixes
from trainer_rank.randomness import untouched
from trainer_rank.release.libraries import BACKWARD, FORWARD
from trainer_rank.requests import Request, RequestShape
from trainer_rank.tapes import fit
from trainer_rank.tapes.forecast import prepare

Lengths = tuple[int, ...]
LEAST_PROBES = 3
"""Two to fit a line, one to check it."""
_SEED = 7


class _Probe(NamedTuple):
    plan: Plan
    trace: Trace
    nanoseconds: int
    host_bytes: int
    first_pass_bytes: int


class Probes:
    """Records each kind of pass when it is first needed; forecasts plans from what was recorded.

    ``learning`` watches what libraries take in a phase; ``tapes`` are recordings of an earlier process. ``everyone``
    says whether all ranks say yes: ranks that divide a batch among them probe together or not at all.
    """

    def __init__(
        self,
        model: ModelRuntime,
        policy: Policy,
        announcer: Announcer,
        learning: Callable[[str], AbstractContextManager[None]],
        tapes: Mapping[PassKey, Recorded],
        everyone: Callable[[bool], bool] = bool,
    ) -> None:
        self.everyone = everyone
        self._model = model
        self._policy = policy
        self._announcer = announcer
        self._learning = learning
        self._recorded = dict(tapes)
        for each in tapes.values():
            prepare(each.tape)
        self.first_pass_bytes = max((each.first_pass_bytes for each in tapes.values()), default=0)
        self._adapter_bytes = {
            slot: sum(each.numel() * each.element_size() for each in model.adapter_parameters(slot).values())
            for slot in model.slots
        }
        self._generator = torch.Generator().manual_seed(_SEED)

    @property
    def recorded(self) -> Mapping[PassKey, Recorded]:
        """Every kind of pass that can be forecast."""
        return self._recorded

    def forecaster(self, sample: Sample, room: int | None = None, *, figures: bool = False) -> PlanForecaster:
        """Return a forecaster that sees the device as it was in ``sample``; with ``room`` it tells only what fits."""
        return PlanForecaster(self._library(self._recorded), self._policy, sample, room, figures=figures)

    def missing(
        self,
        keys: Iterable[GroupKey],
        retentions: Iterable[Retention],
        again: bool = False,
        sharing: Collection[GroupKey] = (),
    ) -> dict[PassKey, GroupKey]:
        """Return every kind of pass that groups with these keys may need and that was not recorded yet.

        ``again``: those too that were recorded, because what libraries take in them is not known. ``sharing``: the keys
        of groups whose requests share prefixes; their cuts may share none.
        """
        groups = [(key, kept) for key in sorted(keys) for kept in retentions]
        needed = {self._key(Subforward(key, ()), kept): key for key, kept in groups}
        for key, kept in groups:
            if key in sharing:
                needed[self._key(Subforward(key, ()), kept)._replace(shared=True)] = key
        return {pass_key: key for pass_key, key in needed.items() if again or pass_key not in self._recorded}

    def affordable(self, keys: Iterable[GroupKey], budget: Budget, sample: Sample) -> list[Lengths]:
        """Return the probe shapes that fit now: those that keep their graph on the device take the most."""
        forecaster, kinds, available = self.forecaster(sample), list(keys), budget.available

        def fits(key: GroupKey, lengths: Lengths) -> bool:
            retained = self._key(Subforward(key, ()), Retention.DEVICE)
            required = forecaster.demand(self._plan(key, retained, lengths)).required
            return available is not None and required is not None and required <= available

        shapes = self._policy.probe_lengths
        return [lengths for lengths in shapes if self.everyone(all(fits(key, lengths) for key in kinds))]

    def prepare(self, missing: Mapping[PassKey, GroupKey], shapes: Sequence[Lengths] | None = None) -> None:
        """Record these kinds of pass at the policy's shapes, or at some of them; three are needed.

        What the probes left in the cache is returned to the driver.
        """
        for pass_key, key in missing.items():
            self._recorded[pass_key] = recorded = self._record(key, pass_key, shapes or self._policy.probe_lengths)
            prepare(recorded.tape)
        self._model.device.empty_cache()

    def _key(self, subforward: Subforward, retention: Retention) -> PassKey:
        key = subforward.key
        kept = retention if key.gradients else Retention.DEVICE
        return PassKey(self._adapter_bytes[key.slot], key.gradients, key.hidden, kept, subforward.shares)

    def _features(self, subforward: Subforward) -> Mapping[str, int]:
        found = plan_features(
            self._model.executed_lengths(subforward.lengths),
            self._model.geometry,
            self._model.topology,
            output_rows=subforward.packed_tokens,
            adapter_bytes=self._adapter_bytes[subforward.key.slot],
        )
        if subforward.layout is not None or self._model.context_group is not None:
            found[LOGICAL_TOKENS] = subforward.logical_tokens
        if subforward.layout is not None:
            found[ATTENDED_ROWS] = subforward.layout.attended_rows
        return found

    def _library(self, recorded: Mapping[PassKey, Recorded]) -> Library:
        return Library(recorded, self._key, self._features)

    def _record(self, key: GroupKey, pass_key: PassKey, shapes: Sequence[Lengths]) -> Recorded:
        probes: list[_Probe] = []
        with untouched(self._model.device.torch_device), self._kept_gradients(key.slot):
            for lengths in sorted(shapes[:-1], key=sum) + list(shapes[-1:]):
                if self.everyone(not probes or self._fits(key, pass_key, probes, lengths)):
                    probes.append(self._run(self._plan(key, pass_key, lengths)))
        if len(probes) < LEAST_PROBES:
            free = self._model.device.memory_info().free
            raise AdmissionUnknown(
                f"only {len(probes)} probes fit into {free} B free; free memory, or probe smaller shapes"
            )
        checking = probes[-1]
        seen = self._fitted(probes[:-1])
        demand = self._forecast(pass_key, seen, checking)
        residual = _residual_per_million(demand, checking.trace)
        recorded = self._fitted(probes)
        if residual is None or residual > self._policy.residual_per_million:
            demand = self._forecast(pass_key, recorded, checking)
            again = _residual_per_million(demand, checking.trace)
            if again is None or again > self._policy.residual_per_million:
                raise TapeError(
                    f"probes of {pass_key} do not explain each other: residual {again} per million; probe more"
                )
        self._tell(pass_key, probes, residual)
        return recorded

    def _fits(self, key: GroupKey, pass_key: PassKey, probes: Sequence[_Probe], lengths: Lengths) -> bool:
        """Say whether the next probe fits beside the reserve, by what the smaller ones showed."""
        device = self._model.device
        memory, recorded = device.memory_info(), self._fitted(probes)
        forecaster = PlanForecaster(
            self._library({pass_key: recorded}), self._policy, Sample.of(0, memory, device.snapshot())
        )
        required = forecaster.demand(self._plan(key, pass_key, lengths)).required
        return required is not None and required <= memory.free - self._policy.reserve_bytes

    def _run(self, plan: Plan) -> _Probe:
        requests = {shape.index: self._request(shape) for shape in plan.subforwards[0].requests}
        device = self._model.device
        taken: list[tuple[int, int, int]] = []

        def run(recording: Recording) -> None:
            before, begun = device.allocated(), perf_counter_ns()
            held = self._pass(plan, requests, recording.mark)
            device.synchronize()
            taken.append((perf_counter_ns() - begun, held, device.peak_allocated() - before))

        steady = record_steady(device, run, agree=self.everyone)
        features = dict(self._features(plan.subforwards[0])) | {"layers": self._model.geometry.layers}
        trace = steady.trace
        trace = replace(trace, features=features, marks=in_phases(trace.marks), source=_named(plan))
        nanoseconds, held, grown = taken[-1]
        return _Probe(plan, trace, nanoseconds, held, max(0, taken[0][2] - grown))

    def _plan(self, key: GroupKey, pass_key: PassKey, lengths: Sequence[int]) -> Plan:
        if pass_key.shared and len(lengths) == 1:
            lengths = (*lengths, *lengths)
        shapes = tuple(RequestShape(index, each, *key[:2], hidden=key.hidden) for index, each in enumerate(lengths))
        prefixes = _family(lengths) if pass_key.shared else None
        return Plan("probe", (Subforward(key, shapes, prefixes),), pass_key.retention)

    def _pass(self, plan: Plan, requests: Mapping[int, Request], stage: Callable[[str], None]) -> int:
        """Run a pass to its end; returns the bytes that its graph held in host memory."""
        run = PlanRun(self._model, plan, requests, stage)
        with self._model.device.activate():
            with self._learning(FORWARD):
                run.forward()
            held = run.host_bytes
            if plan.subforwards[0].key.gradients:
                with self._learning(BACKWARD):
                    run.backward(_loss(run.outputs.values()))
        return held

    def _request(self, shape: RequestShape) -> Request:
        vocabulary = self._model.geometry.vocabulary
        tokens = torch.randint(0, vocabulary, (shape.length + 1,), generator=self._generator)
        return Request(tokens[:-1], tokens[1:], shape.slot, shape.gradients, hidden=shape.hidden)

    @contextmanager
    def _kept_gradients(self, slot: str) -> Iterator[None]:
        parameters = self._model.adapter_parameters(slot).values()
        kept = [(each, each.grad.clone()) for each in parameters if each.grad is not None]
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, gradient in kept:
                    assert parameter.grad is not None
                    parameter.grad.copy_(gradient)

    def _fitted(self, probes: Sequence[_Probe]) -> Recorded:
        tokens = [sum(each.plan.packed_tokens) for each in probes]
        low, high = (pick(zip(tokens, (each.nanoseconds for each in probes), strict=True)) for pick in (min, max))
        slope = max(0, high[1] - low[1]) // max(1, high[0] - low[0])
        held = max(-(-each.host_bytes // size) for each, size in zip(probes, tokens, strict=True))
        first = max(each.first_pass_bytes for each in probes)
        return Recorded(fit([each.trace for each in probes]), max(0, low[1] - slope * low[0]), slope, held, first)

    def _forecast(self, key: PassKey, recorded: Recorded, probe: _Probe) -> Demand:
        free, total = probe.trace.memory_info or (0, 0)
        sample = Sample.of(0, MemoryInfo(free, total), probe.trace.before)
        return PlanForecaster(self._library({key: recorded}), self._policy, sample).demand(probe.plan)

    def _tell(self, key: PassKey, probes: Sequence[_Probe], residual: int | None) -> None:
        self._announcer.event(
            "probe",
            gradients=key.gradients,
            hidden=key.hidden,
            retention=key.retention.value,
            adapter_bytes=key.adapter_bytes,
            residual_per_million=residual,
            shared=key.shared,
            lengths=[list(each.plan.subforwards[0].lengths) for each in probes],
            peak_allocated=[each.trace.peak_allocated for each in probes],
            peak_reserved=[each.trace.peak_reserved for each in probes],
            nanoseconds=[each.nanoseconds for each in probes],
        )


def _family(lengths: Sequence[int]) -> Prefixes:
    """Let each request share with the one before half of the shorter of the two, and at least one token."""
    shared = (max(1, min(pair) // 2) for pair in pairwise(lengths))
    return Prefixes(tuple(range(len(lengths))), (0, *shared))


def _named(plan: Plan) -> str:
    return f"probe {[request.length for request in plan.subforwards[0].requests]}"


def _loss(outputs: Iterable[RequestOutput]) -> torch.Tensor:
    """Return a loss that uses every output as a caller's would."""
    means = [output.log_probabilities.mean() for output in outputs]
    means += [output.hidden.float().mean() for output in outputs if output.hidden is not None]
    return torch.stack(means).mean()


def _residual_per_million(demand: Demand, trace: Trace) -> int | None:
    """Return the error of the forecast peak, per million of the recorded growth; None when it is unknown."""
    if demand.peak_allocated is None or not trace.peak_allocated:
        return None
    growth = max(1, trace.peak_allocated - trace.before.allocated)
    return abs(demand.peak_allocated - trace.peak_allocated) * 1_000_000 // growth
