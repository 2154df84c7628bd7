"""What a run writes, kept within bounds: one log per stream, and one stamped line per event."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

CHUNK = 1 << 16


@dataclass
class Log:
    """Copies one output stream into a file, up to ``limit`` bytes; the rest is read, counted and dropped."""

    source: int
    path: Path
    limit: int
    echo: int | None = None
    dropped: int = 0
    _kept: int = 0
    _file: BinaryIO = field(init=False)

    def __post_init__(self) -> None:
        os.set_blocking(self.source, False)
        self._file = self.path.open("wb", buffering=0)

    def read(self) -> bool:
        """Take what is there now; False at the end of the stream."""
        try:
            content = os.read(self.source, CHUNK)
        except BlockingIOError:
            return True
        kept = content[: self.limit - self._kept]
        self._file.write(kept)
        self._kept += len(kept)
        self.dropped += len(content) - len(kept)
        if self.echo is not None and content:
            with contextlib.suppress(OSError):  # a reader that went away does not end the run
                os.write(self.echo, content)
        return bool(content)

    def close(self) -> None:
        """Close both ends."""
        self._file.close()
        os.close(self.source)


class Stamped(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of ``events.jsonl``: what a rank said, and when trusted code read it (CLOCK_MONOTONIC, ns).

    ``event`` is the rank's own JSON, byte for byte; a line that is no JSON object is kept as ``malformed`` text.
    """

    sequence: int
    monotonic_ns: int
    rank: int
    event: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    malformed: str | None = None


@dataclass
class EventFile:
    """The one file that all ranks' events go to, in the order in which they were read."""

    path: Path
    limit: int
    dropped: int = 0
    _sequence: int = 0
    _size: int = 0
    _file: BinaryIO = field(init=False)

    def __post_init__(self) -> None:
        self._file = self.path.open("wb", buffering=0)

    def append(self, rank: int, line: bytes) -> None:
        """Stamp one line and write it, unless the file is full."""
        stamped = _stamp(self._sequence, rank, line)
        content = msgspec.json.encode(stamped) + b"\n"
        self._sequence += 1
        if self._size + len(content) > self.limit:
            self.dropped += len(content)
            return
        self._file.write(content)
        self._size += len(content)

    def close(self) -> None:
        """Put the events on the disk and close."""
        os.fsync(self._file.fileno())
        self._file.close()


@dataclass
class Events:
    """Splits one rank's event stream into lines of at most ``line_limit`` bytes."""

    source: int
    rank: int
    file: EventFile
    line_limit: int
    heard: Callable[[bytes], None]
    _pending: bytearray = field(default_factory=bytearray)
    _skipping: bool = False

    def __post_init__(self) -> None:
        os.set_blocking(self.source, False)

    def read(self) -> bool:
        """Take what is there now; False at the end of the stream."""
        try:
            content = os.read(self.source, CHUNK)
        except BlockingIOError:
            return True
        self._pending += content
        while (end := self._pending.find(b"\n")) >= 0:
            line = bytes(self._pending[:end])
            del self._pending[: end + 1]
            self._take(line)
        if len(self._pending) > self.line_limit:
            self._pending.clear()
            self._skipping = True
        return bool(content)

    def _take(self, line: bytes) -> None:
        if self._skipping or len(line) > self.line_limit:
            self._skipping = False
            line = f"a line longer than {self.line_limit} bytes".encode()
        self.file.append(self.rank, line)
        self.heard(line)

    def close(self) -> None:
        """Keep an unfinished last line and close."""
        if self._pending or self._skipping:
            self._take(bytes(self._pending))
        os.close(self.source)


def _stamp(sequence: int, rank: int, line: bytes) -> Stamped:
    now = time.monotonic_ns()
    try:
        msgspec.json.decode(line, type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        text = line[:400].decode(errors="replace")
        return Stamped(sequence=sequence, monotonic_ns=now, rank=rank, malformed=text)
    return Stamped(sequence=sequence, monotonic_ns=now, rank=rank, event=msgspec.Raw(line))
