"""POSIX shared memory that a run's processes had open: killed processes leave theirs behind, and nobody else knows
them.

A segment is the run's own when one of its processes had it open or mapped and it was made after the run began. Segments
of others are never touched, nor are those that anybody still has open or mapped.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from qualification.execution.identity import PROC, all_entries
from qualification.records import Count, Record

FOLDER = Path("/dev/shm")  # noqa: S108 - only looked at, but for segments of the run


class Segment(Record, frozen=True, kw_only=True):
    """A shared memory segment by identity: its inode tells it from a later one of the same name."""

    path: str
    inode: Count
    device: Count


def present() -> frozenset[Segment]:
    """Return every segment that there is now."""
    found: set[Segment] = set()
    with suppress(OSError):
        for entry in os.scandir(FOLDER):
            found |= _segment(entry.path, entry.path)
    return frozenset(found)


def open_segments(pids: Iterable[int]) -> set[Segment]:
    """Return the segments that these processes have open, by name."""
    found: set[Segment] = set()
    for pid in pids:
        with suppress(OSError):  # the process ended, or is not ours to look into
            for link in os.scandir(PROC / str(pid) / "fd"):
                with suppress(OSError):
                    found |= _segment(link.path, os.readlink(link.path))  # noqa: PTH115 - for every open file
    return found


def mapped_segments(pids: Iterable[int]) -> set[Segment]:
    """Return the segments that these processes have mapped, by name; many close the file once it is mapped."""
    found: set[Segment] = set()
    for pid in pids:
        with suppress(OSError):  # the process ended, or is not ours to look into
            for line in (PROC / str(pid) / "maps").read_text(errors="replace").splitlines():
                _, _, name = line.partition(f" {FOLDER}/")
                if name:
                    mapped = _segment(path := f"{FOLDER}/{name}", path)
                    found |= {segment for segment in mapped if line.split(None, 5)[4] == str(segment.inode)}
    return found


def remaining(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Return which of the segments are still there."""
    return tuple(segment for segment in segments if _is_there(segment))


def remove(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Remove the segments that nobody has open or mapped any more, and return those that are gone by this."""
    there = remaining(segments)
    if not there:
        return ()
    pids = [entry.pid for entry in all_entries()]
    used = open_segments(pids) | mapped_segments(pids)
    gone = []
    for segment in there:
        if segment not in used:
            with suppress(OSError):
                Path(segment.path).unlink()
                gone.append(segment)
    return tuple(gone)


def _segment(path: str, name: str) -> set[Segment]:
    if name.startswith(f"{FOLDER}/") and not name.endswith(" (deleted)"):
        with suppress(OSError):
            status = os.stat(path)  # noqa: PTH116 - for every open file of a run
            return {Segment(path=name, inode=status.st_ino, device=status.st_dev)}
    return set()


def _is_there(segment: Segment) -> bool:
    with suppress(OSError):
        status = Path(segment.path).stat(follow_symlinks=False)
        return (status.st_ino, status.st_dev) == (segment.inode, segment.device)
    return False
