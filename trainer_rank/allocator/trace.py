"""Recordings of the allocator's event stream as files: gzipped or plain JSON, checked to the last value on reading."""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from trainer_rank.allocator.snapshot import Snapshot, from_trace, whole_number
from trainer_rank.errors import TraceError

LARGEST_FILE: Final = 256 << 20
"""Bytes of JSON, unpacked, that a trace may have: about four million events."""
_FEATURE_KEYS: Final = {"T": "tokens", "L": "layers", "cp": "context"}


class Event(NamedTuple):
    """One row of a recording. ``size`` is the requested size, or the driver's for segments. Bytes.

    An ``oom`` row holds the driver's free bytes in ``address``.
    """

    action: str
    address: int
    size: int
    stream: int


@dataclass(frozen=True, slots=True)
class Trace:
    """One recorded pass. ``features`` names what was run (tokens, layers, context, and so on).

    ``marks`` are (event index, stage): the stage begins at that event. ``memory_info`` is (free, total) at the end.
    """

    before: Snapshot
    events: tuple[Event, ...]
    after: Snapshot | None = None
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    memory_info: tuple[int, int] | None = None
    features: dict[str, int] = field(default_factory=dict)
    marks: tuple[tuple[int, str], ...] = ()
    source: str = ""


def load_trace(path: str | Path) -> Trace:
    """Read a trace file; TraceError names the byte or the event that cannot be read."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise TraceError(f"{path}: is no regular file; give a trace as JSON, plain or gzipped")
    try:
        with path.open("rb") as stream:
            text = _unpacked(stream, str(path))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    return parse_trace(text, str(path))


def parse_trace(text: bytes, source: str) -> Trace:
    """Read the JSON ``text`` of a trace; ``source`` names it in errors."""
    try:
        return _trace(_json(text), source)
    except TraceError as error:
        raise TraceError(f"{source}: {error}") from None


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write ``trace`` as JSON, gzipped when the name ends in .gz; byte-identical for equal traces."""
    text = json.dumps(_document(trace), separators=(",", ":"), allow_nan=False).encode()
    path = Path(path)
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def _document(trace: Trace) -> dict[str, Any]:
    document: dict[str, Any] = {
        key: trace.features[name] for key, name in _FEATURE_KEYS.items() if name in trace.features
    }
    others = {name: value for name, value in trace.features.items() if name not in _FEATURE_KEYS.values()}
    if others:
        document["features"] = others
    if trace.memory_info is not None:
        document["free_total"] = list(trace.memory_info)
    document["before"] = trace.before.to_trace()
    document["events"] = [list(event) for event in trace.events]
    if trace.after is not None:
        document["after"] = trace.after.to_trace()
    if trace.marks:
        document["marks"] = [list(mark) for mark in trace.marks]
    if trace.peak_allocated is not None:
        document["peak_alloc"] = trace.peak_allocated
    if trace.peak_reserved is not None:
        document["peak_res"] = trace.peak_reserved
    return document


def _unpacked(stream: IO[bytes], source: str) -> bytes:
    packed = stream.read(2) == b"\x1f\x8b"
    stream.seek(0)
    if not packed:
        text = stream.read(LARGEST_FILE + 1)
    else:
        with gzip.GzipFile(fileobj=stream) as unpacked:
            text = _read_packed(unpacked, stream, source)
    if len(text) > LARGEST_FILE:
        raise TraceError(f"{source}: more than {LARGEST_FILE} bytes of JSON; record a shorter pass")
    if not text:
        raise TraceError(f"{source}: empty file, nothing to read at byte 0")
    return text


def _read_packed(unpacked: gzip.GzipFile, packed: IO[bytes], source: str) -> bytes:
    parts: list[bytes] = []
    size = 0
    try:
        while size <= LARGEST_FILE and (part := unpacked.read(1 << 20)):
            parts.append(part)
            size += len(part)
    except (EOFError, OSError, zlib.error) as error:
        raise TraceError(
            f"{source}: gzip data is cut or damaged at byte {packed.tell()} of the file ({error})"
        ) from error
    return b"".join(parts)


