"""Read the tensors of a safetensors file without any tensor library, for judging what a worker saved.

The format is 8 bytes of little-endian header length, a JSON header with dtype, shape and byte range per tensor, data.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from qualification.figures import Unreadable, read_object

_FORMATS = {
    "F64": "d",
    "F32": "f",
    "F16": "e",
    "BOOL": "?",
    "U8": "B",
    "I8": "b",
    "U16": "H",
    "I16": "h",
    "U32": "I",
    "I32": "i",
    "U64": "Q",
    "I64": "q",
}
"""How ``struct`` reads one element, by the name that the file format has for its type."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as stored: its element type as the file names it, for example F32, and its bytes."""

    dtype: str
    content: bytes

    def scalar(self) -> float | Unreadable:
        """Return the value of a float32 scalar."""
        if self.dtype != "F32" or len(self.content) != 4:
            return Unreadable(f"is no float32 scalar but {len(self.content)} bytes of {self.dtype}")
        value: float = struct.unpack("<f", self.content)[0]
        return value

    def values(self) -> Iterator[float] | Unreadable:
        """Return every element as a number; an element type that is not read here is ``Unreadable``."""
        wide = self.dtype == "BF16"
        code = _FORMATS.get("F32" if wide else self.dtype)
        if code is None:
            return Unreadable(f"holds elements of {self.dtype}, which are not read")
        if len(self.content) % (2 if wide else struct.calcsize(f"<{code}")):
            return Unreadable(f"ends inside an element of {self.dtype}")
        content = _widened(self.content) if wide else self.content
        return (value for (value,) in struct.iter_unpack(f"<{code}", content))

    def flaw(self) -> str | None:
        """Say what keeps its elements from all being finite numbers, or None; it completes the sentence "it ..."."""
        values = self.values()
        if isinstance(values, Unreadable):
            return values.reason
        bad = next((value for value in values if not math.isfinite(value)), None)
        return None if bad is None else f"holds {bad}"


def _widened(content: bytes) -> bytes:
    """Return bfloat16 elements as float32: they are its upper halves."""
    wide = bytearray(2 * len(content))
    wide[2::4], wide[3::4] = content[::2], content[1::2]
    return bytes(wide)


def read_tensors(path: Path) -> Mapping[str, StoredTensor] | Unreadable:
    """Return every tensor of a file by name, or why the file cannot be read."""
    try:
        content = path.read_bytes()
    except OSError as error:
        return Unreadable(f"cannot be read: {error.strerror}")
    if len(content) < 8:
        return Unreadable("is too short for a header")
    (size,) = struct.unpack("<Q", content[:8])
    if size > len(content) - 8:
        return Unreadable("ends inside its header")
    header = read_object(content[8 : 8 + size])
    if isinstance(header, Unreadable):
        return header
    found: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        tensor = _tensor(entry, content[8 + size :])
        if tensor is None:
            return Unreadable(f"names no bytes for tensor {name}")
        found[name] = tensor
    return found


def _tensor(entry: object, data: bytes) -> StoredTensor | None:
    match entry:
        case {"dtype": str(dtype), "data_offsets": [int(start), int(end)]} if 0 <= start <= end <= len(data):
            return StoredTensor(dtype, data[start:end])
    return None
