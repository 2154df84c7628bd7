"""Fit a tape: align recordings, then explain every allocation by the plan's features."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby, pairwise
from pathlib import Path as FilePath

from trainer_rank.allocator.replay import Divergence, replay
from trainer_rank.allocator.trace import Trace
from trainer_rank.errors import TapeError
from trainer_rank.features import FEATURES, PACKED_TOKENS, TOKENS
from trainer_rank.tapes.align import align
from trainer_rank.tapes.carry import carry
from trainer_rank.tapes.explain import Explanation, Sample, explain
from trainer_rank.tapes.passes import UNNAMED_STAGE, Action, Operation, Pass, read_pass
from trainer_rank.tapes.repeats import layer_stages
from trainer_rank.tapes.tape import Part, Path, Probe, Tape


def fit(traces: Sequence[Trace], provenance: Mapping[str, str] | None = None) -> Tape:
    """Fit one tape from recordings of any sizes and topologies.

    TapeError when a recording contradicts itself, was cut, or is not what PyTorch's default allocator does.
    """
    if not traces:
        raise TapeError("no recordings were given; give at least one trace")
    drafts = _drafts([_checked(trace) for trace in traces])
    groups = _Groups(drafts)
    for key in dict.fromkeys(draft.key for draft in drafts):
        same_topology = [draft for draft in drafts if draft.key == key]
        for left, right in pairwise(same_topology):
            groups.join(left, right)
    peers = set()
    for left, right in _across(drafts):
        peers |= groups.pairs(left, right)
    names, samples = groups.classes()
    explanations = _explained(samples)
    links = {(names[ours], names[theirs]) for ours, theirs in peers}
    explanations = carry(explanations, samples, links)
    table = list(dict.fromkeys(explanations))
    places = {explanation: place for place, explanation in enumerate(table)}
    numbers = {node: places[explanations[name]] for node, name in names.items()}
    parts = tuple(
        Part(context, layers or None, tuple(draft.path(numbers) for draft in members))
        for (context, layers), members in groupby(drafts, key=lambda draft: draft.key)
    )
    return Tape(tuple(table), parts, dict(provenance or {}))


def _explained(samples: Sequence[Sequence[Sample]]) -> list[Explanation]:
    """Explain each allocation's sizes; what has the same sizes at the same features, in another layer say, once."""
    known: dict[tuple[tuple[tuple[tuple[str, int], ...], int], ...], Explanation] = {}
    found = []
    for each in samples:
        key = tuple((tuple(features.items()), size) for features, size in each)
        if key not in known:
            known[key] = explain(each)
        found.append(known[key])
    return found


def _checked(trace: Trace) -> tuple[Pass, Probe]:
    recorded = read_pass(trace)
    result = replay(trace)
    if result.exact and any(note.startswith("the snapshot after differs") for note in result.notes):
        raise TapeError(f"{trace.source}: incomplete, {result.notes[0]}; record again")
    if not result.exact:
        raise TapeError(
            f"{trace.source}: not what PyTorch's default allocator does, {where(result.divergence)}; "
            "record under default allocator settings"
        )
    name = FilePath(trace.source).name
    return recorded, Probe(recorded.features, name, trace.before.allocated, result.peak_allocated, result.peak_reserved)


def where(divergence: Divergence | None) -> str:
    """Name the event at which a recording and the allocator's model part."""
    if divergence is None:
        return "the pass ended early"
    place = "its peaks" if divergence.event is None else f"event {divergence.event}"
    return f"{place}: expected {divergence.expected}, got {divergence.got}"


