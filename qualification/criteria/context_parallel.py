"""Judge a context-parallel run: both phases did all of their work, forecasts held, and the ranks stayed replicas.

What the ranks hold is compared tensor by tensor from the checkpoints of both, hashed after the run; peaks rest on the
replay of recordings, order on the launcher's stamps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal

from qualification.criteria.checkpoint import differing, finite_tensors_of, optimizer_steps, tensors_of
from qualification.criteria.observation import Observation, StampedEvent
from qualification.criteria.steps import Steps, finite_losses, worst
from qualification.criteria.thresholds import Measured, count, ended, exactly, left_after_close, none, some
from qualification.figures import Unreadable
from qualification.records import Criterion, Ground

RANKS = (0, 1)
SLOTS = ("adversary", "policy")
PHASES = ("tiny", "large")
GROUPS = 2
"""Groups of each phase, each with one backward on every rank."""
REQUESTS = 4 + 4 + 10 + 9


def judge(observation: Observation) -> list[Criterion]:
    """Return every criterion of the workload, in the order in which people read them."""
    ranks = [Steps(observation, f"rank-{rank}/", rank) for rank in RANKS]
    steps = len(RANKS) * len(PHASES) * GROUPS
    differing = _differing(observation)

    def over_ranks(figure: Callable[[Steps], Measured]) -> Measured:
        return _sum([figure(each) for each in ranks])

    return [
        ended(observation),
        count("backwards", steps, over_ranks(Steps.backwards), "backwards"),
        count("finite_losses", steps, finite_losses(observation), "losses"),
        count("requests_run", len(RANKS) * REQUESTS, _requests(observation), "requests"),
        exactly("slot_updates", len(RANKS) * len(PHASES) * len(SLOTS), _updates(observation), "updates"),
        none("slots_unlike_at_start", _unlike(observation), "tensors"),
        none("replica_tensors_differing", *differing),
        none("replica_digests_differing", _digests(observation), "slots"),
        none("plans_differing", _said_apart(observation, "forecast", "plan_sha256"), "steps"),
        none("losses_differing", _said_apart(observation, "loss", "value"), "steps"),
        *_smaller(observation),
        none("steps_without_forecast_before", over_ranks(lambda each: each.count(each.unannounced)), "steps"),
        none("recordings_not_exact", over_ranks(lambda each: each.count(lambda it, _: not it.exact)), "recordings"),
        none("allocated_above_bound", over_ranks(lambda it: it.above("bound_allocated", "peak_allocated")), "steps"),
        none("reserved_above_bound", over_ranks(lambda it: it.above("bound_reserved", "peak_reserved")), "steps"),
        worst("allocated_worst_error", _most([each.worst_error("peak_allocated") for each in ranks])),
        worst("reserved_worst_error", _most([each.worst_error("peak_reserved") for each in ranks])),
        none("out_of_memory_events", over_ranks(lambda each: each.total(lambda it: it.out_of_memory)), "events"),
        none("allocator_retries", over_ranks(lambda each: each.total(lambda it: it.segments_freed)), "segments"),
        none("allocated_after_close", _sum([left_after_close(observation, f"rank-{r}/") for r in RANKS]), "B"),
    ]


def _sum(figures: Sequence[Measured]) -> Measured:
    """Add up the ranks' figures; one that is unknown makes the sum so."""
    unknown = next((each for each in figures if isinstance(each, Unreadable)), None)
    return unknown or sum(int(each) for each in figures if not isinstance(each, Unreadable))


def _most(figures: Sequence[Measured]) -> Measured:
    unknown = next((each for each in figures if isinstance(each, Unreadable)), None)
    return unknown or str(max(Decimal(each) for each in figures if not isinstance(each, Unreadable)))


def _requests(observation: Observation) -> Measured:
    """Count the requests that each rank's forecasts name, step by step."""
    found = 0
    for event in observation.of("forecast"):
        cuts = None if isinstance(event.body, Unreadable) else event.body.get("subforwards")
        if not isinstance(cuts, list) or not all(isinstance(cut, list) for cut in cuts):
            return Unreadable(f"is unknown: the forecast in event {event.sequence} names no requests")
        found += len({index for cut in cuts for index in cut if type(index) is int})
    return found


def _updates(observation: Observation) -> Measured:
    """Add up the optimizers' own counts after both phases; state that a phase did not begin without counts too much."""
    names = [(rank, phase, slot) for rank in RANKS for phase in PHASES for slot in SLOTS]
    states = [(finite_tensors_of(observation, _file(*name)), name[2]) for name in names]
    return _sum([optimizer_steps(tensors, slot) for tensors, slot in states])


def _file(rank: int, group: str, slot: str) -> str:
    return f"rank-{rank}/{group}/slot-{slot}.safetensors"


def _unlike(observation: Observation) -> Measured:
    """Count the tensors in which the slots' adapters differ before the first phase."""
    differences = _differences(observation, [_file(0, "start", slot) for slot in SLOTS])
    return differences if isinstance(differences, Unreadable) else len(differences)


def _differing(observation: Observation) -> tuple[Measured, str, str | None]:
    """Count the tensors that the ranks do not hold alike, at the start and after each phase; the first is named."""
    found: list[str] = []
    for group in ("start", *PHASES):
        for slot in SLOTS:
            differences = _differences(observation, [_file(rank, group, slot) for rank in RANKS])
            if isinstance(differences, Unreadable):
                return differences, "tensors", None
            found += [f"{key} of slot {slot} differs between the ranks, group {group}" for key in differences]
    return len(found), "tensors", found[0] if found else None


def _differences(observation: Observation, files: Sequence[str]) -> list[str] | Unreadable:
    """Name the tensors that are not the same, bit for bit, in two files."""
    one, other = (tensors_of(observation, file) for file in files)
    return differing(one, other)


def _digests(observation: Observation) -> Measured:
    """Count the slots of whose states the ranks themselves said different digests."""
    found, phases = 0, set()
    for event in observation.of("replicas"):
        digests = None if isinstance(event.body, Unreadable) else event.body.get("digests")
        if not isinstance(digests, Mapping) or set(digests) != set(SLOTS):
            return Unreadable(f"is unknown: event {event.sequence} lacks a slot's digests")
        phases.add((event.rank, event.text("phase")))
        found += sum(not _alike(each) for each in digests.values())
    wanted = {(rank, phase) for rank in RANKS for phase in PHASES}
    return found if phases == wanted else Unreadable("is unknown: a rank compared no replicas after a phase")


def _alike(digests: object) -> bool:
    return isinstance(digests, list) and len(digests) == len(RANKS) and all(each == digests[0] for each in digests)


def _said_apart(observation: Observation, kind: str, what: str) -> Measured:
    """Count the steps of which the ranks did not say the same."""
    said: list[dict[object, object]] = [{}, {}]
    for event in observation.of(kind):
        if event.rank in RANKS and not isinstance(event.body, Unreadable):
            said[event.rank][event.whole("step")] = event.body.get(what)
    steps = said[0].keys() | said[1].keys()
    if not steps or None in (value for each in said for value in each.values()):
        return Unreadable(f"is unknown: a {kind} is missing, or says no {what}")
    return sum(said[0].get(step) != said[1].get(step) for step in steps)


def _smaller(observation: Observation) -> Iterator[Criterion]:
    """Judge, on the narrow virtual cards, that the large phase did not fit whole: the plan had to be a smaller one."""
    if observation.ground is Ground.REHEARSAL:
        yield some("plans_below_whole", len([each for each in observation.of("forecast") if _below(each)]), "plans")


def _below(event: StampedEvent) -> bool:
    return event.text("rung") not in (None, "whole")
