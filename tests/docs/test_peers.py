"""The peers page against the recording, and against those peers that every machine can run."""

from __future__ import annotations

import re

import pytest

from bench import _estimators, peers
from bench.native.reference import GEOMETRY
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


def test_the_model_of_today_gives_the_page_s_figures() -> None:
    """A change of the model that moves what others forecast asks for the page to be written again."""
    step = next(step for step in recorded_steps() if step.rows > 3000)
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {step.rows:,} |")).split(" | ")
    found = _estimators.mem_tracker(GEOMETRY, step.lengths), _estimators.hand_formula(GEOMETRY, step.rows)
    assert row[4:6] == [f"{100 * (each / step.observed - 1):+.4f}" for each in found]


def test_a_page_without_one_of_the_peers_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "recorded_steps", lambda: recorded_steps()[:1])
    monkeypatch.setattr(_estimators, "accelerate", lambda _: None)
    monkeypatch.setattr(_estimators, "deepspeed", lambda _: None)
    with pytest.raises(SystemExit, match="accelerate, DeepSpeed not installed"):
        peers.write()
    assert (DOCS / "peers.md").read_text() == PAGE
