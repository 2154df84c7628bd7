"""Where a run's processes live: what every provider does, and the one that needs nothing, plain processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from qualification.execution.supervision import Command
from qualification.records import Probe, Record


class Place(Record, frozen=True, kw_only=True):
    """What one command may see of the host: its run, its folder, its GPUs, and what it may read and write."""

    run: str
    token: str
    folder: str
    name: str
    gpus: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


class Provider(Protocol):
    """Turns a command into what the supervisor starts for it, and proves afterwards that nothing is left elsewhere."""

    @property
    def name(self) -> str:
        """Return the provider's name, as receipts call it."""

    def command(self, command: Command, place: Place) -> Command:
        """Return what the supervisor shall start so that ``command`` runs in ``place``."""

    def failure(self, folder: Path) -> str | None:
        """Return why the command of ``folder`` ended for the provider's sake and not by itself, or None."""

    def probe(self, token: str, folders: Sequence[Path]) -> list[Probe]:
        """Remove and look for what lives outside the process tree, after the sweep; no probe if nothing can."""


class ProcessProvider:
    """Commands are plain processes below the supervisor; nothing lives elsewhere."""

    name = "process"

    def command(self, command: Command, place: Place) -> Command:  # noqa: ARG002 - it sees the host as it is
        """Return the command as it is."""
        return command

    def failure(self, folder: Path) -> str | None:  # noqa: ARG002
        """Return None: a process needs nothing that could fail it."""
        return None

    def probe(self, token: str, folders: Sequence[Path]) -> list[Probe]:  # noqa: ARG002
        """Return no probe: there is nothing to look at."""
        return []
