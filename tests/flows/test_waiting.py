from __future__ import annotations

import io
import sys
import time

import pytest

from flows import waiting
from flows.waiting import progress


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_work_that_takes_a_while_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.01)
    monkeypatch.setattr(waiting, "REFRESH_S", 0.01)
    with progress(["one", "two"]) as position:
        position[0] = 1
        deadline = time.monotonic() + 5
        while "1/2" not in terminal.getvalue() and time.monotonic() < deadline:
            time.sleep(0.005)
    assert "[##########..........] 1/2" in terminal.getvalue() and "two" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\033[K"), "the bar is gone when the work is done"


@pytest.mark.parametrize("stream", [_Terminal(), io.StringIO()])
def test_short_work_and_redirected_output_stay_silent(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    if not stream.isatty():
        monkeypatch.setattr(waiting, "PATIENCE_S", 0.0)
    with progress(["one"]):
        time.sleep(0.02)
    assert stream.getvalue() == ""
