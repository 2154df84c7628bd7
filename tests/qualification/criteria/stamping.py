"""Stamp lines as the launcher does, for tests of criteria."""

from __future__ import annotations

from pathlib import Path

import msgspec

from qualification.criteria.observation import StampedEvent, understood
from qualification.execution.capture import EventFile, Stamped


def stamp(lines: list[str], folder: Path) -> tuple[StampedEvent, ...]:
    """Return the lines as stamped events of rank 0."""
    file = EventFile(folder / "events.jsonl", 1 << 20)
    for line in lines:
        file.append(0, line.encode())
    file.close()
    rows = (folder / "events.jsonl").read_bytes().splitlines()
    return understood(msgspec.json.decode(row, type=Stamped) for row in rows)
