"""Forecast a plan of several subforwards by composing their tapes and replaying them from a live snapshot.

A probe runs one subforward from its forward over the caller's loss to its backward. A plan interleaves these passes:
all forwards in order, then what the caller does, then the backwards, the last subforward first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainer_rank.admission.budget import Status, Term
from trainer_rank.admission.decide import Coverage, Demand
from trainer_rank.admission.ladder import Plan, Retention
from trainer_rank.allocator.driver import ModelledDriver
from trainer_rank.allocator.rules import LARGE_SEGMENT
from trainer_rank.allocator.snapshot import Snapshot
from trainer_rank.devices.protocol import MemoryInfo
from trainer_rank.features import FEATURES
from trainer_rank.packing import Subforward
from trainer_rank.policies import Policy
from trainer_rank.tapes.forecast import choose_paths
from trainer_rank.tapes.passes import Operation
from trainer_rank.tapes.simulate import simulate, unlimited
from trainer_rank.tapes.tape import Path, Tape

_PHASES = ("forward", "caller", "backward")


class PassKey(NamedTuple):
    """What decides a subforward's order of events: adapters, outputs, and what keeps its graph."""

    adapter_bytes: int
    gradients: bool
    hidden: bool
    retention: Retention


class Sample(NamedTuple):
    """The device at one moment: ordinal of the sample, physical memory in bytes, the allocator's blocks."""

    ordinal: int
    memory: MemoryInfo
    snapshot: Snapshot


@dataclass(frozen=True)
class Recorded:
    """What probes showed of one kind of pass: its tape, and its time as a line in packed tokens (nanoseconds)."""

    tape: Tape
    fixed_ns: int
    token_ns: int


@dataclass(frozen=True)
class Library:
    """Everything recorded on a device so far, and how a subforward is looked up in it.

    ``key`` and ``features`` never depend on how a plan was cut, so that a split cannot change what is looked up.
    """

    recorded: Mapping[PassKey, Recorded]
    key: Callable[[Subforward, Retention], PassKey]
    features: Callable[[Subforward], Mapping[str, int]]


class _Pass(NamedTuple):
    path: Path
    expected: list[int]
    upper: list[int]
    extrapolated: bool


class _Replayed(NamedTuple):
    """Bytes: peaks, and what is allocated once every forward has run; ``stage`` is where allocated peaks."""

    allocated: int
    reserved: int
    retained: int
    stage: str


