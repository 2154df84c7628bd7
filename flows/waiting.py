"""A bar on standard error for work that takes a while: silent at first, and wherever no person looks on."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

PATIENCE_S = 2.0
"""Seconds of silence before progress is shown."""
REFRESH_S = 0.5


@contextmanager
def progress(names: Sequence[str]) -> Iterator[list[int]]:
    """Show how many of the named items are done; the caller keeps the present item's index in the yielded cell."""
    position = [0]
    finished = threading.Event()
    thread = threading.Thread(target=_show, args=(names, position, finished), name="progress", daemon=True)
    if sys.stderr.isatty():
        thread.start()
    try:
        yield position
    finally:
        finished.set()
        if thread.is_alive():
            thread.join()


def _show(names: Sequence[str], position: list[int], finished: threading.Event) -> None:
    started = time.monotonic()
    shown = False
    while not finished.wait(REFRESH_S if shown else PATIENCE_S):
        shown = True
        done = position[0]
        bar = ("#" * (20 * done // len(names))).ljust(20, ".")
        seconds = time.monotonic() - started
        sys.stderr.write(f"\r[{bar}] {done}/{len(names)}, {seconds:.0f} s: {names[done]}\033[K")
        sys.stderr.flush()
    if shown:
        sys.stderr.write("\r\033[K")