@dataclass
class _Draft:
    """One event order with the recordings that share it; ``ordinal`` tells drafts apart."""

    ordinal: int
    passes: list[Pass]
    probes: list[Probe]

    @property
    def key(self) -> tuple[int, int]:
        return self.passes[0].context, self.passes[0].layers or 0

    @property
    def operations(self) -> tuple[Operation, ...]:
        return self.passes[0].operations

    def samples(self, subject: int) -> tuple[Sample, ...]:
        """Return what the allocation or ancestor took in each recording."""
        return tuple(
            (each.features, each.sizes[subject] if subject >= 0 else each.ancestors[~subject]) for each in self.passes
        )

    def path(self, names: Mapping[tuple[int, int], int]) -> Path:
        """Return the finished path; ``names`` maps (draft, subject) to an explanation."""
        return Path(
            operations=self.operations,
            stages=self._stages(names),
            allocations=tuple(names[self.ordinal, k] for k in range(len(self.passes[0].sizes))),
            ancestors=tuple(names[self.ordinal, ~k] for k in range(len(self.passes[0].ancestors))),
            probes=tuple(self.probes),
        )

    def _stages(self, names: Mapping[tuple[int, int], int]) -> tuple[tuple[int, str], ...]:
        recorded = self.passes[0]
        if set(recorded.stages) == {UNNAMED_STAGE} and recorded.layers:
            explanations = [names.get((self.ordinal, each.subject), -1) for each in self.operations]
            return layer_stages(self.operations, explanations, recorded.layers)
        groups = groupby(enumerate(recorded.stages), key=lambda item: item[1])
        return tuple((next(group)[0], stage) for stage, group in groups)


def _drafts(recordings: Iterable[tuple[Pass, Probe]]) -> list[_Draft]:
    ordered = sorted(recordings, key=lambda item: (item[0].context, item[0].layers or 0, _place(item[0].features)))
    found: dict[Hashable, _Draft] = {}
    for recorded, probe in ordered:
        key = (recorded.context, recorded.layers, recorded.operations, recorded.stages)
        draft = found.setdefault(key, _Draft(len(found), [], []))
        draft.passes.append(recorded)
        draft.probes.append(probe)
    return list(found.values())


def _place(features: Mapping[str, int]) -> list[int]:
    return [features.get(name, 0) for name in FEATURES]


def _across(drafts: Sequence[_Draft]) -> Iterable[tuple[_Draft, _Draft]]:
    """Pair each path with the one of every other topology that was seen at the nearest ratio of tokens."""
    for draft in drafts:
        others: dict[tuple[int, int], list[_Draft]] = {}
        for other in drafts:
            if other.key > draft.key and other.key[1] == draft.key[1]:
                others.setdefault(other.key, []).append(other)
        for candidates in others.values():
            yield draft, min(candidates, key=lambda other: _distance(draft, other))


def _distance(left: _Draft, right: _Draft) -> Fraction:
    """Return the least ratio of tokens between a recording of one and of the other."""
    pairs = [(a.features, b.features) for a in left.passes for b in right.passes]
    name = TOKENS if all(TOKENS in each for pair in pairs for each in pair) else PACKED_TOKENS
    return min(Fraction(max(a[name], b[name], 1), max(min(a[name], b[name]), 1)) for a, b in pairs)


Node = tuple[int, int]
"""A draft's ordinal and the subject of an operation in it."""


