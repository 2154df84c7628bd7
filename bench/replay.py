"""How fast recordings are replayed, against the same rules over plain dictionaries and a linear scan."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from time import perf_counter

from trainer_rank.allocator.replay import replay
from trainer_rank.allocator.rules import is_small, round_size, segment_size, splits
from trainer_rank.allocator.trace import Trace, load_trace

PASSES = 9


class PlainAllocator:
    """The peer: one record per block, every search a scan over the free blocks of its pool; same answers."""

    def __init__(self, trace: Trace) -> None:
        self.free: dict[tuple[int, bool], dict[int, int]] = {}
        self.blocks: dict[int, dict[str, int]] = {}
        self.live: dict[int, tuple[int, bool]] = {}
        self.allocated = self.reserved = 0
        for segment in trace.before.segments:
            pool = (segment.stream, segment.pool == "small")
            for block in segment.blocks:
                self.blocks[block.address] = {"size": block.size, "segment": segment.address}
                if block.state == "inactive":
                    self.free.setdefault(pool, {})[block.address] = block.size
                else:
                    self.live[block.address] = pool
                    self.allocated += block.size
            self.reserved += segment.total
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def run(self, trace: Trace) -> None:
        """Apply every row; segments come from the recording."""
        taken = 0
        for action, address, size, stream in trace.events:
            if action == "alloc":
                self.malloc(size, stream, taken)
            elif action == "segment_alloc":
                taken = address
            elif action == "free_completed":
                self.release(address)

    def malloc(self, requested: int, stream: int, taken: int) -> None:
        """Serve one request from the best fit, or from the segment at ``taken``."""
        size = round_size(requested)
        pool = (stream, is_small(size))
        free = self.free.setdefault(pool, {})
        fits = [(length, address) for address, length in free.items() if length >= size]
        if fits:
            found, address = min(fits)
            del free[address]
        else:
            found, address = segment_size(size), taken
            self.blocks[address] = {"size": found, "segment": address}
            self.reserved += found
        if splits(found - size, pool[1]):
            self.blocks[address + size] = {"size": found - size, "segment": self.blocks[address]["segment"]}
            free[address + size] = found - size
            self.blocks[address]["size"] = found = size
        self.live[address] = pool
        self.allocated += found
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def release(self, address: int) -> None:
        """Free one block and merge it with the free blocks that touch it."""
        free = self.free.setdefault(self.live.pop(address), {})
        block = self.blocks[address]
        self.allocated -= block["size"]
        beyond = address + block["size"]
        if beyond in free and self.blocks[beyond]["segment"] == block["segment"]:
            block["size"] += free.pop(beyond)
            del self.blocks[beyond]
        for lower, length in free.items():
            if lower + length == address and self.blocks[lower]["segment"] == block["segment"]:
                self.blocks[lower]["size"] = free[lower] = length + block["size"]
                del self.blocks[address]
                return
        free[address] = block["size"]


def _peer_rate(trace: Trace) -> float:
    peer = PlainAllocator(trace)
    start = perf_counter()
    peer.run(trace)
    rate = len(trace.events) / (perf_counter() - start)
    if (peer.peak_allocated, peer.peak_reserved) != (trace.peak_allocated, trace.peak_reserved):
        raise AssertionError(f"the peer does not reproduce {trace.source}; its rate says nothing")
    return rate


def main() -> None:
    """Print events per second of each shipped recording, ours and the peer's: best of alternating passes."""
    print(f"{'recording':34} {'rows':>6} {'events/s':>12} {'plain scan':>12} {'ratio':>6}")
    for path in sorted(Path(str(files("trainer_rank.tapes").joinpath("recordings"))).glob("*.gz")):
        trace = load_trace(path)
        pairs = [(replay(trace), _peer_rate(trace)) for _ in range(PASSES)]
        if not all(result.exact for result, _ in pairs):
            raise AssertionError(f"{path.name} is not exact")
        ours = max(result.events_per_second for result, _ in pairs)
        peer = max(rate for _, rate in pairs)
        print(f"{path.name:34} {len(trace.events):6,} {ours:12,.0f} {peer:12,.0f} {ours / peer:5.1f}x")
