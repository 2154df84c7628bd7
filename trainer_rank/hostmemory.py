"""How much host memory this process can really have: the machine's, within the limits of its control groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

MEMINFO = Path("/proc/meminfo")
MEMBERSHIP = Path("/proc/self/cgroup")
CONTROL_GROUPS = Path("/sys/fs/cgroup")


class _Files(NamedTuple):
    """Where a version of control groups keeps a group's limit, its use, and how much of that is idle page cache."""

    root: str
    limit: str
    used: str
    cache: str


_UNIFIED = _Files("", "memory.max", "memory.current", "inactive_file")
_LEGACY = _Files("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_host_memory() -> int | None:
    """Return the bytes that new host allocations can have without swapping; None where the system does not say.

    Pinned memory that PyTorch keeps for reuse counts: the next graph of the same sizes is held in it.
    """
    machine = _row(MEMINFO, "MemAvailable:")
    if machine is None:
        return None
    return max(0, min([machine * 1024, *_headrooms()])) + _pinned_for_reuse()


def _headrooms() -> Iterator[int]:
    """Yield what every control group above this process still allows; idle page cache gives way."""
    for line in _lines(MEMBERSHIP):
        number, controllers, group = line.split(":", 2)
        if number == "0":
            yield from _above(_UNIFIED, group)
        elif "memory" in controllers.split(","):
            yield from _above(_LEGACY, group)


def _above(files: _Files, group: str) -> Iterator[int]:
    root, names = str(CONTROL_GROUPS / files.root), [name for name in group.split("/") if name]
    for depth in range(len(names), -1, -1):  # text, as this runs at every decision
        folder = "/".join([root, *names[:depth]])
        limit = _number(f"{folder}/{files.limit}")
        used = None if limit is None else _number(f"{folder}/{files.used}")
        if limit is not None and used is not None:
            yield limit - used + (_row(f"{folder}/memory.stat", files.cache) or 0)


def _pinned_for_reuse() -> int:
    """Return the bytes of pinned memory that PyTorch has taken and hands out again; 0 while nothing was pinned."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    held = torch.cuda.host_memory_stats()
    return int(max(0, held.get("allocated_bytes.current", 0) - held.get("active_bytes.current", 0)))


def _lines(path: Path | str) -> list[str]:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []


def _number(path: Path | str) -> int | None:
    """Return the number in a file; None when there is no file, or no limit in it."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None


def _row(path: Path | str, name: str) -> int | None:
    found = next((line.split() for line in _lines(path) if line.startswith(name) and line.split()[0] == name), [])
    return int(found[1]) if len(found) > 1 and found[1].isdecimal() else None
