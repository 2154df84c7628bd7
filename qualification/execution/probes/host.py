"""What a run may leave on its host: processes, groups, shared memory, sockets, ports, caches and its worktree.

Each function returns what it read and what is left; it raises OSError when it cannot read, which is never clean.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from qualification.execution.environment import cache_folder, retire_caches
from qualification.execution.generated import keep_generated
from qualification.execution.identity import PROC, Entry, all_entries, find, record
from qualification.execution.supervision import Census
from qualification.execution.sweep import survivors
from qualification.records import Figure, Process

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, never written to
UNIX_SOCKETS = Path("/proc/net/unix")
TCP_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
LISTENING = "0A"
HELD = ("/dev/nvidia", "/dev/shm/")  # noqa: S108 - names of what others hold open

Values = dict[str, Figure | bool | tuple[str, ...]]


def leftover_processes(censuses: Iterable[Census], known: Iterable[Process]) -> tuple[Process, ...]:
    """Return every process of the run that still exists, its supervisors included.

    Found by identity (``known``: what the sweeps saw), below and beside them, by scope and by token.
    """
    left: dict[tuple[int, int], Process] = {}
    for census in censuses:
        for entry in survivors(census):
            left[entry.key] = record(entry)
        if (supervisor := find(census.supervisor)) is not None and supervisor.state != "zombie":
            left[supervisor.key] = record(supervisor)
    for process in known:
        if (still := find(process)) is not None:
            left[still.key] = record(still)
    return tuple(left.values())


def describe(process: Process) -> str:
    """Return a line about a process that is left: its identity, age, what it waits in, and which devices it holds."""
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - process.start_ticks / os.sysconf("SC_CLK_TCK")
    words = [process.command, process.state, f"started {age:.0f} s ago"]
    if process.state == "uninterruptible":
        words.append(f"waits in {_wait_channel(process.pid)}")
    if held := _held(process.pid):
        words.append(f"holds {', '.join(held)}")
    return f"pid {process.pid} ({', '.join(words)})"


def _wait_channel(pid: int) -> str:
    try:
        return (PROC / str(pid) / "wchan").read_text() or "an unnamed place of the kernel"
    except OSError as error:
        return f"an unknown place of the kernel ({error.strerror})"


def _held(pid: int) -> list[str]:
    """Return the devices and shared memory that a process has open, as far as it can be seen."""
    names: set[str] = set()
    with suppress(OSError):
        for link in (PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):
                names.add(str(link.readlink()))
    return sorted(name for name in names if name.startswith(HELD))


def leftover_groups(known: Sequence[Process]) -> tuple[Entry, ...]:
    """Return processes that still live in a session which a process of the run opened and has left by dying."""
    alive = {entry.pid: entry for entry in all_entries()}
    opened = {process.pid for process in known if process.pid not in alive}
    return tuple(entry for entry in alive.values() if entry.session in opened)


def shared_memory(token: str) -> tuple[str, ...]:
    """Return the POSIX shared memory segments whose name carries the run's token."""
    return tuple(sorted(str(path) for path in SHARED_MEMORY.iterdir() if token in path.name))


def sockets(token: str) -> tuple[str, ...]:
    """Return the Unix sockets, abstract ones included, whose name carries the run's token."""
    names = (line.split()[-1] for line in UNIX_SOCKETS.read_text(errors="replace").splitlines()[1:])
    return tuple(sorted({name for name in names if token in name}))


def listening(ports: Iterable[int]) -> tuple[str, ...]:
    """Return which of the run's TCP ports somebody still listens on."""
    wanted = set(ports)
    open_ports = set[int]()
    for table in TCP_TABLES:
        if not table.exists():  # a host without IPv6
            continue
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING:
                open_ports.add(int(fields[1].rpartition(":")[2], 16))
    return tuple(str(port) for port in sorted(wanted & open_ports))


def retire(folders: Sequence[Path]) -> tuple[str, ...]:
    """Delete the private compile caches of a run, prove that they are gone, and return which there were.

    What explains a failure is kept first.
    """
    for folder in folders:
        keep_generated(folder)
    retired = tuple(name for folder in folders for name in retire_caches(folder))
    for folder in folders:
        if cache_folder(folder).exists():
            raise OSError(f"{cache_folder(folder)} came back after it was deleted")
    return retired


def existing(paths: Iterable[Path]) -> tuple[str, ...]:
    """Return which of the paths exist."""
    return tuple(str(path) for path in paths if path.exists())


Check = Callable[[], tuple[Values, str | None]]
"""Looks at one thing: returns what it read and, when something is left, why that is so. Raises when it cannot read."""