def _json(text: bytes) -> object:
    try:
        return json.loads(text)
    except UnicodeDecodeError as error:
        raise TraceError(f"not text at byte {error.start}") from None
    except json.JSONDecodeError as error:
        at = len(error.doc[: error.pos].encode())
        raise TraceError(f"not JSON at byte {at} of {len(text)} ({error.msg})") from None
    except RecursionError:
        raise TraceError("not a trace: lists nested too deep to read") from None
    except ValueError:  # an integer of thousands of digits; kept as text, so that the check of its row names it
        return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) <= 40 else digits)


def _trace(value: object, source: str) -> Trace:
    if not isinstance(value, dict):
        raise TraceError(f"a trace is an object, not {type(value).__name__}")
    for key in ("before", "events"):
        if key not in value:
            raise TraceError(f"the key {key!r} is missing")
    events = _events(value["events"])
    return Trace(
        before=from_trace(value["before"], "before"),
        events=events,
        after=from_trace(value["after"], "after") if value.get("after") is not None else None,
        peak_allocated=_optional(value, "peak_alloc"),
        peak_reserved=_optional(value, "peak_res"),
        memory_info=_memory_info(value.get("free_total")),
        features=_features(value),
        marks=_marks(value.get("marks", []), len(events)),
        source=source,
    )


def _events(value: object) -> tuple[Event, ...]:
    if not isinstance(value, list):
        raise TraceError(f"events is {type(value).__name__}, not a list")
    if not value:
        raise TraceError("events is empty: nothing was recorded, so there is nothing to check at event 0")
    return tuple([_event(row, index) for index, row in enumerate(value)])


def _event(row: object, index: int) -> Event:
    if type(row) is not list or len(row) != 4 or type(row[0]) is not str:
        raise TraceError(f"event {index} is {str(row)[:60]!r}; [action, address, size, stream] is needed")
    action, address, size, stream = row
    integers = type(address) is int and type(size) is int and type(stream) is int
    if integers and min(address, size, stream) >= 0 and max(address, size, stream) < 1 << 64:
        return Event(action, address, size, stream)
    for name, value in (("address", address), ("size", size), ("stream", stream)):
        whole_number(value, f"event {index} ({action[:20]}): {name}")
    raise AssertionError(f"event {index} has no readable fault")


def _optional(value: dict[str, Any], key: str) -> int | None:
    return None if value.get(key) is None else whole_number(value[key], key)


def _memory_info(value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise TraceError("free_total is not [free, total] in bytes")
    return whole_number(value[0], "free_total free"), whole_number(value[1], "free_total total")


def _features(value: dict[str, Any]) -> dict[str, int]:
    named = {name: whole_number(value[key], key) for key, name in _FEATURE_KEYS.items() if key in value}
    others = value.get("features", {})
    if not isinstance(others, dict):
        raise TraceError("features is not an object of integers")
    named |= {name: whole_number(field, f"feature {name}") for name, field in others.items()}
    for name in ("layers", "context"):
        if named.get(name) == 0:
            raise TraceError(f"{name} is 0: a pass has one or more; leave it out where it is not known")
    return named


def _marks(value: object, events: int) -> tuple[tuple[int, str], ...]:
    if not isinstance(value, list):
        raise TraceError("marks is not a list of [event index, stage]")
    marks = []
    for index, row in enumerate(value):
        if not isinstance(row, list) or len(row) != 2 or not isinstance(row[1], str):
            raise TraceError(f"mark {index} is not [event index, stage]")
        marks.append((whole_number(row[0], f"mark {index}: event index", events + 1), row[1]))
    if any(later[0] < earlier[0] for earlier, later in pairwise(marks)):
        raise TraceError("marks are not in the order of their events")
    return tuple(marks)
