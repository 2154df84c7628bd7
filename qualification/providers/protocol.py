"""Where a run's processes live: what every provider does, and the one that needs nothing, plain processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from qualification.execution.supervision import Rank
from qualification.records import Probe, Record


class Place(Record, frozen=True, kw_only=True):
    """What one rank may see of the host: its run's identity, its folder, its GPUs, and what it may read and write."""

    run: str
    token: str
    folder: str
    name: str
    gpus: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


class Provider(Protocol):
    """Turns a rank into what the supervisor starts for it, and proves afterwards that nothing is left elsewhere."""

    @property
    def name(self) -> str:
        """Return the provider's name, as receipts call it."""

    def rank(self, rank: Rank, place: Place) -> Rank:
        """Return what the supervisor shall start so that ``rank`` runs in ``place``."""

    def failure(self, folder: Path) -> str | None:
        """Return why the ranks of ``folder`` ended for the provider's sake and not by themselves, or None."""

    def probe(self, token: str, folders: Sequence[Path]) -> list[Probe]:
        """Remove and look for what lives outside the process tree, after the sweep; no probe if nothing can."""


class ProcessProvider:
    """Ranks are plain processes below the supervisor; nothing lives elsewhere."""

    name = "process"

    def rank(self, rank: Rank, place: Place) -> Rank:  # noqa: ARG002 - a process sees the host as it is
        """Return the rank as it is."""
        return rank

    def failure(self, folder: Path) -> str | None:  # noqa: ARG002
        """Return None: a process needs nothing that could fail it."""
        return None

    def probe(self, token: str, folders: Sequence[Path]) -> list[Probe]:  # noqa: ARG002
        """Return no probe: there is nothing to look at."""
        return []
