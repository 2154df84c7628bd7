"""Tapes that come with the package, each fitted from recordings that come with it too.

``tapes.toml`` names for every tape its recordings and what they were recorded on. The same command makes the same
bytes again: ``qualify tape ship``.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from trainer_rank.allocator.trace import load_trace
from trainer_rank.errors import TapeError
from trainer_rank.tapes.fit import fit
from trainer_rank.tapes.storage import load_tape
from trainer_rank.tapes.tape import Tape

FOLDER = Path(str(resources.files("trainer_rank.tapes.shipped")))
RECORDINGS = FOLDER.parent / "recordings"


@dataclass(frozen=True)
class Shipped:
    """A shipped tape: the files it was fitted from, files to check it on, and what is true of all of them."""

    name: str
    recordings: tuple[str, ...]
    unseen: tuple[str, ...]
    provenance: dict[str, str]

    @property
    def path(self) -> Path:
        """Return where the tape's file is."""
        return FOLDER / f"{self.name}.tape.json.gz"


def shipped_tapes() -> dict[str, Shipped]:
    """Return every shipped tape by name."""
    document = tomllib.loads((FOLDER / "tapes.toml").read_text())
    return {
        name: Shipped(
            name,
            tuple(row["recordings"]),
            tuple(row.get("unseen", ())),
            {key: str(value) for key, value in row["provenance"].items()},
        )
        for name, row in document.items()
    }


def load_shipped(name: str) -> Tape:
    """Load a shipped tape. TapeError when there is none of that name."""
    known = shipped_tapes()
    if name not in known:
        raise TapeError(f"no tape {name!r} is shipped; choose of {', '.join(known)}")
    return load_tape(known[name].path)


def fit_shipped(shipped: Shipped) -> Tape:
    """Fit a shipped tape again from its recordings."""
    return fit([load_trace(RECORDINGS / file) for file in shipped.recordings], shipped.provenance)
