"""The ladder that ends every process of a run: TERM, wait, KILL until two empty scans; then say what was there."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from qualification.execution.cgroup import Scope
from qualification.execution.identity import Entry, all_entries, find, read_entry, record, send, starts_with
from qualification.execution.supervision import Census
from qualification.records import Process

TOKEN_VARIABLE = "QUALIFY_RUN_TOKEN"  # noqa: S105 - a name, and the token tells processes apart, it opens nothing
EMPTY_SCANS = 2


@dataclass(frozen=True)
class Swept:
    """What a sweep found and did. ``kill_ms`` is the time from the first KILL to the end, None when TERM was enough."""

    swept: tuple[Process, ...]
    leftovers: tuple[Process, ...]
    duration_ms: int
    kill_ms: int | None


def descendants(roots: Iterable[int], entries: Iterable[Entry] | None = None) -> list[Entry]:
    """Return every process below ``roots`` by parentage, the roots themselves excluded."""
    children: dict[int, list[Entry]] = {}
    for entry in all_entries() if entries is None else entries:
        children.setdefault(entry.parent, []).append(entry)
    found: list[Entry] = []
    waiting = list(roots)
    seen = set(waiting)
    while waiting:
        for entry in children.get(waiting.pop(), ()):
            if entry.pid not in seen:
                seen.add(entry.pid)
                found.append(entry)
                waiting.append(entry.pid)
    return found


def members(scope: Scope | None) -> list[Entry]:
    """Return the entries of a scope's members; a zombie has left its cgroup already."""
    pids = scope.members() if scope is not None else ()
    return [entry for pid in pids if (entry := read_entry(pid)) is not None]


def carriers(token: str) -> list[Entry]:
    """Return every process whose starting environment carries the run's token, wherever it hangs in the tree."""
    return [entry for entry in all_entries() if starts_with(entry.pid, TOKEN_VARIABLE, token)]


def survivors(census: Census) -> list[Entry]:
    """Return what is still alive of a run whose supervisor is dead.

    Found by recorded identity and what hangs below it, by the scope where there is one, and by the token.
    """
    recorded = [entry for process in census.processes if (entry := find(process)) is not None]
    scope = Scope(Path(census.cgroup)) if census.cgroup else None
    roots = {entry.key: entry for entry in [*recorded, *members(scope), *carriers(census.token)]}
    below = descendants([entry.pid for entry in roots.values()])
    found = roots | {entry.key: entry for entry in below}
    found.pop((census.supervisor.pid, census.supervisor.start_ticks), None)
    return list(found.values())


def sweep_census(census: Census, *, terminate_seconds: float, kill_seconds: float) -> Swept:
    """End what a dead supervisor left behind and remove its scope."""
    scope = Scope(Path(census.cgroup)) if census.cgroup else None
    result = sweep(
        lambda: survivors(census), terminate_seconds=terminate_seconds, kill_seconds=kill_seconds, scope=scope
    )
    if scope is not None:
        scope.remove()
    return result


@dataclass
class _Ladder:
    look: Callable[[], list[Entry]]
    pause: Callable[[float], None]
    scope: Scope | None
    seen: dict[tuple[int, int], Process] = field(default_factory=dict)
    refused: set[tuple[int, int]] = field(default_factory=set)
    told: set[tuple[int, int]] = field(default_factory=set)

    def scan(self) -> list[Entry]:
        alive = self.look()
        for entry in alive:
            self.seen.setdefault(entry.key, record(entry))
        return alive

    def tell(self, entries: Iterable[Entry], *numbers: signal.Signals) -> None:
        for entry in entries:
            try:
                for number in numbers:
                    send(entry, number)
            except PermissionError:
                self.refused.add(entry.key)

    def terminate(self, seconds: float) -> list[Entry]:
        """Ask politely, stopped ones included, and wait until all are gone or the time is over."""
        deadline = time.monotonic() + seconds
        wait = 0.01
        while alive := self.scan():
            new = [entry for entry in alive if entry.key not in self.told]
            self.told.update(entry.key for entry in new)
            self.tell(new, signal.SIGTERM, signal.SIGCONT)
            left = deadline - time.monotonic()
            if left <= 0:
                return alive
            self.pause(min(wait, left))
            wait = min(wait * 1.5, 0.2)
        return []

    def kill(self, seconds: float, empty: int) -> list[Entry]:
        """Kill whatever is there until two scans in a row find nothing (``empty`` did so far), or the time is over."""
        deadline = time.monotonic() + seconds
        while True:
            alive = self.scan()
            empty = 0 if alive else empty + 1
            if empty >= EMPTY_SCANS or time.monotonic() >= deadline:
                return alive
            if alive and self.scope is not None:
                self.scope.kill()
            self.tell(alive, signal.SIGKILL)
            self.pause(0.02)


def sweep(
    look: Callable[[], list[Entry]],
    *,
    terminate_seconds: float,
    kill_seconds: float,
    pause: Callable[[float], None] = time.sleep,
    scope: Scope | None = None,
) -> Swept:
    """Run the ladder over whatever ``look`` finds and return what was swept and what is left.

    ``look`` reaps what is the caller's to reap before it looks; ``pause`` may do other work (drain pipes) meanwhile.
    The wait is bounded by ``terminate_seconds + kill_seconds`` whatever the processes do.
    """
    ladder = _Ladder(look, pause, scope)
    started = time.monotonic()
    before_kill = ladder.terminate(terminate_seconds)
    kill_started = time.monotonic()
    left = ladder.kill(kill_seconds, empty=0 if before_kill else 1)
    ended = time.monotonic()
    leftovers = {entry.key: record(entry, state="foreign" if entry.key in ladder.refused else None) for entry in left}
    return Swept(
        swept=tuple(process for key, process in ladder.seen.items() if key not in leftovers),
        leftovers=tuple(leftovers.values()),
        duration_ms=round((ended - started) * 1000),
        kill_ms=round((ended - kill_started) * 1000) if before_kill else None,
    )
