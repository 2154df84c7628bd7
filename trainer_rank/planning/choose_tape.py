"""Which shipped tapes serve a target best. Pure but for reading package data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from trainer_rank.admission.ladder import Retention
from trainer_rank.errors import TapeError
from trainer_rank.planning.target import Target, uncovered_stages
from trainer_rank.tapes.shipped import Shipped, load_shipped, shipped_tapes
from trainer_rank.tapes.tape import Tape

_load = cache(load_shipped)


@dataclass(frozen=True)
class Shelf:
    """A shipped tape, and that of its rerun passes where they were recorded; each is read when first asked for."""

    shipped: Shipped

    @property
    def tape(self) -> Tape:
        """The tape of passes that keep their graph."""
        return _load(self.shipped.name)

    @property
    def retentions(self) -> frozenset[Retention]:
        """What keeps graphs in the recorded passes."""
        return frozenset({Retention.DEVICE} if self.shipped.rerun is None else {Retention.DEVICE, Retention.RERUN})

    def of(self, retention: Retention) -> Tape:
        """Return the tape of passes whose graph is kept so; TapeError when they were not recorded."""
        if retention not in self.retentions:
            raise TapeError(f"{self.shipped.name}: no pass with graphs on {retention.value} was recorded")
        return _load(self.shipped.rerun or "") if retention is Retention.RERUN else self.tape


def best_shipped(target: Target) -> Shelf:
    """Return the shipped tape, recorded of this geometry, that leaves the fewest stages uncovered."""
    known = shipped_tapes()
    reruns = {shipped.rerun for shipped in known.values()}
    fitting = [
        Shelf(shipped)
        for name, shipped in known.items()
        if name not in reruns and shipped.provenance.get("geometry") == target.geometry.name
    ]
    if not fitting:
        raise TapeError(f"no shipped tape was recorded of {target.geometry.name}; record and fit one")
    return min(fitting, key=lambda shelf: len(uncovered_stages(shelf.tape, target, [(1, 2)])))
