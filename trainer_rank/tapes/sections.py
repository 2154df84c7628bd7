"""Repeated parts of a path: how often they repeat, and the same path with another count.

A stage that ends in a number, ``forward/layer/3``, is one instance of the section ``layer``. A section may be given
another count when two neighbouring instances do the same thing in every phase: same events, same streams, sizes by the
same rules, and blocks handed on over the same distance. The copies then do it too.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from trainer_rank.errors import TapeError
from trainer_rank.tapes.passes import Action, Operation
from trainer_rank.tapes.tape import Path

_INSTANCE = re.compile(r"(?P<pattern>(?:.*/)?(?P<section>[^/]+))/(?P<index>\d+)")


@dataclass(frozen=True)
class _Run:
    """Operations [first, end) under one stage; ``index`` is its instance, None outside the section."""

    stage: str
    pattern: str
    index: int | None
    first: int
    end: int


@dataclass(frozen=True)
class _Home:
    """Where an allocation is born, or an ancestor dies: its run's pattern and instance, and its place there."""

    pattern: str
    index: int | None
    place: int


def section_counts(path: Path) -> dict[str, int]:
    """Return how many instances each section of the path has."""
    found: dict[str, set[int]] = {}
    for _, stage in path.stages:
        match = _INSTANCE.fullmatch(stage)
        if match:
            found.setdefault(match["section"], set()).add(int(match["index"]))
    return {section: len(indices) for section, indices in found.items()}


def with_count(path: Path, section: str, count: int) -> Path:
    """Return ``path`` with ``count`` instances of ``section``.

    TapeError when no two neighbouring instances are alike, or when fewer instances are asked for than differ.
    """
    return _Stretch(path, section).to(count)


class _Stretch:
    def __init__(self, path: Path, section: str) -> None:
        self.path = path
        self.section = section
        self.runs = list(_runs(path, section))
        indices = sorted({run.index for run in self.runs if run.index is not None})
        if indices != list(range(len(indices))):
            raise TapeError(f"section {section} has instances {indices}; numbers from 0 without gaps are needed")
        self.count = len(indices)
        self.homes = _homes(path, self.runs)

    def to(self, count: int) -> Path:
        if count == self.count:
            return self.path
        first, last = self._alike()
        more = count - self.count
        if count < 1 or -more > last - first:
            raise TapeError(f"section {self.section}: {count} instances are fewer than those that differ; record them")
        return _Rebuild(self, first, more).path()

    def _alike(self) -> tuple[int, int]:
        """Return the longest range of neighbouring instances that do the same thing."""
        signatures = [self._signature(index) for index in range(self.count)]
        best, start = (0, 0), 0
        for index in range(1, self.count + 1):
            if index == self.count or signatures[index] != signatures[start]:
                if index - 1 - start > best[1] - best[0]:
                    best = (start, index - 1)
                start = index
        if best[0] == best[1]:
            raise TapeError(
                f"section {self.section}: no two of its {self.count} instances are alike, so none may be repeated; "
                "record a pass with the count that is needed"
            )
        return best

    def _signature(self, index: int) -> Hashable:
        return tuple(
            (run.pattern, tuple(self._relative(each, index) for each in self.path.operations[run.first : run.end]))
            for run in self.runs
            if run.index == index
        )

    def _relative(self, operation: Operation, index: int) -> Hashable:
        action, subject, stream = operation
        if action is Action.RELEASE:
            return action
        home = self.homes[subject]
        explanation = self.path.allocations[subject] if subject >= 0 else self.path.ancestors[~subject]
        distance = ("outside", subject) if home.index is None else (home.pattern, home.index - index)
        return action, stream, explanation, distance, home.place


def _runs(path: Path, section: str) -> Iterator[_Run]:
    ends = [*(first for first, _ in path.stages[1:]), len(path.operations)]
    for (first, stage), end in zip(path.stages, ends, strict=True):
        match = _INSTANCE.fullmatch(stage)
        if match and match["section"] == section:
            yield _Run(stage, match["pattern"], int(match["index"]), first, end)
        else:
            yield _Run(stage, stage, None, first, end)


def _homes(path: Path, runs: Sequence[_Run]) -> dict[int, _Home]:
    homes: dict[int, _Home] = {}
    places: dict[tuple[str, int | None], int] = {}
    for run in runs:
        for action, subject, _ in path.operations[run.first : run.end]:
            if subject not in homes and action is not Action.RELEASE and (subject < 0 or action is Action.ALLOCATE):
                place = places.setdefault((run.pattern, run.index), 0)
                homes[subject] = _Home(run.pattern, run.index, place)
                places[run.pattern, run.index] = place + 1
    return homes


class _Rebuild:
    """Writes the path anew with ``more`` copies of instance ``template`` (or so many of its likes left out)."""

    def __init__(self, stretch: _Stretch, template: int, more: int) -> None:
        self.source = stretch
        self.template = template
        self.more = more
        self.names: dict[_Home, int] = {}
        self.operations: list[Operation] = []
        self.stages: list[tuple[int, str]] = []
        self.allocations: list[int] = []
        self.ancestors: list[int] = []

    def path(self) -> Path:
        for run, index in self._order():
            self._emit(run, index)
        old = self.source.path
        return Path(
            tuple(self.operations), tuple(self.stages), tuple(self.allocations), tuple(self.ancestors), old.probes
        )

    def _order(self) -> Iterator[tuple[_Run, int | None]]:
        """Yield every run to write, with the instance that it becomes."""
        ascending = self._directions()
        for run in self.source.runs:
            if run.index is None or run.index < self.template:
                yield run, run.index
            elif run.index == self.template:
                copies = [(run, self.template + each) for each in range(max(0, self.more) + 1)]
                yield from copies if ascending[run.pattern] else reversed(copies)
            elif run.index > self.template - min(0, self.more):
                yield run, run.index + self.more

    def _directions(self) -> dict[str, bool]:
        seen: dict[str, list[int]] = {}
        for run in self.source.runs:
            if run.index is not None:
                seen.setdefault(run.pattern, []).append(run.index)
        for pattern, indices in seen.items():
            if indices not in (sorted(set(indices)), sorted(set(indices), reverse=True)):
                raise TapeError(f"section {self.source.section}: {pattern} runs out of order, so it cannot be repeated")
        return {pattern: indices == sorted(indices) for pattern, indices in seen.items()}

    def _emit(self, run: _Run, index: int | None) -> None:
        stage = run.stage if index is None else f"{run.pattern}/{index}"
        self.stages.append((len(self.operations), stage))
        for action, subject, stream in self.source.path.operations[run.first : run.end]:
            if action is Action.RELEASE:
                self.operations.append(Operation(action, subject, stream))
                continue
            home = self._moved(self.source.homes[subject], run.index, index)
            name = self.names.get(home)
            if name is None:
                name = self.names[home] = self._new(subject)
            self.operations.append(Operation(action, name, stream))

    def _new(self, subject: int) -> int:
        old = self.source.path
        if subject >= 0:
            self.allocations.append(old.allocations[subject])
            return len(self.allocations) - 1
        self.ancestors.append(old.ancestors[~subject])
        return ~(len(self.ancestors) - 1)

    def _moved(self, home: _Home, old: int | None, new: int | None) -> _Home:
        """Return where the block lives now: over the same distance from an instance, at its own place otherwise."""
        if home.index is None:
            return home
        if old is not None and new is not None:
            return _Home(home.pattern, home.index + new - old, home.place)
        moved = home.index if home.index <= self.template else home.index + self.more
        return _Home(home.pattern, moved, home.place)
