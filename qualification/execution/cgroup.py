"""A cgroup v2 scope per run, where the host has the hierarchy and lets us write to it; membership survives everything.

See the kernel's Documentation/admin-guide/cgroup-v2.rst: ``cgroup.procs``, ``cgroup.kill``, ``cgroup.events``.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True)
class Scope:
    """One run's cgroup. Every process started into it, and all that these start, stay members until they are dead."""

    folder: Path

    def enter(self) -> None:
        """Move the calling process into the scope."""
        (self.folder / "cgroup.procs").write_text("0")

    def members(self) -> tuple[int, ...]:
        """Return the pids of all members, nested cgroups included; empty when the scope is gone."""
        pids: list[int] = []
        for folder, _, _ in os.walk(self.folder):
            with contextlib.suppress(OSError):
                pids.extend(int(line) for line in (Path(folder) / "cgroup.procs").read_text().split())
        return tuple(pids)

    def kill(self) -> None:
        """Send KILL to every member at once, which outruns any fork."""
        with contextlib.suppress(OSError):
            (self.folder / "cgroup.kill").write_text("1")

    def remove(self, seconds: float = 2.0) -> bool:
        """Remove the scope once it is empty, waiting at most ``seconds``; False when it still has members."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                for folder, _, _ in os.walk(self.folder, topdown=False):
                    Path(folder).rmdir()
            except FileNotFoundError:
                return True
            except OSError:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.02)
            else:
                return True


def create_scope(token: str) -> tuple[Scope | None, str]:
    """Return a fresh scope and how containment works here: ``cgroup v2`` or the reason why there is none."""
    mount = _mount_of_v2()
    if mount is None:
        return None, "subreaper only: no cgroup v2 hierarchy is mounted"
    folder = mount / _own_path() / f"qualify-{token}"
    try:
        folder.mkdir()
        scope = Scope(folder)
        if not (folder / "cgroup.kill").exists():
            folder.rmdir()
            return None, "subreaper only: this kernel's cgroup v2 has no cgroup.kill"
    except OSError as error:
        return None, f"subreaper only: cgroup v2 is not writable here ({error.strerror})"
    return scope, f"subreaper and cgroup v2 scope {folder}"


def _mount_of_v2() -> Path | None:
    for line in MOUNTS.read_text().splitlines():
        fields = line.split()
        if fields[fields.index("-") + 1] == "cgroup2":
            return Path(fields[4])
    return None


def _own_path() -> str:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return line[3:].lstrip("/")
    return ""
