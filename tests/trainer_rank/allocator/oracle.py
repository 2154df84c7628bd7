"""A second, slow formulation of the caching allocator: every question scans plain lists of pieces."""

from __future__ import annotations

from dataclasses import dataclass, field

MIB = 1 << 20


@dataclass
class Piece:
    size: int
    owner: int | None = None
    requested: int = 0
    pending: bool = False

    @property
    def free(self) -> bool:
        return self.owner is None


@dataclass
class Strip:
    """A segment: pieces lie end to end from ``address``."""

    address: int
    pool: str
    stream: int
    pieces: list[Piece] = field(default_factory=list)

    @property
    def total(self) -> int:
        return sum(piece.size for piece in self.pieces)

    def addresses(self) -> list[int]:
        return [self.address + sum(p.size for p in self.pieces[:index]) for index in range(len(self.pieces))]


class Oracle:
    """Same answers as the model, found by looking at everything."""

    def __init__(self, capacity: int, cap: int | None = None) -> None:
        self.capacity = capacity
        self.cap = capacity if cap is None else cap
        self.strips: list[Strip] = []
        self.retries = self.ooms = 0
        self.peak_allocated = self.peak_reserved = 0
        self.lowest = 0x7F00_0000_0000

    @property
    def reserved(self) -> int:
        return sum(strip.total for strip in self.strips)

    @property
    def allocated(self) -> int:
        return sum(p.size for s in self.strips for p in s.pieces if not p.free and not p.pending)

    def malloc(self, owner: int, requested: int, stream: int) -> int | None:
        size = -(-requested // 512) * 512
        pool = "small" if size <= MIB else "large"
        candidates = [
            (piece.size, address, strip, index)
            for strip in self.strips
            if strip.stream == stream and strip.pool == pool
            for index, (piece, address) in enumerate(zip(strip.pieces, strip.addresses(), strict=True))
            if piece.free and piece.size >= size
        ]
        if candidates:
            _, address, strip, index = min(candidates, key=lambda found: found[:2])
        else:
            new = self._segment(size, pool, stream)
            if new is None:
                return None
            strip, index, address = new, 0, new.address
        piece = strip.pieces[index]
        rest = piece.size - size
        if (pool == "small" and rest >= 512) or rest > MIB:
            strip.pieces[index : index + 1] = [Piece(size), Piece(rest)]
        strip.pieces[index].owner = owner
        strip.pieces[index].requested = requested
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return address

    def request_free(self, owner: int) -> None:
        self._piece(owner).pending = True

    def complete_free(self, owner: int) -> None:
        piece = self._piece(owner)
        piece.owner, piece.pending, piece.requested = None, False, 0
        for strip in self.strips:
            merged: list[Piece] = []
            for candidate in strip.pieces:
                if merged and merged[-1].free and candidate.free:
                    merged[-1].size += candidate.size
                else:
                    merged.append(candidate)
            strip.pieces = merged

    def empty_cache(self) -> None:
        for owner in [p.owner for s in self.strips for p in s.pieces if p.pending]:
            assert owner is not None
            self.complete_free(owner)
        self.strips = [strip for strip in self.strips if not all(piece.free for piece in strip.pieces)]

    def _piece(self, owner: int) -> Piece:
        return next(p for s in self.strips for p in s.pieces if p.owner == owner)

    def _segment(self, size: int, pool: str, stream: int) -> Strip | None:
        if pool == "small":
            total = 2 * MIB
        elif size < 10 * MIB:
            total = 20 * MIB
        else:
            total = -(-size // (2 * MIB)) * 2 * MIB
        if self.reserved + total > min(self.capacity, self.cap):
            self.empty_cache()
            self.retries += 1
            if self.reserved + total > min(self.capacity, self.cap):
                self.ooms += 1
                return None
        self.lowest -= total
        strip = Strip(self.lowest, pool, stream, [Piece(total)])
        self.strips.append(strip)
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return strip
