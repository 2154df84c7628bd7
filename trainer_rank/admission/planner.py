"""Choose the widest micro-batch that fits whole, or the cheapest rung that fits one unit. Pure; nothing is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from trainer_rank.admission.budget import Budget
from trainer_rank.admission.decide import Candidate, Coverage, Decision, Demand, Outcome, decide
from trainer_rank.admission.ladder import Plan, Rung, Whole
from trainer_rank.admission.search import Forecaster, Ways, widest
from trainer_rank.packing import Subforward, Work, layouts, slot_groups
from trainer_rank.prefixes import Prefixes
from trainer_rank.requests import RequestShape

Unit = tuple[RequestShape, ...]
Groups = tuple[Subforward, ...]


@dataclass(frozen=True)
class Choice:
    """A decision with every input that it was made from; ``plan`` is None when nothing was admitted.

    ``remedy`` then names a smaller piece of the same work that would be.
    """

    units: int
    plan: Plan | None
    decision: Decision
    budget: Budget
    candidates: tuple[Candidate, ...]
    demands: tuple[Demand, ...]
    remedy: str | None = None

    @property
    def demand(self) -> Demand | None:
        """The forecast of the chosen plan."""
        for candidate, demand in zip(self.candidates, self.demands, strict=True):
            if candidate.ordinal == self.decision.selected:
                return demand
        return None


def choose(
    units: Sequence[Unit],
    rungs: Sequence[Rung],
    forecaster: Forecaster,
    budget: Budget,
    *,
    oversize: bool = False,
    by_cost: bool = True,
    explain: bool = True,
    prefixes: Prefixes | None = None,
) -> Choice:
    """Choose how many of the pending ``units`` run now, and how.

    Width comes first: as many units as fit undivided, inside what the tapes cover. When not even the first one does,
    the rungs are tried on it alone, the cheapest first, or in the ladder's own order when not ``by_cost``.
    ``explain``: search every rung and then for a remedy when nothing fits; otherwise a budget below zero is refused
    after one look, as no forecast is. ``prefixes``: what the requests share; whether it is packed once is a candidate.
    """
    if not explain and budget.available is not None and budget.available < 0:
        return _climb(Ways(_works(units[0], prefixes)[:1], rungs[:1]), forecaster, budget, by_cost, once=True)
    if any(isinstance(rung, Whole) for rung in rungs):
        width = _widest(units, forecaster, budget, prefixes, by_cost)
        if width is not None:
            return width

    def climb(unit: Unit, oversize: bool) -> Choice:
        return _climb(Ways(_works(unit, prefixes), rungs), forecaster, budget, by_cost, oversize=oversize)

    choice = climb(units[0], oversize)
    if choice.decision.outcome is not Outcome.REFUSED or not explain:
        return choice
    return replace(choice, remedy=_remedy(units[0], lambda unit: climb(unit, False)))


def consider(
    units: Sequence[Unit],
    rungs: Sequence[Rung],
    forecaster: Forecaster,
    budget: Budget,
    width: int,
    ordinal: int,
    *,
    oversize: bool = False,
    prefixes: Prefixes | None = None,
) -> Choice:
    """Decide on one plan that another rank proposed: ``width`` leading units whole, or plan ``ordinal`` of the first.

    The ladder is in its own order here, so that the ordinal means the same on every rank.
    """
    ways = Ways(_works(units[0], prefixes), rungs)
    plan = ways.plan(ordinal) if width == 1 else Plan(Whole.name, _layouts(units[:width], prefixes)[0])
    candidate, demand = _candidate(ordinal, plan, forecaster), forecaster.demand(plan)
    decision = decide([demand], budget, [candidate], oversize=oversize)
    chosen = None if decision.selected is None else plan
    return Choice(width, chosen, decision, budget, (candidate,), (demand,))


def with_figures(choice: Choice, forecaster: Forecaster) -> Choice:
    """Return an admitted choice with the full forecast of its plan, which limits alone had decided; decided again."""
    assert choice.plan is not None
    exact = forecaster.demand(choice.plan)
    demands = tuple(exact if each is choice.demand else each for each in choice.demands)
    decision = decide(demands, choice.budget, choice.candidates)
    chosen = choice.plan if decision.selected == choice.decision.selected else None
    return replace(choice, plan=chosen, decision=decision, demands=demands)


def unforecast(units: Sequence[Unit], budget: Budget, policy: str, prefixes: Prefixes | None = None) -> Choice:
    """Run the first unit whole and unseen, as a policy without forecasts does; nothing is known of what it takes."""
    plan = Plan(Whole.name, slot_groups(units[0], prefixes))
    candidate = Candidate(0, plan.rung, plan.indices, plan.packed_tokens)
    demand = Demand(budget.sample, Coverage.UNKNOWN, *(None,) * 6, uncovered=("everything",))
    return Choice(1, plan, admit_unseen(candidate, budget, policy), budget, (candidate,), (demand,))


def admit_unseen(candidate: Candidate, budget: Budget, policy: str) -> Decision:
    """Admit the only candidate, as a policy without forecasts does."""
    reason = f"policy {policy} admits without a forecast"
    chosen, rung = candidate.ordinal, candidate.rung
    return Decision(Outcome.ADMITTED, budget.sample, chosen, rung, None, budget.available, None, None, reason)


def _climb(
    ways: Ways, forecaster: Forecaster, budget: Budget, by_cost: bool, *, oversize: bool = False, once: bool = False
) -> Choice:
    """Try what may fit until it does, or only the first one."""
    candidates: list[Candidate] = []
    demands: list[Demand] = []
    tried: dict[int, Plan] = {}
    available = budget.available
    for ordinal, plan in ways.worth_trying(forecaster, -1 if available is None else available, by_cost):
        tried[ordinal] = plan
        candidates.append(_candidate(ordinal, plan, forecaster))
        demands.append(forecaster.demand(plan))
        if once or decide(demands[-1:], budget, candidates[-1:]).outcome is Outcome.ADMITTED:
            break
    decision = decide(demands, budget, candidates, oversize=oversize)
    chosen = None if decision.selected is None else tried[decision.selected]
    return Choice(1, chosen, decision, budget, tuple(candidates), tuple(demands))


def _remedy(unit: Unit, climb: Callable[[Unit], Choice]) -> str:
    """Find a smaller piece of a refused unit that would be admitted: fewer requests, or else a shorter one."""
    count = _largest(len(unit) - 1, lambda number: climb(unit[:number]).plan is not None)
    if count:
        tokens = sum(shape.length for shape in unit[:count])
        return f"give its first {count} requests ({tokens} tokens) alone"
    first = unit[0]
    length = _largest(first.length - 1, lambda number: climb((replace(first, length=number),)).plan is not None)
    if length:
        return f"shorten request {first.index} from {first.length} to at most {length} tokens"
    shortfall = climb((replace(first, length=1),)).decision.shortfall
    return f"lower the claims by {shortfall} B: they leave no room for a single token"


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number from 1 to ``most`` that fits, 0 when none does; what fits stays fit when smaller."""
    low, high = 0, most + 1
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _widest(
    units: Sequence[Unit], forecaster: Forecaster, budget: Budget, prefixes: Prefixes | None, by_cost: bool
) -> Choice | None:
    """Find the largest number of leading units that fits whole, in the layout of the fewest rows.

    The other layout is taken where it is cheaper and fits as well.
    """
    available = budget.available

    @cache
    def packed(width: int) -> tuple[Groups, ...]:
        return _layouts(units[:width], prefixes)

    @cache
    def whole(width: int) -> Choice | None:
        return _whole(width, packed(width)[0], forecaster, budget)

    def fits(width: int) -> bool:
        return whole(width) is not None

    def exceeds(width: int) -> bool:
        least = forecaster.least(Plan(Whole.name, packed(width)[0]))
        return not fits(width) if least is None or available is None else least > available

    if not fits(1):
        return None
    width = widest(len(units), exceeds, fits)
    choice = whole(width) if width else None
    return choice if choice is None or not by_cost else _cheaper(choice, packed(width)[1:], forecaster)


