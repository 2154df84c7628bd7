"""Processes by identity: pid, start time in clock ticks and boot, never by name. Source: ``man 5 proc``."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from qualification.records import Process

PROC = Path("/proc")
_STATES = {"Z": "zombie", "X": "zombie", "D": "uninterruptible", "T": "stopped", "t": "stopped"}


class Entry(NamedTuple):
    """One line of the process table at one moment."""

    pid: int
    parent: int
    session: int
    start_ticks: int
    state: str
    command: str

    @property
    def key(self) -> tuple[int, int]:
        """Return what tells this process from a later one with the same pid, within one boot."""
        return self.pid, self.start_ticks


@functools.cache
def boot_id() -> str:
    """Return the identity of the running boot, so that a pid of an earlier one is never taken for ours."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def read_entry(pid: int) -> Entry | None:
    """Return the process table's line of ``pid``, or None when there is no such process."""
    line = _read(f"{PROC}/{pid}/stat")
    if line is None:
        return None
    name_start, name_end = line.index(b"("), line.rindex(b")")  # the name may itself hold spaces and brackets
    fields = line[name_end + 2 :].split()
    return Entry(
        pid=pid,
        parent=int(fields[1]),
        session=int(fields[3]),
        start_ticks=int(fields[19]),
        state=_STATES.get(fields[0].decode(), "running"),
        command=line[name_start + 1 : name_end].decode(errors="replace"),
    )


def all_entries() -> Iterator[Entry]:
    """Yield every process that exists while the table is read."""
    for name in os.listdir(PROC):  # noqa: PTH208
        if name.isdecimal() and (entry := read_entry(int(name))) is not None:
            yield entry


def record(entry: Entry, *, state: str | None = None) -> Process:
    """Return the record of ``entry``; ``state`` overrides what the process table says (``foreign``)."""
    return Process(
        pid=entry.pid,
        start_ticks=entry.start_ticks,
        boot_id=boot_id(),
        state=state or ("running" if entry.state == "stopped" else entry.state),
        command=entry.command,
        parent=entry.parent,
    )


def find(process: Process) -> Entry | None:
    """Return the entry of exactly this process, or None when it is gone or its pid belongs to another one."""
    entry = read_entry(process.pid) if process.boot_id == boot_id() else None
    return entry if entry is not None and entry.start_ticks == process.start_ticks else None


def myself() -> Process:
    """Return the identity of the calling process."""
    entry = read_entry(os.getpid())
    if entry is None:
        raise ProcessLookupError("/proc does not show the calling process; is it mounted with hidepid?")
    return record(entry)


def starts_with(pid: int, variable: str, value: str) -> bool:
    """Whether ``pid`` started with this environment variable; False when that cannot be read (gone, or not ours)."""
    try:
        content = _read(f"{PROC}/{pid}/environ")
    except PermissionError:
        return False
    return content is not None and os.fsencode(f"{variable}={value}") in content.split(b"\0")


def _read(path: str) -> bytes | None:
    """Return a file of the process table, None when its process is gone. Read often, hence without pathlib."""
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None


def send(entry: Entry, number: signal.Signals) -> bool:
    """Signal exactly this process through a pidfd; False when it no longer exists. Raises PermissionError."""
    try:
        descriptor = os.pidfd_open(entry.pid)
    except ProcessLookupError:
        return False
    try:
        current = read_entry(entry.pid)  # read after the pidfd pins the pid, so the two are the same process
        if current is None or current.start_ticks != entry.start_ticks:
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, number)
            return True
        return False
    finally:
        os.close(descriptor)
