"""Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A markdown table of ``rows`` under ``head``."""
    text = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*text, *(f"| {' | '.join(map(str, row))} |" for row in rows)])
