"""What was recorded on real H200s, and the page made from it."""

from __future__ import annotations

from bench.native.report import page


def main() -> None:
    """Print docs/native.md as it follows from the committed recordings."""
    print(page())
