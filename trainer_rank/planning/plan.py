"""Plan a batch for a card without a device: choose a rung for every micro-batch, or say what is in the way. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer_rank.admission.budget import Budget, Status, Term
from trainer_rank.admission.decide import Decision, Outcome
from trainer_rank.admission.ladder import LADDER, Plan, Rung, ladder
from trainer_rank.admission.planner import choose
from trainer_rank.allocator.trace import load_trace
from trainer_rank.devices.cards import Card
from trainer_rank.packing import slot_groups
from trainer_rank.planning.assumptions import Assumption
from trainer_rank.planning.batch import Batch
from trainer_rank.planning.choose_tape import Shelf
from trainer_rank.planning.composed import ComposedForecaster
from trainer_rank.planning.forecaster import Base, TapeForecaster
from trainer_rank.planning.peaks import SAMPLE, PeakForecaster
from trainer_rank.planning.start import start_of
from trainer_rank.planning.target import Target, recorded_part, uncovered_stages
from trainer_rank.policies import Policy
from trainer_rank.tapes.shipped import RecordedStart, recording_of
from trainer_rank.tapes.tape import Part, Tape

TIME_PERCENT = {"whole": 100, "split": 100, "rerun": 125}
"""Time against the undivided plan, by counted work with full recompute: forward 1, recompute 1, backward 2; rerun adds
a forward without graph. Kernels of smaller subforwards may be slower; that is not counted."""
TOKEN_BYTES = 8
"""A token id is an int64: a request whose ids alone exceed the card cannot run on it."""


@dataclass(frozen=True)
class SubforwardForecast:
    """One subforward and its peaks, in bytes on each rank. Figures are None where the tape gives no size.

    ``device_used`` adds what libraries and context hold outside PyTorch; ``bound`` holds the same three figures.
    """

    group: int
    requests: tuple[int, ...]
    slot: str
    packed_tokens: int
    rung: str
    status: str
    allocated: int | None
    reserved: int | None
    device_used: int | None
    bound: tuple[int, int, int] | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class BatchPlan:
    """What was planned. ``rung`` is the dearest one used; None when nothing fits or a stage is uncovered.

    ``scope`` says what the figures of ``subforwards`` include, ``start`` which recording they start from.
    """

    batch: Batch
    card: Card
    target: Target
    outcome: Outcome
    rung: str | None
    reason: str
    subforwards: tuple[SubforwardForecast, ...]
    uncovered: tuple[str, ...]
    assumed: tuple[Assumption, ...]
    scope: str
    start: str
    available: int | None
    decisions: tuple[Decision, ...]
    time_percent: int | None


def plan_batch(
    batch: Batch, card: Card, shelf: Shelf, policy: Policy, assumptions: Sequence[Assumption] = ()
) -> BatchPlan:
    """Plan ``batch`` on ``card`` from shipped tapes; every stage that they do not cover must be assumed by name."""
    return _Planner(batch, card, shelf, policy, tuple(assumptions)).plan()


class _Planner:
    def __init__(
        self, batch: Batch, card: Card, shelf: Shelf, policy: Policy, assumptions: tuple[Assumption, ...]
    ) -> None:
        self.batch = batch
        self.card = card
        self.shelf = shelf
        self.tape = shelf.tape
        self.policy = policy
        self.target = Target(batch.context)
        whole = [sub.lengths for group in batch.groups for sub in slot_groups(group)]
        missing = uncovered_stages(self.tape, self.target, whole)
        self.assumed = tuple(each for each in assumptions if each.name in missing)
        self.uncovered = tuple(stage for stage in missing if stage not in {each.name for each in self.assumed})
        self.peers = batch.context > 1
        self.part = recorded_part(self.tape, self.target)
        self.widest = max(map(sum, whole))
        self.start = ""

    def plan(self) -> BatchPlan:
        impossible = self._impossible()
        if impossible:
            return self._answer(Outcome.REFUSED, impossible)
        if self.part is None:
            return self._answer(Outcome.UNKNOWN, f"no tape covers {', '.join(self.uncovered)}")
        return self._composed(self.shelf.shipped.start) if self.covered else self._added(self.part)

    @property
    def covered(self) -> bool:
        """Whether recordings cover every stage, so that nothing is assumed and passes can be composed."""
        return not self.uncovered and not self.assumed and self.shelf.shipped.start is not None

    @property
    def slots(self) -> int:
        return len({shape.slot for shape in self.batch.shapes})

    def _composed(self, recorded: RecordedStart | None) -> BatchPlan:
        assert recorded is not None
        start = start_of(recorded, self.target, self.slots)
        self.start = start.source
        held = start.snapshot.reserved

        def made(available: int) -> PeakForecaster:
            caller, requests = self.policy.caller_bytes_per_token, len(self.batch.shapes)
            return ComposedForecaster(self.shelf, self.target, start, available, caller, requests)

        rungs = [rung for rung in ladder(self.policy.ladder) if rung.retention in self.shelf.retentions]
        return self._chosen(made, held, rungs)

    def _added(self, part: Part) -> BatchPlan:
        base = _base(self.tape, part, self.widest)
        self.start = base.source
        caller = self.policy.caller_bytes_per_token
        forecaster = TapeForecaster(base, self.target, self.slots, self.assumed, self.uncovered, caller)
        return self._chosen(lambda _: forecaster, forecaster.start.reserved, ladder(self.policy.ladder))

    def _impossible(self) -> str | None:
        weights = 2 * self.target.geometry.parameters()
        if weights > self.card.capacity:
            return f"the model's weights alone take {weights} B and the card has {self.card.capacity} B"
        for shape in self.batch.shapes:
            if shape.length * TOKEN_BYTES > self.card.capacity:
                return (
                    f"request {shape.index} has {shape.length} tokens, whose ids alone take "
                    f"{shape.length * TOKEN_BYTES} B of the card's {self.card.capacity} B; shorten it"
                )
        return None

    def _budget(self, held: int) -> Budget | None:
        """Return the budget before the first forward, ``held`` bytes reserved; None when even its claims do not fit."""
        now = self.card.held_outside("first_matrix_product", self.peers)
        due = self.card.held_outside("first_backward", self.peers) - now
        free = self.card.capacity - now - held
        claims = (
            Term("reserve", self.policy.reserve_bytes, Status.BOUNDED, f"policy {self.policy.name}"),
            Term("libraries", due, Status.MEASURED, f"card {self.card.name}: up to first_backward"),
        )
        if free < sum(claim.size or 0 for claim in claims):
            return None
        return Budget(SAMPLE, free, self.card.capacity, claims)

    def _chosen(self, made: Callable[[int], PeakForecaster], held: int, rungs: Sequence[Rung]) -> BatchPlan:
        budget = self._budget(held)
        if budget is None or budget.available is None:
            taken = held + self._outside()
            return self._answer(Outcome.REFUSED, f"the start alone holds {taken} B of {self.card.capacity} B")
        forecaster = made(budget.available)
        pending = list(self.batch.groups)
        rows: list[SubforwardForecast] = []
        decisions: list[Decision] = []
        used: list[str] = []
        while pending:
            choice = choose(pending, rungs, forecaster, budget)
            decisions.append(choice.decision)
            plan = choice.plan or Plan("whole", slot_groups(pending[0]))
            first = len(self.batch.groups) - len(pending)
            rows += _rows(forecaster, plan, first, self._outside(), choice.plan is not None)
            used += [plan.rung] if choice.plan is not None else []
            pending = pending[choice.units :]
        outcomes = {decision.outcome for decision in decisions}
        outcome = next(each for each in (Outcome.REFUSED, Outcome.UNKNOWN, Outcome.ADMITTED) if each in outcomes)
        reason = next(each.reason for each in decisions if each.outcome is outcome)
        order = [rung.name for rung in LADDER]
        rung = max(used, key=order.index) if outcome is Outcome.ADMITTED else None
        return self._answer(outcome, reason, rung, tuple(rows), budget.available, tuple(decisions))

    def _outside(self) -> int:
        return self.card.held_outside("first_backward", self.peers)

    def _answer(
        self,
        outcome: Outcome,
        reason: str,
        rung: str | None = None,
        rows: tuple[SubforwardForecast, ...] = (),
        available: int | None = None,
        decisions: tuple[Decision, ...] = (),
    ) -> BatchPlan:
        return BatchPlan(
            batch=self.batch,
            card=self.card,
            target=self.target,
            outcome=outcome,
            rung=rung,
            reason=reason,
            subforwards=rows,
            uncovered=self.uncovered,
            assumed=self.assumed,
            scope=self._scope(),
            start=self.start,
            available=available,
            decisions=decisions,
            time_percent=None if rung is None else TIME_PERCENT[rung],
        )

    def _scope(self) -> str:
        if self.part is None:
            return "nothing: no recording has this topology"
        way = "composed from recorded" if self.covered else "recorded"
        repeated = self.covered and self.part.layers != self.target.geometry.layers
        layers = f"{self.part.layers} layers" + (f", repeated to {self.target.geometry.layers}," if repeated else "")
        recorded = f"{way} passes of {layers} at context parallel size {self.batch.context}"
        added = f", and by assumption {', '.join(each.name for each in self.assumed)}" if self.assumed else ""
        left = f"; without {', '.join(self.uncovered)}" if self.uncovered else ""
        return recorded + self._elsewhere() + added + left

    def _elsewhere(self) -> str:
        recorded_on = self.tape.provenance.get("card", "an unstated card")
        return "" if recorded_on == self.card.name else f" on card {recorded_on}"


def _base(tape: Tape, part: Part, widest: int) -> Base:
    """Return the start that was recorded nearest to the widest subforward on as many ranks."""
    probes = [probe for path in part.paths for probe in path.probes]
    nearest = min(probes, key=lambda probe: abs(probe.features["packed_tokens"] * part.context - widest))
    return Base(tape, part, load_trace(recording_of(nearest.source)).before, nearest.source)


def _rows(forecaster: PeakForecaster, plan: Plan, group: int, outside: int, chosen: bool) -> list[SubforwardForecast]:
    return [
        SubforwardForecast(
            group=group,
            requests=subforward.indices,
            slot=subforward.key.slot,
            packed_tokens=subforward.packed_tokens,
            rung=plan.rung,
            status=found.status,
            allocated=found.allocated,
            reserved=found.reserved,
            device_used=None if found.reserved is None else found.reserved + outside,
            bound=None if found.bound is None else (*found.bound, found.bound[1] + outside),
            notes=found.notes,
        )
        for subforward, found in zip(plan.subforwards, forecaster.peaks(plan, chosen), strict=True)
    ]
