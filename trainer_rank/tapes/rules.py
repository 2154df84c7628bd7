"""How many bytes one allocation takes, as an exact integer function of the plan's features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from trainer_rank.features import LARGEST


class Term(NamedTuple):
    """``coefficient`` bytes for every started ``block`` of ``feature``: coefficient * ceil(feature / block)."""

    feature: str
    block: int
    coefficient: int


@dataclass(frozen=True)
class Rule:
    """Bytes = the sum of ``terms`` plus ``constant``, then held between ``floor`` and ``ceiling`` where given."""

    terms: tuple[Term, ...] = ()
    constant: int = 0
    floor: int | None = None
    ceiling: int | None = None

    def line(self, features: Mapping[str, int]) -> int | None:
        """Return the value before floor and ceiling, None when a feature is not given."""
        total = self.constant
        for feature, block, coefficient in self.terms:
            value = features.get(feature)
            if value is None:
                return None
            total += coefficient * -(-value // block)
        return total

    def size(self, features: Mapping[str, int]) -> int | None:
        """Return the bytes, or None when a feature is not given or the line leaves 1 B to 1 EiB: then it is unknown."""
        value = self.line(features)
        if value is None or value >= LARGEST:
            return None
        if self.ceiling is not None and value > self.ceiling:
            value = self.ceiling
        if self.floor is not None and value < self.floor:
            value = self.floor
        return value if value > 0 else None

    @property
    def growing(self) -> bool:
        """Whether no term falls when its feature grows."""
        return all(term.coefficient >= 0 for term in self.terms)

    def describe(self) -> str:
        """Spell the rule for people."""
        parts = [
            f"{coefficient} x {feature}" if block == 1 else f"{coefficient} x ceil({feature} / {block})"
            for feature, block, coefficient in self.terms
        ]
        if self.constant or not parts:
            parts.append(str(self.constant))
        text = " + ".join(parts)
        if self.ceiling is not None:
            text = f"min({text}, {self.ceiling})"
        return text if self.floor is None else f"max({text}, {self.floor})"
