"""Named cards: capacity, and what is held outside PyTorch's allocator in each phase, every figure with its source.

A card is a TOML file in ``trainer_rank/devices/cards``; bytes are integers.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from trainer_rank.errors import InvalidInputError

PHASES = ("context", "first_matrix_product", "first_forward", "first_backward")
"""Moments at which libraries take memory of their own, in the order in which a process meets them."""


@dataclass(frozen=True)
class Outside:
    """Bytes that one process holds outside the allocator from ``phase`` on, in all, not added to the phase before."""

    phase: str
    size: int
    source: str


@dataclass(frozen=True)
class Card:
    """A named card. ``capacity`` is what ``mem_get_info`` calls total; ``outside`` is for a process without peers.

    ``outside_with_peers`` holds the phases that a process of a group takes more in, communicator buffers included.
    """

    name: str
    title: str
    capacity: int
    capacity_source: str
    outside: tuple[Outside, ...]
    outside_with_peers: tuple[Outside, ...] = ()

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise InvalidInputError(f"card {self.name}: capacity is {self.capacity} B; give a positive size")
        for phases in (self.outside, self.outside_with_peers):
            sizes = [phase.size for phase in sorted(phases, key=_order)]
            if sizes != sorted(sizes) or (sizes and sizes[0] < 0):
                raise InvalidInputError(f"card {self.name}: bytes outside must grow from phase to phase")

    @property
    def context(self) -> int:
        """Bytes that the process's context takes before its first operation; 0 when the card names none."""
        return self.held_outside("context")

    def held_outside(self, phase: str, peers: bool = False) -> int:
        """Return the bytes outside the allocator from ``phase`` on; the last earlier figure where it has none."""
        reached = PHASES.index(phase)
        known = self.outside + (self.outside_with_peers if peers else ())
        return max((item.size for item in known if _order(item) <= reached), default=0)

    def among_peers(self) -> Card:
        """Return the card as a process of a group meets it: communicators are part of what it holds outside."""
        sources = {each.phase: each.source for each in self.outside + self.outside_with_peers}
        phases = [phase for phase in PHASES if phase in sources]
        return replace(
            self, outside=tuple(Outside(each, self.held_outside(each, peers=True), sources[each]) for each in phases)
        )


def _order(item: Outside) -> int:
    try:
        return PHASES.index(item.phase)
    except ValueError:
        raise InvalidInputError(f"phase {item.phase!r} is not known; choose of {', '.join(PHASES)}") from None


def card_names() -> tuple[str, ...]:
    """Return the names of the cards that come with the package."""
    return tuple(sorted(Path(item.name).stem for item in _folder().iterdir() if item.name.endswith(".toml")))


def load_card(name: str) -> Card:
    """Return a card by name; InvalidInputError lists the names there are."""
    if name not in card_names():
        raise InvalidInputError(f"card {name!r} is not known; choose of {', '.join(card_names())}")
    return _card(name, tomllib.loads(_folder().joinpath(f"{name}.toml").read_text(encoding="utf-8")))


def _folder() -> Any:  # noqa: ANN401 - importlib's Traversable moved between modules in Python 3.11 to 3.13
    return files("trainer_rank.devices").joinpath("cards")


def _card(name: str, document: dict[str, Any]) -> Card:
    return Card(
        name=name,
        title=document["title"],
        capacity=document["capacity"]["bytes"],
        capacity_source=document["capacity"]["source"],
        outside=_phases(document.get("outside", {})),
        outside_with_peers=_phases(document.get("outside_with_peers", {})),
    )


def _phases(table: dict[str, Any]) -> tuple[Outside, ...]:
    return tuple(Outside(phase, row["bytes"], row["source"]) for phase, row in table.items())
