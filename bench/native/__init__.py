"""What was recorded on real H200s, and the page made from it."""

from __future__ import annotations


def main() -> None:
    """Print docs/native.md as it follows from the committed recordings."""
    from bench.native.report import page  # the recorders of this package run where the pipeline is not installed

    print(page())
