"""Repeated parts of a path: how often they repeat, and the same path with another count.

A stage that ends in a number, ``forward/layer/3``, is one instance of the section ``layer``. A section may be given
another count when it repeats with a period (every layer alike, or every fourth an attention layer) and when the first
instance after some period does exactly what the first one of it did: same events, same streams, sizes by the same
rules, and blocks handed on over the same distance. Then the instances of that period may follow each other again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from trainer_rank.errors import TapeError
from trainer_rank.tapes.passes import Action, Operation
from trainer_rank.tapes.tape import Path

_INSTANCE = re.compile(r"(?P<pattern>(?:.*/)?(?P<section>[^/]+))/(?P<index>\d+)")


class _Run(NamedTuple):
    """Operations [first, end) under one stage; ``instance`` is its number, None outside the section."""

    stage: str
    pattern: str
    instance: int | None
    first: int
    end: int


class _Home(NamedTuple):
    """Where an allocation is born, or an ancestor dies: its run's pattern and instance, and its place there."""

    pattern: str
    instance: int | None
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
        indices = sorted({run.instance for run in self.runs if run.instance is not None})
        if indices != list(range(len(indices))):
            raise TapeError(f"section {section} has instances {indices}; numbers from 0 without gaps are needed")
        self.count = len(indices)
        self.homes = _homes(path, self.runs)

    def to(self, count: int) -> Path:
        if count == self.count:
            return self.path
        if not self.count:
            raise TapeError(
                f"no stage names a {self.section}, so none may be repeated; "
                f"record a pass of {count}, or one whose stages name every {self.section}"
            )
        if count < 1:
            raise TapeError(f"section {self.section} has {self.count} instances; it cannot have {count}")
        period = self._period()
        more = count - self.count
        if more % period:
            raise TapeError(
                f"section {self.section} repeats every {period} instances; {count} are no whole number more"
            )
        return _Rebuild(self, self._first(period if more > 0 else -more), period, more).path()

    def _period(self) -> int:
        """Return the least distance over which all instances do much the same; at the ends they may differ a little."""
        contents = [self._content(index) for index in range(self.count)]
        for period in range(1, self.count):
            if all(_much_alike(one, other) for one, other in zip(contents, contents[period:], strict=False)):
                return period
        raise TapeError(
            f"section {self.section}: its {self.count} instances are of different kinds and do not repeat, so none may "
            "be repeated; record a pass with more of them, or with the count that is needed"
        )

    def _first(self, distance: int) -> int:
        """Return the middle instance of those that do exactly what the instance at that distance does."""
        signatures = [self._signature(index) for index in range(self.count)]
        found = [index for index in range(self.count - distance) if signatures[index] == signatures[index + distance]]
        if not found:
            raise TapeError(
                f"section {self.section}: no two of its {self.count} instances are alike at a distance of {distance}; "
                "record a pass with more of them, or with the count that is needed"
            )
        return found[len(found) // 2]

    def _content(self, index: int) -> Counter[Hashable]:
        return Counter(
            (run.pattern, action, stream, self._explanation(subject))
            for run in self.runs
            if run.instance == index
            for action, subject, stream in self.path.operations[run.first : run.end]
            if action is not Action.RELEASE
        )

    def _explanation(self, subject: int) -> int:
        return self.path.allocations[subject] if subject >= 0 else self.path.ancestors[~subject]

    def _signature(self, index: int) -> Hashable:
        return tuple(
            (run.pattern, tuple(self._relative(each, index) for each in self.path.operations[run.first : run.end]))
            for run in self.runs
            if run.instance == index
        )

    def _relative(self, operation: Operation, index: int) -> Hashable:
        action, subject, stream = operation
        if action is Action.RELEASE:
            return action
        home = self.homes[subject]
        distance = ("outside", subject) if home.instance is None else (home.pattern, home.instance - index)
        return action, stream, self._explanation(subject), distance, home.place


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
                place = places.setdefault((run.pattern, run.instance), 0)
                homes[subject] = _Home(run.pattern, run.instance, place)
                places[run.pattern, run.instance] = place + 1
    return homes


def _much_alike(one: Counter[Hashable], other: Counter[Hashable]) -> bool:
    """Tell whether four fifths of what either does is done by both: the first instance fills caches besides."""
    return 5 * (one & other).total() >= 4 * (one | other).total()


class _Rebuild:
    """Writes the path anew with ``more`` instances: copies of the period that begins at ``first``, or without some."""

    def __init__(self, stretch: _Stretch, first: int, period: int, more: int) -> None:
        self.source = stretch
        self.first = first
        self.period = period
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
        last = self.first + max(self.period, -self.more)
        before = -1
        for inside, group in groupby(self.source.runs, lambda run: run.instance in range(self.first, last)):
            runs = list(group)
            if not inside:
                for run in runs:
                    yield (
                        run,
                        run.instance if run.instance is None or run.instance < self.first else run.instance + self.more,
                    )
                    before = -1 if run.instance is None else run.instance
            elif self.more > 0:
                ascending = 0 <= before < self.first or (before < 0 and self.first == 0)
                shifts = range(0, self.more + 1, self.period)
                for shift in shifts if ascending else reversed(shifts):
                    yield from ((run, run.instance + shift) for run in runs if run.instance is not None)

    def _emit(self, run: _Run, index: int | None) -> None:
        stage = run.stage if index is None else f"{run.pattern}/{index}"
        self.stages.append((len(self.operations), stage))
        homes, names = self.source.homes, self.names
        for operation in self.source.path.operations[run.first : run.end]:
            action, subject, stream = operation
            if action is Action.RELEASE:
                self.operations.append(operation)
                continue
            home = self._moved(homes[subject], run.instance, index)
            name = names.get(home)
            if name is None:
                name = names[home] = self._new(subject)
            self.operations.append(Operation(action, name, stream))

    def _new(self, subject: int) -> int:
        old = self.source.path
        if subject >= 0:
            self.allocations.append(old.allocations[subject])
            return len(self.allocations) - 1
        self.ancestors.append(old.ancestors[~subject])
        return ~(len(self.ancestors) - 1)

    def _moved(self, home: _Home, old: int | None, new: int | None) -> _Home:
        """Return where the block lives now: over the same distance from an instance, at its own place otherwise.

        What spans all that is repeated, the last layer's output freed in the first one, keeps to both ends instead.
        """
        own = home.instance
        if own is None:
            return home
        if old is not None and new is not None and not self._spans(min(own, old), max(own, old)):
            return _Home(home.pattern, own + new - old, home.place)
        kept = self.first + (self.period if self.more > 0 else 0)
        return _Home(home.pattern, own if own < kept else own + self.more, home.place)

    def _spans(self, low: int, high: int) -> bool:
        return low < self.first and high >= self.first + max(self.period, -self.more)
