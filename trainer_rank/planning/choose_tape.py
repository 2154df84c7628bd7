"""Which shipped tape serves a target best. Pure but for reading package data."""

from __future__ import annotations

from trainer_rank.errors import TapeError
from trainer_rank.planning.target import Target, uncovered_stages
from trainer_rank.tapes.shipped import load_shipped, shipped_tapes
from trainer_rank.tapes.tape import Tape


def best_shipped(target: Target) -> tuple[str, Tape]:
    """Return name and tape of the shipped tape, recorded of this geometry, that leaves the fewest stages uncovered."""
    fitting = [
        name for name, shipped in shipped_tapes().items() if shipped.provenance.get("geometry") == target.geometry.name
    ]
    if not fitting:
        raise TapeError(f"no shipped tape was recorded of {target.geometry.name}; record and fit one")
    tapes = [(name, load_shipped(name)) for name in fitting]
    return min(tapes, key=lambda each: len(uncovered_stages(each[1], target, [(1, 2)])))
