"""Forecast a plan of several subforwards from the tapes that were recorded on its device, and weigh it in bytes.

A probe runs one subforward from its forward over the caller's loss to its backward. A plan interleaves these passes:
all forwards in order, then what the caller does, then the backwards, the last subforward first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from trainer_rank.admission.budget import Status, Term
from trainer_rank.admission.decide import Coverage, Demand
from trainer_rank.admission.ladder import Plan, Retention
from trainer_rank.allocator.snapshot import Snapshot
from trainer_rank.devices.protocol import MemoryInfo
from trainer_rank.packing import Subforward
from trainer_rank.policies import Policy
from trainer_rank.tapes import Forecast, Tape
from trainer_rank.tapes.compose import PlannedPass, Turn
from trainer_rank.tapes.forecast import forecast_plan, margins
from trainer_rank.tapes.limits import Limits, find_limits
from trainer_rank.tapes.located import TapeEvent, locate

FORWARD, CALLER, BACKWARD = "forward", "caller", "backward"
PHASES = (FORWARD, CALLER, BACKWARD)
"""Phases of a pass, as its recording marks them. One without gradients was recorded without a backward."""


class PassKey(NamedTuple):
    """What decides a subforward's order of events: adapters, outputs, what keeps its graph, and shared prefixes."""

    adapter_bytes: int
    gradients: bool
    hidden: bool
    retention: Retention
    shared: bool = False


@dataclass(frozen=True)
class Sample:
    """The device at one moment: ordinal of the sample, physical memory, the allocator's bytes and its blocks.

    ``look`` reads the blocks when they are first asked for, before anything more is allocated or freed.
    """

    ordinal: int
    memory: MemoryInfo
    allocated: int
    reserved: int
    look: Callable[[], Snapshot]

    @classmethod
    def of(cls, ordinal: int, memory: MemoryInfo, snapshot: Snapshot) -> Sample:
        """Return the sample of a device with these blocks."""
        return cls(ordinal, memory, snapshot.allocated, snapshot.reserved, lambda: snapshot)

    @cached_property
    def snapshot(self) -> Snapshot:
        """The allocator's blocks."""
        return _known(self.look())

    @property
    def seen(self) -> bool:
        """Whether the blocks were read while they were as they are in the sample."""
        return "snapshot" in self.__dict__


@lru_cache(maxsize=16)
def _known(snapshot: Snapshot) -> Snapshot:
    """Return the first snapshot that was equal: what was worked out from it is remembered, and is the same again."""
    return snapshot


@dataclass(frozen=True)
class Recorded:
    """What probes showed of one kind of pass: its tape, its time as a line in packed tokens (nanoseconds).

    ``host_per_token``: the most host memory that a probe's graph held, bytes per packed token. ``first_pass_bytes``:
    how much more the first pass allocated than those after it, in workspaces that stay and in tuning.
    """

    tape: Tape
    fixed_ns: int
    token_ns: int
    host_per_token: int = 0
    first_pass_bytes: int = 0


@dataclass(frozen=True)
class Library:
    """Everything recorded on a device so far, and how a subforward is looked up in it.

    ``key`` and ``features`` never depend on how a plan was cut, so that a split cannot change what is looked up.
    """

    recorded: Mapping[PassKey, Recorded]
    key: Callable[[Subforward, Retention], PassKey]
    features: Callable[[Subforward], Mapping[str, int]]


