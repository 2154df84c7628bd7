"""What a plan may take: physically free memory minus explicit, named claims. Pure data; bytes throughout."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from trainer_rank.errors import InvalidInputError


class Status(StrEnum):
    """How well a figure is known."""

    MEASURED = "measured"
    FITTED = "fitted"
    BOUNDED = "bounded"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Term:
    """A named amount of memory: its bytes (None exactly when unknown), how well it is known, and from where."""

    name: str
    size: int | None
    status: Status
    source: str

    def __post_init__(self) -> None:
        if (self.size is None) != (self.status is Status.UNKNOWN):
            raise InvalidInputError(f"{self.name}: a size of {self.size} cannot be {self.status}; unknown has no size")
        if self.size is not None and self.size < 0:
            raise InvalidInputError(f"{self.name}: a size of {self.size} bytes is negative; give 0 or more")


@dataclass(frozen=True)
class Budget:
    """One sample of the card: physically free and total bytes, and the claims on them.

    ``sample`` is the ordinal of the memory sample; a decision uses only forecasts made from the same one. ``host``:
    bytes of host memory that plans may take; None when that is not known, and then they may take none.
    """

    sample: int
    free: int
    total: int
    claims: tuple[Term, ...] = ()
    host: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.free <= self.total:
            raise InvalidInputError(f"{self.free} bytes free of {self.total} cannot be; read the card again")

    @property
    def claimed(self) -> int | None:
        """Bytes that the claims keep free, or None when one of them is unknown."""
        sizes = [claim.size for claim in self.claims]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None

    @property
    def available(self) -> int | None:
        """Bytes that a plan may take from the driver: negative when claims exceed what is free, None when unknown."""
        claimed = self.claimed
        return None if claimed is None else self.free - claimed
