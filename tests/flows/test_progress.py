"""Progress as people see it: whole words and whole figures, on a terminal and in a log."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from flows.progress import MORE, Progress, fitting


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (40, "w: step  tokens 4096  bytes 123456"),
        (34, "w: step  tokens 4096  bytes 123456"),
        (33, "w: step  tokens 4096" + MORE),
        (24, "w: step" + MORE),
    ],
)
def test_an_event_shows_as_many_whole_figures_as_fit(width: int, line: str) -> None:
    assert fitting("w: step", ["tokens 4096", "bytes 123456"], width) == line
    assert len(line) <= width


def test_a_long_stage_breaks_between_words_on_a_terminal_and_not_at_all_in_a_log() -> None:
    reason = "held: the evidence is of a rehearsal, and native evidence is what the rules require"
    for terminal in (True, False):
        progress, written = Progress(), io.StringIO()
        progress.console = Console(file=written, width=60, force_terminal=terminal, no_color=True, color_system=None)
        progress.stage("decision", reason)
        lines = written.getvalue().splitlines()
        assert " ".join(" ".join(lines).split()).endswith(f"decision {reason}")
        assert (len(lines) > 1) == terminal
        if terminal:
            assert max(map(len, lines)) <= 60
            assert all(not line[:20].strip() for line in lines[1:])