class _Groups:
    """Which allocations of which drafts are one and the same."""

    def __init__(self, drafts: Sequence[_Draft]) -> None:
        self.drafts = drafts
        self.parent: dict[Node, Node] = {}
        for draft in drafts:
            first = draft.passes[0]
            for subject in (*range(len(first.sizes)), *(~k for k in range(len(first.ancestors)))):
                self.parent[draft.ordinal, subject] = (draft.ordinal, subject)

    def join(self, left: _Draft, right: _Draft) -> None:
        """Make the allocations that alignment pairs one."""
        for ours, theirs in self.pairs(left, right):
            self.parent[self._root(theirs)] = self._root(ours)

    def pairs(self, left: _Draft, right: _Draft) -> set[tuple[Node, Node]]:
        """Return the pairs of allocations and ancestors that are one and the same in both drafts."""
        alike = _Alike(left, right)
        matches = align(len(left.operations), len(right.operations), alike.same, alike.kind)
        births = set()
        for i, j in matches:
            ours, theirs = left.operations[i], right.operations[j]
            if ours.action is Action.ALLOCATE or (ours.subject < 0 and ours.action is not Action.COMPLETE_FREE):
                births.add(((left.ordinal, ours.subject), (right.ordinal, theirs.subject)))
        return births

    def classes(self) -> tuple[dict[Node, int], list[list[Sample]]]:
        """Return the class of every node, numbered in order of first use, and the samples of every class."""
        names: dict[Node, int] = {}
        numbers: dict[Node, int] = {}
        samples: list[list[Sample]] = []
        for node in self.parent:
            root = self._root(node)
            if root not in numbers:
                numbers[root] = len(samples)
                samples.append([])
            names[node] = numbers[root]
            samples[numbers[root]].extend(self.drafts[node[0]].samples(node[1]))
        return names, samples

    def _root(self, node: Node) -> Node:
        while self.parent[node] != node:
            self.parent[node] = self.parent[self.parent[node]]
            node = self.parent[node]
        return node


class _Alike:
    """Whether operations of two drafts may be one and the same: kind, stream, and sizes that one rule explains."""

    def __init__(self, left: _Draft, right: _Draft) -> None:
        self.left = left
        self.right = right
        self.known: dict[tuple[tuple[int, ...], tuple[int, ...]], bool] = {}
        self.samples: tuple[dict[int, tuple[Sample, ...]], dict[int, tuple[Sample, ...]]] = ({}, {})

    def kind(self, is_right: bool, index: int) -> Hashable:
        """Return what an operation is, without its size."""
        operation = (self.right if is_right else self.left).operations[index]
        return operation.action, operation.stream, operation.subject < 0

    def same(self, i: int, j: int) -> bool:
        """Tell whether operation i of the left may be operation j of the right."""
        ours, theirs = self.left.operations[i], self.right.operations[j]
        if ours.action != theirs.action or ours.stream != theirs.stream or (ours.subject < 0) != (theirs.subject < 0):
            return False
        left, right = self._samples(0, ours.subject), self._samples(1, theirs.subject)
        key = tuple(size for _, size in left), tuple(size for _, size in right)
        if key not in self.known:
            contexts = self.left.passes[0].context, self.right.passes[0].context
            self.known[key] = one_rule(left, right) or _shared_out(left, right, contexts)
        return self.known[key]

    def _samples(self, side: int, subject: int) -> tuple[Sample, ...]:
        cache = self.samples[side]
        if subject not in cache:
            cache[subject] = (self.right if side else self.left).samples(subject)
        return cache[subject]


def one_rule(left: Sequence[Sample], right: Sequence[Sample]) -> bool:
    """Tell whether one simple rule gives both: a constant, a multiple of one feature, or the line of one side."""
    together = [*left, *right]
    if len({size for _, size in together}) == 1:
        return True
    for name in FEATURES:
        if all(features.get(name) for features, _ in together):
            features, size = together[0]
            if all(size * other[name] == bytes_there * features[name] for other, bytes_there in together):
                return True
            if _predicts(name, left, right) or _predicts(name, right, left):
                return True
    return False


def _shared_out(left: Sequence[Sample], right: Sequence[Sample], contexts: tuple[int, int]) -> bool:
    """Tell whether both are one constant that is shared out over the context ranks of either topology."""
    wholes = {size * contexts[0] for _, size in left} | {size * contexts[1] for _, size in right}
    return len(wholes) == 1


def _predicts(name: str, known: Sequence[Sample], asked: Sequence[Sample]) -> bool:
    points = sorted({(features[name], size) for features, size in known})
    if len(points) < 2 or points[0][0] == points[-1][0]:
        return False
    run, rise = points[-1][0] - points[0][0], points[-1][1] - points[0][1]
    return all((size - points[0][1]) * run == rise * (features[name] - points[0][0]) for features, size in asked)
