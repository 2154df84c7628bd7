"""Forecast plans for a target from a tape that lacks stages, with what was assumed added by name. Pure.

One pass is replayed through the allocator model from the recording's own start. A plan is put together from its passes:
graphs that wait for the backward add up, the largest working set comes on top; rerun keeps one graph at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from trainer_rank.admission.budget import Status, Term
from trainer_rank.admission.decide import Coverage, Demand
from trainer_rank.admission.ladder import Plan, Retention
from trainer_rank.allocator.rules import whole_granules
from trainer_rank.allocator.snapshot import Snapshot
from trainer_rank.features import FEATURES, PACKED_TOKENS, plan_features
from trainer_rank.forecasting import FORWARD, PHASES
from trainer_rank.geometry import Topology
from trainer_rank.packing import Subforward
from trainer_rank.planning.assumptions import (
    RETAINED_PER_LAYER_TOKEN,
    Assumption,
    Load,
    adapter_parameters,
    further_weights,
)
from trainer_rank.planning.peaks import SAMPLE, UNKNOWN, SubforwardPeaks, unknown
from trainer_rank.planning.target import Target, covers_layers
from trainer_rank.tapes.compose import PlannedPass, retained, sequential
from trainer_rank.tapes.forecast import Figures, Forecast, forecast_plan
from trainer_rank.tapes.forecast import Status as Reach
from trainer_rank.tapes.tape import Part, Tape

OUTPUT_BYTES_PER_ROW = 4
"""Float32 log-probabilities that rerun keeps of every row."""


@dataclass(frozen=True)
class Base:
    """Where a forecast starts: the tape, its part for this topology, and a recorded snapshot before a pass."""

    tape: Tape
    part: Part
    snapshot: Snapshot
    source: str


@dataclass(frozen=True)
class Pass:
    """One subforward's growth over the start, in bytes: as expected, and its bound; what is assumed is in both."""

    expected: Figures
    bound: Figures
    retained: int | None
    reach: Reach
    notes: tuple[str, ...]


