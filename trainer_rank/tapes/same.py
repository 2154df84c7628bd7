"""Keys by identity, for remembering what was made from large objects that never change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

Thing = TypeVar("Thing")


@dataclass(frozen=True, eq=False)
class Same(Generic[Thing]):
    """Equal only to a key of the very same object, so that looking it up costs next to nothing."""

    thing: Thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)
