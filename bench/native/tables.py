"""Markdown tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A markdown table of ``rows`` under ``head``."""
    text = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*text, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def spread(values: Sequence[float]) -> str:
    """The median of ``values`` and, in brackets, their quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.4f} ({low:.4f} to {high:.4f})"
