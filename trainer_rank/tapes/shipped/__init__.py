"""Tapes that come with the package, each fitted from recordings that come with it too.

``tapes.toml`` names for every tape its recordings and what they were recorded on, and where plans may start from. The
same command makes the same bytes again: ``qualify tape ship``.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from trainer_rank.allocator.trace import load_trace
from trainer_rank.errors import TapeError
from trainer_rank.tapes.fit import fit
from trainer_rank.tapes.storage import load_tape
from trainer_rank.tapes.tape import Tape

FOLDER = Path(str(resources.files("trainer_rank.tapes.shipped")))
RECORDINGS = FOLDER.parent / "recordings"


@dataclass(frozen=True)
class RecordedStart:
    """What a steady step begins with: the recording whose snapshot it is, and what each layer more would hold, bytes.

    ``source`` says where that figure comes from.
    """

    recording: str
    layer_bytes: int
    source: str


@dataclass(frozen=True)
class Shipped:
    """A shipped tape: the files it was fitted from, files to check it on, and what is true of all of them.

    ``rerun`` names the tape of the same steps with the forward run again at backward; ``start`` is where plans start.
    """

    name: str
    recordings: tuple[str, ...]
    provenance: dict[str, str]
    unseen: tuple[str, ...] = ()
    rerun: str | None = None
    start: RecordedStart | None = None

    @property
    def path(self) -> Path:
        """Return where the tape's file is."""
        return FOLDER / f"{self.name}.tape.json.gz"


def shipped_tapes() -> dict[str, Shipped]:
    """Return every shipped tape by name."""
    document = tomllib.loads((FOLDER / "tapes.toml").read_text())
    return {name: _shipped(name, row) for name, row in document.items()}


def _shipped(name: str, row: dict[str, Any]) -> Shipped:
    return Shipped(
        name,
        tuple(row["recordings"]),
        {key: str(value) for key, value in row["provenance"].items()},
        tuple(row.get("unseen", ())),
        row.get("rerun"),
        RecordedStart(**row["start"]) if "start" in row else None,
    )


def load_shipped(name: str) -> Tape:
    """Load a shipped tape. TapeError when there is none of that name."""
    known = shipped_tapes()
    if name not in known:
        raise TapeError(f"no tape {name!r} is shipped; choose of {', '.join(known)}")
    return load_tape(known[name].path)


def fit_shipped(shipped: Shipped) -> Tape:
    """Fit a shipped tape again from its recordings."""
    return fit([load_trace(RECORDINGS / file) for file in shipped.recordings], shipped.provenance)


def recording_of(probe: str) -> Path:
    """Return the file of the recording that a shipped tape names as a probe. TapeError when there is none."""
    for shipped in shipped_tapes().values():
        for file in shipped.recordings:
            if Path(file).name == Path(probe).name:
                return RECORDINGS / file
    raise TapeError(f"no shipped tape was fitted from a recording {probe}")