def _cheaper(choice: Choice, others: Sequence[Groups], forecaster: Forecaster) -> Choice:
    """Return the same work whole in another layout when that is cheaper and fits, else the choice."""
    known = choice.candidates[0].cost_ns
    for groups in others:
        cost = forecaster.cost_ns(Plan(Whole.name, groups))
        if known is not None and cost is not None and cost < known:
            return _whole(choice.units, groups, forecaster, choice.budget, ordinal=1) or choice
    return choice


def _whole(width: int, groups: Groups, forecaster: Forecaster, budget: Budget, ordinal: int = 0) -> Choice | None:
    plan = Plan(Whole.name, groups)
    demand = forecaster.demand(plan)
    if demand.coverage is not Coverage.COVERED:
        return None
    candidate = _candidate(ordinal, plan, forecaster)
    decision = decide([demand], budget, [candidate])
    if decision.outcome is not Outcome.ADMITTED:
        return None
    return Choice(width, plan, decision, budget, (candidate,), (demand,))


def _layouts(units: Sequence[Unit], prefixes: Prefixes | None) -> tuple[Groups, ...]:
    return layouts([shape for unit in units for shape in unit], prefixes)


def _works(unit: Unit, prefixes: Prefixes | None) -> list[Work]:
    return [Work(groups) for groups in layouts(unit, prefixes)]


def _candidate(ordinal: int, plan: Plan, forecaster: Forecaster) -> Candidate:
    return Candidate(ordinal, plan.rung, plan.indices, plan.packed_tokens, forecaster.cost_ns(plan))
