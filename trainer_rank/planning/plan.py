"""Plan a batch for a card without a device: choose a rung for every micro-batch, or say what is in the way. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer_rank.admission.budget import Budget, Status, Term
from trainer_rank.admission.decide import Decision, Outcome
from trainer_rank.admission.ladder import LADDER, Plan, ladder
from trainer_rank.admission.planner import choose
from trainer_rank.allocator.trace import load_trace
from trainer_rank.devices.cards import Card
from trainer_rank.packing import slot_groups
from trainer_rank.planning.assumptions import Assumption
from trainer_rank.planning.batch import Batch
from trainer_rank.planning.forecaster import SAMPLE, Base, TapeForecaster
from trainer_rank.planning.target import Target, recorded_part, uncovered_stages
from trainer_rank.policies import Policy
from trainer_rank.tapes.shipped import RECORDINGS
from trainer_rank.tapes.tape import Tape

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
    batch: Batch, card: Card, tape: Tape, policy: Policy, assumptions: Sequence[Assumption] = ()
) -> BatchPlan:
    """Plan ``batch`` on ``card`` with one tape; every stage that it does not cover must be assumed by name."""
    return _Planner(batch, card, tape, policy, tuple(assumptions)).plan()


class _Planner:
    def __init__(
        self, batch: Batch, card: Card, tape: Tape, policy: Policy, assumptions: tuple[Assumption, ...]
    ) -> None:
        self.batch = batch
        self.card = card
        self.tape = tape
        self.policy = policy
        self.assumptions = assumptions
        self.target = Target(batch.context)
        whole = [sub.lengths for group in batch.groups for sub in slot_groups(group)]
        missing = uncovered_stages(tape, self.target, whole)
        self.assumed = tuple(each for each in assumptions if each.name in missing)
        self.uncovered = tuple(stage for stage in missing if stage not in {each.name for each in self.assumed})
        self.base = _base(tape, self.target, max(map(sum, whole)))
        self.peers = batch.context > 1

    def plan(self) -> BatchPlan:
        impossible = self._impossible()
        if impossible:
            return self._answer(Outcome.REFUSED, impossible)
        if self.base is None:
            return self._answer(Outcome.UNKNOWN, f"no tape covers {', '.join(self.uncovered)}")
        slots = len({shape.slot for shape in self.batch.shapes})
        forecaster = TapeForecaster(
            self.base, self.target, slots, self.assumed, self.uncovered, self.policy.caller_bytes_per_token
        )
        budget = self._budget(forecaster)
        if budget is None:
            held = forecaster.start.reserved + self.card.held_outside("first_backward", self.peers)
            return self._answer(Outcome.REFUSED, f"the start alone holds {held} B of {self.card.capacity} B")
        return self._chosen(forecaster, budget)

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

    def _budget(self, forecaster: TapeForecaster) -> Budget | None:
        """Return the budget before the first forward; None when even its claims do not fit."""
        now = self.card.held_outside("first_matrix_product", self.peers)
        due = self.card.held_outside("first_backward", self.peers) - now
        free = self.card.capacity - now - forecaster.start.reserved
        claims = (
            Term("reserve", self.policy.reserve_bytes, Status.BOUNDED, f"policy {self.policy.name}"),
            Term("libraries", due, Status.MEASURED, f"card {self.card.name}: up to first_backward"),
        )
        if free < sum(claim.size or 0 for claim in claims):
            return None
        return Budget(SAMPLE, free, self.card.capacity, claims)

    def _chosen(self, forecaster: TapeForecaster, budget: Budget) -> BatchPlan:
        pending = list(self.batch.groups)
        rows: list[SubforwardForecast] = []
        decisions: list[Decision] = []
        rungs: list[str] = []
        while pending:
            choice = choose(pending, ladder(self.policy.ladder), forecaster, budget)
            decisions.append(choice.decision)
            plan = choice.plan or Plan("whole", slot_groups(pending[0]))
            first = len(self.batch.groups) - len(pending)
            rows += _rows(forecaster, plan, first, self._outside(), choice.plan is not None)
            rungs += [plan.rung] if choice.plan is not None else []
            pending = pending[choice.units :]
        outcomes = {decision.outcome for decision in decisions}
        outcome = next(each for each in (Outcome.REFUSED, Outcome.UNKNOWN, Outcome.ADMITTED) if each in outcomes)
        reason = next(each.reason for each in decisions if each.outcome is outcome)
        order = [rung.name for rung in LADDER]
        rung = max(rungs, key=order.index) if outcome is Outcome.ADMITTED else None
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
            start="" if self.base is None else self.base.source,
            available=available,
            decisions=decisions,
            time_percent=None if rung is None else TIME_PERCENT[rung],
        )

    def _scope(self) -> str:
        if self.base is None:
            return "nothing: no recording has this topology"
        recorded = f"recorded passes of {self.base.part.layers} layers at context parallel size {self.batch.context}"
        added = f", and by assumption {', '.join(each.name for each in self.assumed)}" if self.assumed else ""
        left = f"; without {', '.join(self.uncovered)}" if self.uncovered else ""
        return recorded + self._elsewhere() + added + left

    def _elsewhere(self) -> str:
        recorded_on = self.tape.provenance.get("card", "an unstated card")
        return "" if recorded_on == self.card.name else f" on card {recorded_on}"


def _base(tape: Tape, target: Target, widest: int) -> Base | None:
    """Return the start that was recorded nearest to the widest subforward on as many ranks."""
    part = recorded_part(tape, target)
    if part is None:
        return None
    probes = [probe for path in part.paths for probe in path.probes]
    nearest = min(probes, key=lambda probe: abs(probe.features["packed_tokens"] * part.context - widest))
    name = Path(nearest.source).name
    return Base(tape, part, load_trace(RECORDINGS / name).before, name)


def _rows(forecaster: TapeForecaster, plan: Plan, group: int, outside: int, chosen: bool) -> list[SubforwardForecast]:
    """Describe each subforward at its own peak; graphs of the others are included once a plan was chosen."""
    found = [forecaster.grown(subforward) for subforward in plan.subforwards]
    known = [made for made in found if not isinstance(made, tuple)]
    kept = forecaster.kept(plan, known) if chosen and len(known) == len(found) else None
    rows = []
    for number, (subforward, made) in enumerate(zip(plan.subforwards, found, strict=True)):
        figures: list[int] = []
        if not isinstance(made, tuple):
            others = 0 if kept is None else sum(kept) - kept[number]
            for size in (made.expected, made.bound):
                allocated = forecaster.start.allocated + others + size.allocated
                reserved = forecaster.start.reserved + others + size.reserved
                figures += [allocated, reserved, reserved + outside]
        status = "unknown" if isinstance(made, tuple) or forecaster.uncovered else made.reach.value
        rows.append(
            SubforwardForecast(
                group=group,
                requests=subforward.indices,
                slot=subforward.key.slot,
                packed_tokens=subforward.packed_tokens,
                rung=plan.rung,
                status=status,
                allocated=figures[0] if figures else None,
                reserved=figures[1] if figures else None,
                device_used=figures[2] if figures else None,
                bound=(figures[3], figures[4], figures[5]) if figures else None,
                notes=made if isinstance(made, tuple) else made.notes,
            )
        )
    return rows
