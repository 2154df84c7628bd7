"""The peers page against the recording: what can be checked without running any peer."""

from __future__ import annotations

import re

from bench.peers import DOCS, recorded_steps

PAGE = (DOCS / "peers.md").read_text()


def test_the_page_shows_the_recorded_steps_and_our_errors() -> None:
    steps = recorded_steps()
    rows = re.findall(r"^\| ([\d,]+) \| (\d+) \| ([\d.]+) \| ([+-][\d.]+) \|", PAGE, re.MULTILINE)
    assert [(int(row[0].replace(",", "")), int(row[1])) for row in rows] == [
        (step.rows, len(step.lengths)) for step in steps
    ]
    assert [row[2] for row in rows] == [f"{step.observed / 2**30:.3f}" for step in steps]
    assert [row[3] for row in rows] == [f"{100 * (step.forecast / step.observed - 1):+.4f}" for step in steps]


def test_every_peer_was_run_for_the_page_and_its_plot_is_there() -> None:
    assert "not installed" not in PAGE
    assert all(f"| {name} |" in PAGE for name in ("tapes", "MemTracker", "hand formula", "accelerate", "DeepSpeed"))
    assert (DOCS / "peers.svg").read_bytes().startswith(b"<?xml")