class PlanForecaster:
    """Forecasts plans from one sample; implements :class:`trainer_rank.admission.planner.Forecaster`.

    ``room``: bytes that a plan may take. Whether it fits there is then all that is asked: what limits alone can tell is
    not replayed, nor replayed a second time what fits, or does not, with every margin. ``figures``: replay it once all
    the same, for its exact peaks.
    """

    def __init__(
        self, library: Library, policy: Policy, sample: Sample, room: int | None = None, *, figures: bool = False
    ) -> None:
        self._library = library
        self._policy = policy
        self.sample = sample
        self._room = room
        self._figures = figures

    def cost_ns(self, plan: Plan) -> int | None:
        """Forecast the time of a plan from the probes' times; None where one of its passes was not probed."""
        recorded = self._recorded(plan)
        if recorded is None:
            return None
        pairs = zip(recorded, plan.subforwards, strict=True)
        return sum(each.fixed_ns + each.token_ns * subforward.packed_tokens for each, subforward in pairs)

    def least(self, plan: Plan) -> int | None:
        """Return what is live at the plan's peak, beyond what is reserved; None where a pass was not probed."""
        recorded = self._recorded(plan)
        limits = None if recorded is None else find_limits(self._passes(plan, recorded))
        return None if limits is None else self._taken(limits, beyond=False)

    def _taken(self, limits: Limits, beyond: bool) -> int:
        """Return what is live beyond what is reserved; ``beyond``: with a margin where the plan lies outside probes."""
        taken = max(0, self.sample.allocated + limits.allocated - self.sample.reserved)
        taken += margins(0, taken, extrapolated=True).reserved if beyond else 0
        return taken if self._policy.counts_cached else max(taken, limits.allocated)

    def demand(self, plan: Plan) -> Demand:
        """Forecast a plan's memory: by its limits where they decide, else by replaying its tapes from the sample."""
        recorded = self._recorded(plan)
        if recorded is None:
            keys = enumerate(self._library.key(each, plan.retention) for each in plan.subforwards)
            number, key = next((number, key) for number, key in keys if key not in self._library.recorded)
            return self._unknown(f"subforward {number}: no probe of {key}")
        pairs = zip(recorded, plan.subforwards, strict=True)
        host = sum(each.host_per_token * subforward.packed_tokens for each, subforward in pairs)
        order = turns(plan)
        callers = ((place, plan.subforwards[each.number]) for place, each in enumerate(order) if each.phase == CALLER)
        held = {place: size for place, subforward in callers if (size := self._caller(subforward))}
        passes = self._passes(plan, recorded)
        room = self._room
        limits = None if room is None else find_limits(passes, held.values(), PHASES)
        if limits is not None and not self._figures and (spared := self._spared(limits, host)) is not None:
            return spared
        most = limits.reserved if limits is not None and room is not None and limits.reserved <= room else None
        room = room if self._policy.counts_cached else None
        found = forecast_plan(passes, order, self.sample.snapshot, held=held, room=room, most=most)
        if found.expected is None or found.bound is None:
            return self._unknown(*found.uncovered)
        return self._weighed(found, sum(held.values()), host)

    def _caller(self, subforward: Subforward) -> int:
        return subforward.logical_tokens * self._policy.caller_bytes_per_token

    def locate(self, plan: Plan, stage: str, position: int, same: Callable[[int], bool]) -> TapeEvent | None:
        """Return the tapes' event nearest to allocation number ``position`` of a stage of a plan's execution, from 0.

        ``same`` says whether a forecast size is that allocation's own. None where no tape covers the plan or the stage.
        Where the sample's blocks were never read, what is reserved there is not known.
        """
        recorded = self._recorded(plan)
        if recorded is None:
            return None
        sample = self.sample
        blocks = sample.snapshot if sample.seen else Snapshot()
        found = locate(self._passes(plan, recorded), turns(plan), blocks, turns_of(plan, stage), position, same)
        if found is None or sample.seen:
            return found
        return replace(found, allocated=sample.allocated + found.allocated, reserved=None)

    def _recorded(self, plan: Plan) -> list[Recorded] | None:
        """Return what was recorded of each subforward's kind of pass; None where one was not probed."""
        found = [self._library.recorded.get(self._library.key(each, plan.retention)) for each in plan.subforwards]
        known = [each for each in found if each is not None]
        return known if len(known) == len(found) else None

    def _passes(self, plan: Plan, recorded: Sequence[Recorded]) -> list[PlannedPass]:
        pairs = zip(recorded, plan.subforwards, strict=True)
        return [PlannedPass(each.tape, self._library.features(subforward)) for each, subforward in pairs]

    def _unknown(self, *uncovered: str) -> Demand:
        return Demand(self.sample.ordinal, Coverage.UNKNOWN, *(None,) * 6, uncovered=uncovered)

    def _spared(self, limits: Limits, host: int) -> Demand | None:
        """Return the demand of a plan whose limits tell whether it fits; None where a replay must."""
        sample, memory = self.sample, self.sample.memory
        assert self._room is not None
        least, most = self._taken(limits, limits.extrapolated), limits.reserved
        if least <= self._room < most:
            return None
        fits = most <= self._room
        why = "not replayed: it fits even if no block serves another size" if fits else "not replayed: already too much"
        return Demand(
            sample=sample.ordinal,
            coverage=Coverage.EXTRAPOLATED if limits.extrapolated else Coverage.COVERED,
            required=most if fits else least,
            peak_allocated=sample.allocated + limits.allocated,
            peak_reserved=None,
            bound_allocated=sample.allocated + most if fits else None,
            bound_reserved=sample.reserved + most if fits else None,
            bound_device_used=memory.total - memory.free + most if fits else None,
            host=host,
            terms=(
                Term("live at once", limits.allocated, Status.FITTED, "probes on this device"),
                Term("limit beside", max(0, most - limits.allocated) if fits else 0, Status.BOUNDED, why),
            ),
        )

    def _weighed(self, found: Forecast, caller: int, host: int) -> Demand:
        expected, bound, memory = found.expected, found.bound, self.sample.memory
        assert expected is not None and bound is not None
        allocated, reserved = self.sample.allocated, self.sample.reserved
        retained = max((each.left for each in found.turns if each.turn.phase == FORWARD), default=allocated)
        growth = bound.reserved - reserved
        required = growth if self._policy.counts_cached else max(growth, bound.allocated - allocated)
        return Demand(
            sample=self.sample.ordinal,
            coverage=Coverage(found.status.value),
            required=required,
            peak_allocated=expected.allocated,
            peak_reserved=expected.reserved,
            bound_allocated=bound.allocated,
            bound_reserved=bound.reserved,
            bound_device_used=memory.total - memory.free + growth,
            peak_stage=found.stage,
            host=host,
            terms=(
                Term("retained graphs", max(0, retained - allocated), Status.FITTED, "probes on this device"),
                Term("working set", max(0, expected.allocated - retained), Status.FITTED, "probes on this device"),
                Term(
                    "forecast margin", bound.reserved - expected.reserved, Status.BOUNDED, "what the probes leave open"
                ),
                Term("caller's loss", caller, Status.BOUNDED, f"policy {self._policy.name}"),
            ),
        )


def turns(plan: Plan) -> list[Turn]:
    """Return the order of a plan's phases: forwards, the caller, then backwards, the last subforward first."""
    numbers = range(len(plan.subforwards))
    training = [number for number in numbers if plan.subforwards[number].key.gradients]
    return [
        *(Turn(number, FORWARD) for number in numbers),
        *(Turn(number, CALLER) for number in numbers),
        *(Turn(number, BACKWARD) for number in reversed(training)),
    ]


def turns_of(plan: Plan, stage: str) -> list[int]:
    """Return the places, in the order of :func:`turns`, of what an execution runs in ``stage``."""
    phase, _, rest = stage.partition("/")
    number = int(rest.rpartition("/")[2]) if rest else None
    return [place for place, turn in enumerate(turns(plan)) if turn.phase == phase and number in (None, turn.number)]
