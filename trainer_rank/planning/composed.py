"""Forecast plans by replaying composed passes from a modelled start, where tapes cover every stage. Pure.

The envelope of each pass tells at once how much the plan allocates at least. What exceeds the budget by that and its
margin is not replayed; of what remains, all phases are laid out in the plan's order and replayed through the allocator
model.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from trainer_rank.admission.budget import Status, Term
from trainer_rank.admission.decide import Coverage, Demand
from trainer_rank.admission.ladder import Plan
from trainer_rank.errors import TapeError
from trainer_rank.features import CHUNKS_64, LONGEST_SEQUENCE, OUTPUT_ROWS, PACKED_TOKENS, SEQUENCES, plan_features
from trainer_rank.forecasting import FORWARD, turns
from trainer_rank.geometry import Topology
from trainer_rank.models.megatron.grid import padded_tokens
from trainer_rank.models.megatron.layout import lay_out
from trainer_rank.packing import Subforward
from trainer_rank.planning.assumptions import adapter_parameters
from trainer_rank.planning.choose_tape import Shelf
from trainer_rank.planning.peaks import SAMPLE, SubforwardPeaks, unknown
from trainer_rank.planning.start import Start
from trainer_rank.planning.target import Target
from trainer_rank.tapes.compose import PlannedPass, Turn, phase_operations
from trainer_rank.tapes.counts import counted
from trainer_rank.tapes.envelope import Envelope
from trainer_rank.tapes.forecast import Figures, Forecast, forecast_plan, margins
from trainer_rank.tapes.passes import Action
from trainer_rank.tapes.paths import candidates, find_part
from trainer_rank.tapes.same import Same
from trainer_rank.tapes.tape import Path, Tape

REPLAYED = 16
"""Passes of one plan that are replayed, the largest ones; what the others retain is added."""
EXACT = 64
"""Requests in a batch up to which every pass is priced at its own features."""
AFTER, OPTIMIZER = "after", "optimizer"


class Outline(NamedTuple):
    """One pass by its envelope, in bytes: the most that it allocates, and what its forward leaves."""

    features: dict[str, int]
    growth: int
    left: int


@dataclass(frozen=True)
class Replayed:
    """A replayed plan: ``numbers`` are its replayed subforwards in order, ``rest`` bytes what the others retain."""

    forecast: Forecast
    numbers: tuple[int, ...]
    rest: int


class ComposedForecaster:
    """Implements :class:`trainer_rank.admission.planner.Forecaster` for one target, without a device.

    ``available``: bytes beyond which a plan is refused anyway. ``requests``: how many the whole batch has; of more than
    ``EXACT``, passes are priced as if padding were output and counts rounded up, so that alike ones are priced once.
    """

    def __init__(self, shelf: Shelf, target: Target, start: Start, available: int, caller: int, requests: int) -> None:
        self._shelf = shelf
        self._target = target
        self._start = start
        self._low = Figures(start.snapshot.allocated, start.snapshot.reserved, None)
        self._available = available
        self._caller = caller
        self._coarse = requests > EXACT
        self._made: dict[tuple[object, ...], Replayed] = {}
        self._known: dict[tuple[object, ...], Outline] = {}

    def cost_ns(self, plan: Plan) -> int | None:  # noqa: ARG002 - the protocol's signature
        """No time was recorded with these tapes; the ladder's own order stands."""
        return None

    def least(self, plan: Plan) -> int | None:
        """Return what the envelopes of the passes say, with a margin; None where no tape covers one."""
        try:
            return self._floor(plan, self._outlines(plan)) + self._caller * sum(plan.packed_tokens)
        except TapeError:
            return None

    def _floor(self, plan: Plan, outlines: list[Outline]) -> int:
        floor, extrapolated = max(top for _, top in _tops(outlines)), self._extrapolated(plan)
        return floor + margins(floor, floor, extrapolated, exact=not extrapolated).reserved

    def demand(self, plan: Plan) -> Demand:
        """Forecast a plan: by the envelope where that already exceeds the budget, else by a replay."""
        try:
            outlines = self._outlines(plan)
        except TapeError as error:
            return unknown((str(error),))
        floor, caller = self._floor(plan, outlines), self._caller * sum(plan.packed_tokens)
        if floor + caller > self._available:
            return self._floored(floor, caller)
        made = self._replay(plan, outlines, caller)
        if made.forecast.expected is None:
            return unknown(made.forecast.uncovered)
        return self._weighed(made, caller)

    def _extrapolated(self, plan: Plan) -> bool:
        """Tell whether layers are repeated beyond those recorded; then every forecast of the plan is extrapolated."""
        return bool(find_part(self._shelf.of(plan.retention), self._target.context, self._target.geometry.layers)[1])

    def peaks(self, plan: Plan, chosen: bool) -> list[SubforwardPeaks]:  # noqa: ARG002 - as of every forecaster
        """Return each subforward's own peaks within the plan; reserved only where it was replayed."""
        try:
            outlines = self._outlines(plan)
        except TapeError as error:
            return [SubforwardPeaks(notes=(str(error),))] * len(plan.subforwards)
        made = self._made.get(self._key(plan, outlines))
        low = self._low.allocated
        if made is None or made.forecast.expected is None:
            note = "not replayed: allocated alone exceeds what is free"
            return [SubforwardPeaks(low + top, notes=(note,)) for _, top in _tops(outlines)]
        return [self._own(made, number, low + top) for number, top in _tops(outlines)]

    def _own(self, made: Replayed, number: int, allocated: int) -> SubforwardPeaks:
        found = made.forecast
        assert found.expected is not None and found.bound is not None and found.slack is not None
        if number not in made.numbers:
            most = found.expected.reserved + made.rest
            bound = found.bound.allocated + made.rest, found.bound.reserved + made.rest
            note = f"one of the smaller passes: reserved is that of the plan, whose {REPLAYED} largest were replayed"
            return SubforwardPeaks(allocated, most, bound, found.status.value, (note,))
        own = [each for each in found.turns if made.numbers[each.turn.number] == number]
        peak = max(each.allocated for each in own) + made.rest
        most = max(each.reserved for each in own) + made.rest
        bound = peak + found.slack.allocated, most + found.slack.reserved
        return SubforwardPeaks(peak, most, bound, found.status.value, found.notes)

    def _outlines(self, plan: Plan) -> list[Outline]:
        tape = self._shelf.of(plan.retention)
        return [self._outline(tape, each) for each in plan.subforwards]

    def _outline(self, tape: Tape, subforward: Subforward) -> Outline:
        features = self._features(subforward)
        key = (id(tape), *features.values())
        if key not in self._known:
            self._known[key] = self._outlined(tape, features)
        return self._known[key]

    def _outlined(self, tape: Tape, features: dict[str, int]) -> Outline:
        path = _path(Same(tape), self._target, tuple(features.items()))
        grown = _envelope(Same(tape), Same(path)).growth(features)
        if grown is None:
            raise TapeError("a size on the tape is explained by a feature that this plan does not give")
        left = sum(count * (tape.size(k, features) or 0) for k, count in _left(Same(path)).items())
        return Outline(features, grown.requested, left)

    def _features(self, subforward: Subforward) -> dict[str, int]:
        """Return the features of the rows that kernels see: padded to the grid, with what must be output."""
        found = plan_features(
            lay_out(subforward.lengths, self._target.context, 0).lengths,
            self._target.geometry,
            Topology(context=self._target.context),
            output_rows=subforward.packed_tokens,
            adapter_bytes=2 * adapter_parameters(self._target),
        )
        if self._coarse:
            rows = found[PACKED_TOKENS]
            found[SEQUENCES] = 1 << (found[SEQUENCES] - 1).bit_length()
            found[LONGEST_SEQUENCE] = min(rows, padded_tokens(found[LONGEST_SEQUENCE]))
            found[CHUNKS_64] = -(-rows // 64) + found[SEQUENCES]
            found[OUTPUT_ROWS] = rows
        return found

    def _key(self, plan: Plan, outlines: list[Outline]) -> tuple[object, ...]:
        keys = tuple((each.key, *outline.features.values()) for each, outline in _pairs(plan, outlines))
        return plan.retention, keys

    def _replay(self, plan: Plan, outlines: list[Outline], caller: int) -> Replayed:
        key = self._key(plan, outlines)
        if key not in self._made:
            largest = sorted(range(len(outlines)), key=lambda each: -outlines[each].growth)[:REPLAYED]
            numbers = tuple(sorted(largest))
            part = Plan(plan.rung, tuple(plan.subforwards[each] for each in numbers), plan.retention)
            tape, layers = self._shelf.of(plan.retention), self._target.geometry.layers
            passes = [PlannedPass(tape, outlines[each].features, self._target.context, layers) for each in numbers]
            rest = sum(outline.left for number, outline in enumerate(outlines) if number not in numbers)
            room = self._available - caller - rest
            made = forecast_plan(passes, _whole_step(part), self._start.snapshot, room=room)
            self._made[key] = Replayed(made, numbers, rest)
        return self._made[key]

    def _floored(self, floor: int, caller: int) -> Demand:
        low = self._low
        return Demand(
            sample=SAMPLE,
            coverage=Coverage.EXTRAPOLATED,
            required=floor + caller,
            peak_allocated=low.allocated + floor,
            peak_reserved=low.reserved + floor,
            bound_allocated=low.allocated + floor + caller,
            bound_reserved=low.reserved + floor + caller,
            bound_device_used=None,
            terms=(
                Term("allocated at least", floor, Status.BOUNDED, "envelopes of the passes and a margin, no replay"),
                Term("caller's loss", caller, Status.BOUNDED, "policy"),
            ),
        )

    def _weighed(self, made: Replayed, caller: int) -> Demand:
        found, low = made.forecast, self._low
        assert found.expected is not None and found.bound is not None and found.number is not None
        kept = max(each.left for each in found.turns if each.turn.phase == FORWARD)
        retained = made.rest + max(0, kept - low.allocated)
        return Demand(
            sample=SAMPLE,
            coverage=Coverage(found.status.value),
            required=found.bound.reserved - low.reserved + made.rest + caller,
            peak_allocated=found.expected.allocated + made.rest,
            peak_reserved=found.expected.reserved + made.rest,
            bound_allocated=found.bound.allocated + made.rest + caller,
            bound_reserved=found.bound.reserved + made.rest + caller,
            bound_device_used=None,
            peak_stage=f"subforward {made.numbers[found.number]}: {found.stage}",
            terms=(
                Term("retained graphs", retained, Status.FITTED, self._start.source),
                Term("working set", max(0, found.expected.allocated - kept), Status.FITTED, self._start.source),
                Term(
                    "forecast margin",
                    found.bound.reserved - found.expected.reserved,
                    Status.BOUNDED,
                    "rules that fit, and a share of the growth",
                ),
                Term("caller's loss", caller, Status.BOUNDED, "policy"),
            ),
        )


def _pairs(plan: Plan, outlines: list[Outline]) -> list[tuple[Subforward, Outline]]:
    return list(zip(plan.subforwards, outlines, strict=True))


def _tops(outlines: list[Outline]) -> list[tuple[int, int]]:
    """Return each pass's number and the least that is allocated at its peak: earlier graphs wait for its backward."""
    tops, kept = [], 0
    for number, each in enumerate(outlines):
        tops.append((number, kept + each.growth))
        kept += each.left
    return tops


def _whole_step(plan: Plan) -> list[Turn]:
    """Return the plan's phases, what follows its backwards, and one optimizer step for each slot."""
    first = {each.key.slot: number for number, each in reversed(list(enumerate(plan.subforwards)))}
    after = [Turn(number, AFTER) for number in range(len(plan.subforwards))]
    return [*turns(plan), *after, *(Turn(number, OPTIMIZER) for number in sorted(first.values()))]


@lru_cache(maxsize=1024)
def _path(tape: Same[Tape], target: Target, features: tuple[tuple[str, int], ...]) -> Path:
    part, doubts = find_part(tape.thing, target.context, target.geometry.layers)
    if part is None:
        raise TapeError("; ".join(doubts))
    return counted(part, candidates(part, dict(features))[0], dict(features))


@lru_cache(maxsize=64)
def _envelope(tape: Same[Tape], path: Same[Path]) -> Envelope:
    return Envelope(tape.thing, path.thing)


@lru_cache(maxsize=64)
def _left(path: Same[Path]) -> Counter[int]:
    """Count, for each explanation, the blocks that the path's forward leaves, less those of others that it frees."""
    alive: Counter[int] = Counter()
    for index in phase_operations(path.thing, FORWARD):
        action, subject, _ = path.thing.operations[index]
        k = path.thing.allocations[subject] if subject >= 0 else path.thing.ancestors[~subject]
        if action is Action.ALLOCATE:
            alive[k] += 1
        elif action in (Action.FREE, Action.REQUEST_FREE):
            alive[k] -= 1
    return alive
