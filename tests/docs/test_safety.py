"""The page on safety follows from the committed recordings, its plot included."""

from __future__ import annotations

from pathlib import Path

from bench._safety.summary import ratios, steps_of
from bench.safety import DOCS, draw, page, points, recordings


def test_the_page_and_its_plot_follow_from_the_recordings(tmp_path: Path) -> None:
    found = recordings()
    assert found, "no recording is committed"
    again = "run `python -c 'from bench.safety import write; write()'` and commit docs/safety.md and docs/safety.svg"
    assert (DOCS / "safety.md").read_text() == page(found), again
    draw(list(found.values()), tmp_path / "plot.svg")
    marks = [path.read_text().count("<use ") for path in (DOCS / "safety.svg", tmp_path / "plot.svg")]
    assert marks[0] == marks[1], again


def test_no_admitted_step_ran_out_of_memory_or_made_the_allocator_retry() -> None:
    for name, recording in recordings().items():
        steps = steps_of(recording)
        assert (steps.failed, steps.retries) == (0, 0), name
        assert all(0 < ratio <= 1 for ratio in ratios(recording)), name
        assert any(points(recording).values()), name