class PlanForecaster:
    """Forecasts plans from one sample; implements :class:`trainer_rank.admission.planner.Forecaster`."""

    def __init__(self, library: Library, policy: Policy, sample: Sample) -> None:
        self._library = library
        self._policy = policy
        self._sample = sample
        self._allocator = unlimited(sample.snapshot)

    def cost_ns(self, plan: Plan) -> int | None:
        """Forecast the time of a plan from the probes' times; None where one of its passes was not probed."""
        total = 0
        for subforward in plan.subforwards:
            recorded = self._library.recorded.get(self._library.key(subforward, plan.retention))
            if recorded is None:
                return None
            total += recorded.fixed_ns + recorded.token_ns * subforward.packed_tokens
        return total

    def demand(self, plan: Plan) -> Demand:
        """Replay the plan from the sample's snapshot, once as expected and once with every size at its upper end."""
        passes: list[_Pass] = []
        for number, subforward in enumerate(plan.subforwards):
            found = self._pass(subforward, plan.retention)
            if isinstance(found, str):
                return Demand(
                    self._sample.ordinal, Coverage.UNKNOWN, *(None,) * 6, uncovered=(f"subforward {number}: {found}",)
                )
            passes.append(found)
        phases = [list(_phase(phase, passes)) for phase in _PHASES]
        expected = self._replay(phases, [each.expected for each in passes])
        upper = self._replay(phases, [each.upper for each in passes])
        extrapolated = any(each.extrapolated for each in passes)
        return self._weighed(expected, upper, extrapolated, sum(plan.packed_tokens))

    def _weighed(self, expected: _Replayed, upper: _Replayed, extrapolated: bool, tokens: int) -> Demand:
        before = self._allocator
        share = 16 if extrapolated else 64
        allocated, reserved = max(expected.allocated, upper.allocated), max(expected.reserved, upper.reserved)
        margin = (reserved - before.reserved) // share + LARGE_SEGMENT
        caller = tokens * self._policy.caller_bytes_per_token
        required = reserved - before.reserved + margin + caller
        memory = self._sample.memory
        return Demand(
            sample=self._sample.ordinal,
            coverage=Coverage.EXTRAPOLATED if extrapolated else Coverage.COVERED,
            required=required,
            peak_allocated=expected.allocated,
            peak_reserved=expected.reserved,
            bound_allocated=allocated + (allocated - before.allocated) // share + caller,
            bound_reserved=before.reserved + required,
            bound_device_used=memory.total - memory.free + required,
            peak_stage=expected.stage,
            terms=(
                Term("retained graphs", expected.retained - before.allocated, Status.FITTED, "probes"),
                Term("working set", expected.allocated - expected.retained, Status.FITTED, "probes"),
                Term("upper ends of sizes", reserved - expected.reserved, Status.BOUNDED, "rules that fit the probes"),
                Term("forecast margin", margin, Status.BOUNDED, f"1/{share} of the growth and one segment"),
                Term("caller's loss", caller, Status.BOUNDED, f"policy {self._policy.name}"),
            ),
        )

    def _pass(self, subforward: Subforward, retention: Retention) -> _Pass | str:
        key = self._library.key(subforward, retention)
        recorded = self._library.recorded.get(key)
        if recorded is None:
            return f"no probe of {key}"
        features = self._library.features(subforward)
        tape = recorded.tape
        path = choose_paths(tape.parts[0], features)[0]
        expected = [tape.size(each, features) for each in path.allocations]
        upper = [tape.size(each, features, upper=True) for each in path.allocations]
        known, highest = [each for each in expected if each], [each for each in upper if each]
        if len(known) < len(expected) or len(highest) < len(upper):
            return "an allocation has no size here; probe nearer to it"
        return _Pass(path, known, highest, _extrapolated(tape, features))

    def _replay(self, phases: Sequence[Sequence[tuple[int, Operation]]], sizes: Sequence[list[int]]) -> _Replayed:
        driver = self._allocator.driver
        assert isinstance(driver, ModelledDriver)
        allocator = self._allocator.copy(driver.copy())
        flat = [size for each in sizes for size in each]
        starts = [sum(map(len, sizes[:number])) for number in range(len(sizes))]
        handles: dict[int, int] = {}
        allocated, reserved, retained, stage = allocator.allocated, allocator.reserved, allocator.allocated, "start"
        for name, phase in zip(_PHASES, phases, strict=True):
            operations = [each._replace(subject=starts[number] + each.subject) for number, each in phase]
            peaks = simulate(allocator, operations, flat, handles, {})
            if peaks.allocated.size > allocated:
                allocated, stage = peaks.allocated.size, f"{name}/{phase[peaks.allocated.operation][0]}"
            reserved = max(reserved, peaks.reserved.size)
            if name == "forward":
                retained = max(retained, allocator.allocated)
        return _Replayed(allocated, reserved, retained, stage)


def _phase(name: str, passes: Sequence[_Pass]) -> Iterator[tuple[int, Operation]]:
    """Yield the operations of one phase with the number of their subforward, in the order of execution.

    Frees of blocks older than the pass are left out: without them a forecast can only be higher.
    """
    numbers = range(len(passes)) if name != "backward" else reversed(range(len(passes)))
    for number in numbers:
        operations = passes[number].path.operations
        ends = [*(first for first, _ in passes[number].path.stages[1:]), len(operations)]
        for (first, stage), end in zip(passes[number].path.stages, ends, strict=True):
            if stage.split("/")[0] == name:
                yield from ((number, each) for each in operations[first:end] if each.subject >= 0)


def _extrapolated(tape: Tape, features: Mapping[str, int]) -> bool:
    probes = [probe.features for path in tape.parts[0].paths for probe in path.probes]
    return any(
        not min(probe[name] for probe in probes) <= features[name] <= max(probe[name] for probe in probes)
        for name in FEATURES
        if all(name in probe for probe in probes)
    )