class TapeForecaster:
    """Implements :class:`trainer_rank.admission.planner.Forecaster` for one target, without a device.

    ``uncovered`` stages make every demand unknown. ``caller_bytes_per_token`` is what the caller's loss may hold.
    """

    def __init__(
        self,
        base: Base,
        target: Target,
        slots: int,
        assumptions: Sequence[Assumption],
        uncovered: Sequence[str],
        caller_bytes_per_token: int,
    ) -> None:
        self.base = base
        self.target = target
        self.uncovered = tuple(uncovered)
        self._slots = slots
        self._assumptions = tuple(assumptions)
        self._caller = caller_bytes_per_token
        self._known: dict[tuple[int, ...], Pass | tuple[str, ...]] = {}

    @cached_property
    def start(self) -> Figures:
        """Bytes allocated and reserved before the plan: the recorded start, further weights, and what is assumed."""
        resident = sum(self._load(each, dict.fromkeys(FEATURES, 0)).resident for each in self._assumptions)
        if self._layers == self.target.geometry.layers or self._assumes_layers:
            resident += further_weights(self.target, self._recorded_layers)
        return Figures(
            self.base.snapshot.allocated + resident, self.base.snapshot.reserved + whole_granules(resident), None
        )

    @cached_property
    def _layers(self) -> int:
        """Layers that a pass is forecast with: the target's where the tape covers them."""
        covered = covers_layers(self.base.tape, self.target)
        return self.target.geometry.layers if covered else self._recorded_layers

    @property
    def _recorded_layers(self) -> int:
        return self.base.part.layers or self.target.geometry.layers

    @property
    def _assumes_layers(self) -> bool:
        return any(each.name == self.target.layers_stage for each in self._assumptions)

    def cost_ns(self, plan: Plan) -> int | None:  # noqa: ARG002 - the protocol's signature
        """No time was recorded with these tapes; the ladder's own order stands."""
        return None

    def least(self, plan: Plan) -> int | None:  # noqa: ARG002 - the protocol's signature
        """Nothing is known without a replay; passes of equal features are replayed once."""
        return None

    def grown(self, subforward: Subforward) -> Pass | tuple[str, ...]:
        """Forecast one subforward alone, or name what the tape gives no size for."""
        topology = Topology(context=self.target.context)
        features = plan_features(
            subforward.lengths, self.target.geometry, topology, adapter_bytes=2 * adapter_parameters(self.target)
        )
        key = tuple(features.values())
        if key not in self._known:
            self._known[key] = self._pass(features)
        return self._known[key]

    def demand(self, plan: Plan) -> Demand:
        """Forecast a plan; unknown while a stage is neither covered nor assumed."""
        if self.uncovered:
            return unknown(self.uncovered)
        passes: list[Pass] = []
        for subforward in plan.subforwards:
            found = self.grown(subforward)
            if isinstance(found, tuple):
                return unknown(found)
            passes.append(found)
        kept = self.kept(plan, passes)
        if kept is None:
            return unknown(("retained-graphs",))
        return self._weighed(plan, passes, kept)

    def _weighed(self, plan: Plan, passes: Sequence[Pass], kept: Sequence[int]) -> Demand:
        caller = self._caller * sum(plan.packed_tokens)
        others = [sum(kept) - each for each in kept]
        expected = [_raised(made.expected, other) for made, other in zip(passes, others, strict=True)]
        bound = [_raised(made.bound, other) for made, other in zip(passes, others, strict=True)]
        top = max(range(len(passes)), key=lambda each: bound[each].reserved)
        required = bound[top].reserved + caller
        margin = bound[top].reserved - expected[top].reserved
        return Demand(
            sample=SAMPLE,
            coverage=Coverage.EXTRAPOLATED if _extrapolated(passes) else Coverage.COVERED,
            required=required,
            peak_allocated=self.start.allocated + max(each.allocated for each in expected),
            peak_reserved=self.start.reserved + max(each.reserved for each in expected),
            bound_allocated=self.start.allocated + max(each.allocated for each in bound) + caller,
            bound_reserved=self.start.reserved + required,
            bound_device_used=None,
            peak_stage=f"subforward {top}",
            terms=(
                Term("kept of other subforwards", others[top], Status.FITTED, f"retention {plan.retention.value}"),
                Term("largest subforward", passes[top].expected.reserved, Status.FITTED, self.base.source),
                Term("forecast margin", margin, Status.BOUNDED, "rules that fit, and a share of the growth"),
                Term("caller's loss", caller, Status.BOUNDED, "policy"),
            ),
        )

    def peaks(self, plan: Plan, chosen: bool) -> list[SubforwardPeaks]:
        """Describe each subforward at its own peak; graphs of the others are included once the plan was chosen."""
        found = [self.grown(subforward) for subforward in plan.subforwards]
        known = [made for made in found if not isinstance(made, tuple)]
        kept = self.kept(plan, known) if chosen and len(known) == len(found) else None
        others = [0 if kept is None else sum(kept) - kept[number] for number in range(len(found))]
        return [self._peaks(made, other) for made, other in zip(found, others, strict=True)]

    def _peaks(self, made: Pass | tuple[str, ...], others: int) -> SubforwardPeaks:
        if isinstance(made, tuple):
            return SubforwardPeaks(notes=made)
        expected, bound = (
            (self.start.allocated + others + each.allocated, self.start.reserved + others + each.reserved)
            for each in (made.expected, made.bound)
        )
        return SubforwardPeaks(*expected, bound, UNKNOWN if self.uncovered else made.reach.value, made.notes)

    def kept(self, plan: Plan, passes: Sequence[Pass]) -> list[int] | None:
        """Return what stays of each subforward while another one is at its peak; None when that was never recorded."""
        if plan.retention is Retention.RERUN:
            rows = [-(-each // self.target.context) for each in plan.packed_tokens]
            return [OUTPUT_BYTES_PER_ROW * each for each in rows]
        known = [each.retained for each in passes if each.retained is not None]
        if len(known) == len(passes):
            return known
        return [0] if len(passes) == 1 else None

    def _pass(self, features: dict[str, int]) -> Pass | tuple[str, ...]:
        planned = PlannedPass(self.base.tape, features, self.base.part.context, self._layers)
        phases = set(PHASES) <= self.base.tape.covers
        made = forecast_plan([planned], retained(1, PHASES) if phases else sequential(1), self.base.snapshot)
        if made.expected is None or made.bound is None:
            return made.uncovered
        loads = [self._load(each, features) for each in self._assumptions]
        kept = sum(each.retained for each in loads)
        top = kept + sum(each.working for each in loads)
        graph = self._graph(made, features)
        return Pass(
            self._growth(made.expected, top),
            self._growth(made.bound, top),
            None if graph is None else graph + kept,
            made.status,
            made.notes,
        )

    def _growth(self, figures: Figures, assumed: int) -> Figures:
        snapshot = self.base.snapshot
        allocated, reserved = figures.allocated - snapshot.allocated, figures.reserved - snapshot.reserved
        return Figures(allocated + assumed, reserved + whole_granules(assumed), None)

    def _graph(self, made: Forecast, features: dict[str, int]) -> int | None:
        """Return what the recorded layers keep from forward to backward: as replayed, or as assumed for each layer."""
        left = [each.left for each in made.turns if each.turn.phase == FORWARD]
        if left:
            return left[0] - self.base.snapshot.allocated
        if self._assumes_layers:
            return self._recorded_layers * RETAINED_PER_LAYER_TOKEN * features[PACKED_TOKENS]
        return None

    def _load(self, assumption: Assumption, features: dict[str, int]) -> Load:
        return assumption.load(self.target, self._recorded_layers, self._slots, features)


def _raised(figures: Figures, size: int) -> Figures:
    return Figures(figures.allocated + size, figures.reserved + size, None)


def _extrapolated(passes: Sequence[Pass]) -> bool:
    return any(each.reach is Reach.EXTRAPOLATED for each in passes)
