"""Live progress on standard error: one line per stage, and below them what the running workload last said."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.status import Status
from rich.table import Column, Table
from rich.text import Text

LINE_SECONDS = 5.0
"""How often a workload's last word is printed where there is no terminal to redraw."""

MORE = "  ..."


class Progress:
    """Tells a person what is happening, with a terminal or without."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self._started = time.monotonic()
        self._status: Status | None = None
        self._printed_at = 0.0
        self.also: Callable[[str, str], None] | None = None
        """Hears each stage's name and text too, for those who follow from afar."""

    def stage(self, name: str, text: str) -> None:
        """Report that a stage was reached, with the seconds since the start."""
        self.settle()
        if self.also is not None:
            self.also(name, text)
        elapsed = f"{time.monotonic() - self._started:6.1f} s"
        if not self.console.is_terminal:
            self.console.print(f"{elapsed}  {name:<12}{text}", soft_wrap=True, markup=False)
            return
        line = Table.grid(Column(style="dim", no_wrap=True), Column(style="bold", width=12), padding=(0, 2, 0, 0))
        line.add_row(elapsed, name, Text(text))
        self.console.print(line)

    def event(self, workload: str, name: str, values: Mapping[str, object]) -> None:
        """Show a worker's event: a spinner's text on a terminal, else a line every few seconds."""
        shown = [f"{key} {value}" for key, value in values.items() if type(value) in (int, str)]
        text = Text(fitting(f"{workload}: {name}", shown, max(self.console.width - 14, 40)))
        if self.console.is_terminal:
            if self._status is None:
                self._status = self.console.status(text)
                self._status.start()
            self._status.update(text)
        elif time.monotonic() - self._printed_at >= LINE_SECONDS:
            self._printed_at = time.monotonic()
            self.console.print(Text.assemble(f"{time.monotonic() - self._started:6.1f} s  ", text), soft_wrap=True)

    def settle(self) -> None:
        """Stop redrawing; what comes next is printed below."""
        if self._status is not None:
            self._status.stop()
            self._status = None


def fitting(start: str, parts: Sequence[str], width: int) -> str:
    """Return ``start`` and as many whole parts as fit into ``width`` columns; an ellipsis stands for the others."""
    line = start
    for index, part in enumerate(parts):
        rest = 0 if index + 1 == len(parts) else len(MORE)
        if len(line) + 2 + len(part) + rest > width:
            return line + MORE
        line += f"  {part}"
    return line


@functools.cache
def shared() -> Progress:
    """Return the one progress of this process, which the command line and the flow both tell."""
    return Progress()
