"""The allocator's memory at one moment: segments taken from the driver and the blocks they are cut into."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

from trainer_rank.errors import TraceError

ACTIVE = "active_allocated"
PENDING = "active_pending_free"
INACTIVE = "inactive"
STATES = frozenset({ACTIVE, PENDING, INACTIVE})
_SPELLINGS = {"active_awaiting_free": PENDING}


class Block(NamedTuple):
    """A piece of a segment. ``requested`` is what the caller asked for, 0 when inactive. Bytes."""

    address: int
    size: int
    requested: int
    state: str


class Segment(NamedTuple):
    """Memory taken from the driver at once. ``pool`` is small or large; blocks lie end to end, lowest first."""

    address: int
    total: int
    pool: str
    stream: int
    blocks: tuple[Block, ...]


class Snapshot(NamedTuple):
    """All segments of one device, by address."""

    segments: tuple[Segment, ...] = ()

    @property
    def reserved(self) -> int:
        """Bytes taken from the driver."""
        return sum(segment.total for segment in self.segments)

    @property
    def allocated(self) -> int:
        """Bytes in live blocks."""
        return sum(block.size for segment in self.segments for block in segment.blocks if block.state == ACTIVE)

    def to_trace(self) -> list[dict[str, Any]]:
        """Return the form used in trace files: keys a, t, k, st and b (see :func:`from_trace`)."""
        return [
            {"a": s.address, "t": s.total, "k": s.pool, "st": s.stream, "b": [list(block) for block in s.blocks]}
            for s in self.segments
        ]


def from_trace(value: object, where: str = "before") -> Snapshot:
    """Read ``[{"a": address, "t": total, "k": pool, "st": stream, "b": [[address, size, requested, state]]}]``.

    Raises TraceError naming the segment when a field is missing, of the wrong type, or contradicts another.
    """
    if not isinstance(value, list):
        raise TraceError(f"{where}: a list of segments is needed, not {type(value).__name__}")
    segments = [_segment(item, f"{where} segment {index}") for index, item in enumerate(value)]
    return _checked(segments, where)


def from_torch(segments: Iterable[Mapping[str, Any]], device: int = 0) -> Snapshot:
    """Read the value of ``torch.cuda.memory_snapshot()`` for one device; expandable segments are refused.

    A segment that reads as it did before is the one that was made then.
    """
    found = []
    for segment in segments:
        if segment["device"] != device:
            continue
        place = segment["address"], segment["total_size"], segment["segment_type"], segment["stream"]
        if segment.get("is_expandable"):
            raise TraceError(
                f"memory snapshot segment at {place[0]:#x} is expandable; "
                "the model covers the native allocator's fixed segments only"
            )
        rows = [(each["size"], each.get("requested_size", each["size"]), each["state"]) for each in segment["blocks"]]
        found.append(_segment_of(place, tuple(rows)))
    return _checked(found, "memory snapshot")


@lru_cache(maxsize=8192)
def _segment_of(place: tuple[int, int, str, int], rows: tuple[tuple[int, int, str], ...]) -> Segment:
    address, total, pool, stream = place
    blocks, lowest = [], address
    for size, requested, state in rows:
        blocks.append([lowest, size, requested, state])
        lowest += size
    item = {"a": address, "t": total, "k": pool, "st": stream, "b": blocks}
    return _segment(item, f"memory snapshot segment at {address:#x}")


def difference(ours: Snapshot, theirs: Snapshot) -> str | None:
    """Describe the first segment or block in which two snapshots differ; None when they are equal."""
    if len(ours.segments) != len(theirs.segments):
        return f"{len(ours.segments)} segments against {len(theirs.segments)}"
    for mine, other in zip(ours.segments, theirs.segments, strict=True):
        if mine[:4] != other[:4]:
            return f"segment {mine[:4]} against {other[:4]}"
        if mine.blocks != other.blocks:
            pairs = zip_longest(mine.blocks, other.blocks)
            block, counterpart = next((a, b) for a, b in pairs if a != b)
            return f"in segment {mine.address:#x} block {_told(block)} against {_told(counterpart)}"
    return None


def _told(block: Block | None) -> str:
    return "none" if block is None else f"{block.address:#x} of {block.size} B {block.state}"


def whole_number(value: object, what: str, limit: int = 1 << 64) -> int:
    """Return ``value`` if it is an integer in [0, ``limit``); raise TraceError naming ``what`` otherwise."""
    if type(value) is not int:
        raise TraceError(f"{what} is {_shown(value)}, not an integer")
    if not 0 <= value < limit:
        raise TraceError(f"{what} is {_shown(value)}, outside 0 to {limit - 1}")
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _segment(item: object, where: str) -> Segment:
    if not isinstance(item, Mapping):
        raise TraceError(f"{where} is {_shown(item)}, not an object")
    missing = {"a", "t", "k", "st", "b"} - item.keys()
    if missing:
        raise TraceError(f"{where} lacks {', '.join(sorted(missing))}")
    if item["k"] not in ("small", "large"):
        raise TraceError(f"{where} has pool {_shown(item['k'])}; small or large is needed")
    if not isinstance(item["b"], list) or not item["b"]:
        raise TraceError(f"{where} has no blocks")
    address = whole_number(item["a"], f"{where} address")
    total = whole_number(item["t"], f"{where} total")
    blocks = tuple(_block(row, f"{where} block {index}") for index, row in enumerate(item["b"]))
    expected = address
    for index, block in enumerate(blocks):
        if block.address != expected:
            raise TraceError(
                f"{where} block {index} starts at {block.address:#x}; {expected:#x} is next in the segment"
            )
        expected += block.size
    if expected != address + total:
        raise TraceError(f"{where} holds {total} B but its blocks sum to {expected - address} B")
    return Segment(address, total, item["k"], whole_number(item["st"], f"{where} stream"), blocks)


def _block(row: object, where: str) -> Block:
    if not isinstance(row, list) or len(row) != 4:
        raise TraceError(f"{where} is {_shown(row)}; [address, size, requested size, state] is needed")
    state = _SPELLINGS.get(row[3], row[3]) if isinstance(row[3], str) else row[3]
    if not isinstance(state, str) or state not in STATES:
        raise TraceError(f"{where} has state {_shown(row[3])}; one of {', '.join(sorted(STATES))} is needed")
    size = whole_number(row[1], f"{where} size")
    if size == 0:
        raise TraceError(f"{where} is empty; a block has at least one byte")
    requested = whole_number(row[2], f"{where} requested size")
    return Block(whole_number(row[0], f"{where} address"), size, requested if state != INACTIVE else 0, state)


def _checked(segments: list[Segment], where: str) -> Snapshot:
    segments.sort()
    for lower, upper in pairwise(segments):
        if upper.address < lower.address + lower.total:
            raise TraceError(f"{where}: segments at {lower.address:#x} and {upper.address:#x} overlap")
    return Snapshot(tuple(segments))
