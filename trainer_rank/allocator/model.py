"""A byte-exact model of PyTorch's native CUDA caching allocator, fast enough to replay recordings in plain Python.

A block is an integer handle, valid from :meth:`CachingAllocator.malloc` to its free. Its figures live in parallel
lists, so that a copy of the whole state costs a few list copies; a forecast starts every time from such a copy.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from trainer_rank.allocator.driver import Driver
from trainer_rank.allocator.outofmemory import OutOfMemory
from trainer_rank.allocator.rules import BLOCK_GRANULE, LARGEST_REQUEST, SMALL_LIMIT, is_small, round_size, segment_size
from trainer_rank.allocator.snapshot import ACTIVE, INACTIVE, PENDING, Block, Segment, Snapshot
from trainer_rank.errors import InvalidInputError

_FREE: Final = 0
_ALLOCATED: Final = 1
_PENDING: Final = 2
_VACANT: Final = 3  # the handle names no block
_STATE_NAMES: Final = (INACTIVE, ACTIVE, PENDING)
_NONE: Final = -1
_ADDRESS_BITS: Final = 64


class _Pool:
    """The free blocks of one stream and size class, ordered by (size, address).

    ``keys`` holds ``size << 64 | address`` so that ordering is one integer comparison; ``handles`` runs parallel to it.
    """

    __slots__ = ("handles", "keys", "small", "stream")

    def __init__(self, stream: int, small: bool, keys: list[int], handles: list[int]) -> None:
        self.stream = stream
        self.small = small
        self.keys = keys
        self.handles = handles

    def copy(self) -> _Pool:
        return _Pool(self.stream, self.small, self.keys.copy(), self.handles.copy())


class CachingAllocator:
    """Live state of one device's caching allocator. All figures in bytes.

    ``driver`` supplies segments; ``snapshot`` is the state to start from; ``cap`` bounds the reserved bytes, as
    ``set_per_process_memory_fraction`` does. Peaks start at the starting values.
    """

    def __init__(self, driver: Driver, snapshot: Snapshot | None = None, cap: int | None = None) -> None:
        self.driver = driver
        self.cap = cap
        self.allocated = 0
        self.reserved = 0
        self.num_alloc_retries = 0
        self.num_ooms = 0
        self._address: list[int] = []
        self._size: list[int] = []
        self._requested: list[int] = []
        self._previous: list[int] = []
        self._next: list[int] = []
        self._state: list[int] = []
        self._pool_of: list[int] = []  # index into _pools
        self._vacant: list[int] = []  # handles to use again
        self._pools: list[_Pool] = []
        self._pool_index: dict[int, int] = {}  # stream << 1 | small -> index into _pools
        self._heads: dict[int, int] = {}  # first block of each segment -> segment's total
        self._pending: dict[int, None] = {}  # freed by the caller, still used by another stream
        for segment in snapshot.segments if snapshot else ():
            self._adopt(segment)
        self.peak_allocated = self.allocated
        self.peak_reserved = self.reserved

    def copy(self, driver: Driver) -> CachingAllocator:
        """Return an independent allocator in the same state on ``driver``; handles mean the same blocks in both."""
        twin = CachingAllocator.__new__(CachingAllocator)
        twin.__dict__.update(self.__dict__)
        twin.driver = driver
        for name in ("_address", "_size", "_requested", "_previous", "_next", "_state", "_pool_of", "_vacant"):
            setattr(twin, name, getattr(self, name).copy())
        twin._pools = [pool.copy() for pool in self._pools]
        twin._pool_index = self._pool_index.copy()
        twin._heads = self._heads.copy()
        twin._pending = self._pending.copy()
        return twin

    def count(self, segment: Segment) -> None:
        """Count a segment of live blocks that stay as they are; it costs nothing more until :meth:`take_in`."""
        self.allocated += segment.total
        self.reserved += segment.total

    def take_in(self, segment: Segment) -> dict[int, int]:
        """Model a segment that was only counted: one of its blocks will be freed. Return its handles by address."""
        self.allocated -= segment.total
        self.reserved -= segment.total
        return dict(zip((block.address for block in segment.blocks), self._adopt(segment), strict=True))

    def malloc(self, requested: int, stream: int = 0) -> int:
        """Allocate ``requested`` bytes and return the block's handle.

        Raises OutOfMemory when the driver or the cap refuses even after the cache was freed, and InvalidInputError for
        sizes that PyTorch never serves: a zero-byte storage owns nothing, above 1 EiB the number is broken.
        """
        if not 0 < requested <= LARGEST_REQUEST:
            raise InvalidInputError(f"cannot allocate {requested} B: a block has between 1 B and 1 EiB")
        size = (requested + BLOCK_GRANULE - 1) & -BLOCK_GRANULE
        small = size <= SMALL_LIMIT
        index = self._pool_index.get(stream << 1 | small)
        if index is None:
            index = self._open_pool(stream, small)
        pool = self._pools[index]
        keys = pool.keys
        at = bisect_left(keys, size << _ADDRESS_BITS)
        if at < len(keys):
            key = keys.pop(at)
            handle = pool.handles.pop(at)
            found = key >> _ADDRESS_BITS
        else:
            handle = self._grow(size, requested, index)
            found = self._size[handle]
            at = len(pool.keys)
        remainder = found - size
        if remainder >= BLOCK_GRANULE if small else remainder > SMALL_LIMIT:
            self._split(handle, size, remainder, at)
            found = size
        self._state[handle] = _ALLOCATED
        self._requested[handle] = requested
        allocated = self.allocated + found
        self.allocated = allocated
        if allocated > self.peak_allocated:
            self.peak_allocated = allocated
        return handle

    def free(self, handle: int) -> None:
        """Free a block that no other stream uses: request and completion at once."""
        if self._state[handle] != _ALLOCATED:
            raise InvalidInputError(f"block {handle} is not allocated; it cannot be freed")
        self.allocated -= self._size[handle]
        self._release_block(handle)

    def request_free(self, handle: int) -> None:
        """Count the block as free of its owner; it stays out of the pool until :meth:`complete_free`."""
        if self._state[handle] != _ALLOCATED:
            raise InvalidInputError(f"block {handle} is not allocated; it cannot be freed")
        self.allocated -= self._size[handle]
        self._state[handle] = _PENDING
        self._pending[handle] = None

    def complete_free(self, handle: int) -> None:
        """Return a requested block to its pool, merged with its free neighbours: its last stream is done with it."""
        if self._state[handle] != _PENDING:
            raise InvalidInputError(f"block {handle} is not pending; its free cannot complete")
        del self._pending[handle]
        self._release_block(handle)

    def empty_cache(self) -> int:
        """Complete pending frees, give every wholly free segment back to the driver, and return the bytes given."""
        for handle in list(self._pending):
            self.complete_free(handle)
        return self.release_cached()

    def release_cached(self) -> int:
        """Give every wholly free segment back without waiting for pending frees; return the bytes given."""
        before = self.reserved
        for pool in sorted(self._pools, key=lambda pool: (pool.small, pool.stream)):
            whole = [h for h in pool.handles if self._previous[h] == _NONE and self._next[h] == _NONE]
            for handle in whole:
                self._give_back(handle, pool)
        return before - self.reserved

    def cached_segments(self) -> list[tuple[int, int]]:
        """Return (address, bytes) of the wholly free segments, in the order in which a release gives them back."""
        return [
            (self._address[h], self._size[h])
            for pool in sorted(self._pools, key=lambda pool: (pool.small, pool.stream))
            for h in pool.handles
            if self._previous[h] == _NONE and self._next[h] == _NONE
        ]

    def address(self, handle: int) -> int:
        """Return the block's address."""
        return self._address[handle]

    def size(self, handle: int) -> int:
        """Return the block's bytes: the rounded request plus a remainder too small to split off."""
        return self._size[handle]

    def requested(self, handle: int) -> int:
        """Return the bytes that the block's owner asked for."""
        return self._requested[handle]

    def live(self) -> dict[int, tuple[int, int, int]]:
        """Return address -> (handle, requested bytes, stream) of the allocated and pending blocks."""
        return {
            self._address[h]: (h, self._requested[h], self._pools[self._pool_of[h]].stream)
            for h, state in enumerate(self._state)
            if state in (_ALLOCATED, _PENDING)
        }

    def best_fit(self, requested: int, stream: int = 0) -> int | None:
        """Return the address of the cached block that would serve ``requested`` bytes, or None."""
        size = round_size(requested)
        index = self._pool_index.get(stream << 1 | is_small(size))
        if index is None:
            return None
        pool = self._pools[index]
        at = bisect_left(pool.keys, size << _ADDRESS_BITS)
        return self._address[pool.handles[at]] if at < len(pool.keys) else None

    def reset_peaks(self) -> None:
        """Start new peaks from the present values."""
        self.peak_allocated = self.allocated
        self.peak_reserved = self.reserved

    def snapshot(self) -> Snapshot:
        """Return the present segments and blocks, by address."""
        return Snapshot(tuple(sorted(self._segment(head, total) for head, total in self._heads.items())))

    def _segment(self, head: int, total: int) -> Segment:
        blocks = []
        handle = head
        while handle != _NONE:
            state = self._state[handle]
            requested = 0 if state == _FREE else self._requested[handle]
            blocks.append(Block(self._address[handle], self._size[handle], requested, _STATE_NAMES[state]))
            handle = self._next[handle]
        pool = self._pools[self._pool_of[head]]
        return Segment(self._address[head], total, "small" if pool.small else "large", pool.stream, tuple(blocks))

    def _open_pool(self, stream: int, small: bool) -> int:
        index = len(self._pools)
        self._pools.append(_Pool(stream, small, [], []))
        self._pool_index[stream << 1 | small] = index
        return index

    def _adopt(self, segment: Segment) -> list[int]:
        small = segment.pool == "small"
        index = self._pool_index.get(segment.stream << 1 | small)
        if index is None:
            index = self._open_pool(segment.stream, small)
        last = _NONE
        handles = []
        for block in segment.blocks:
            handle = self._new_block(block.address, block.size, index)
            handles.append(handle)
            self._previous[handle] = last
            self._requested[handle] = block.requested
            if last == _NONE:
                self._heads[handle] = segment.total
            else:
                self._next[last] = handle
            last = handle
            if block.state == INACTIVE:
                self._insert(handle, self._pools[index])
            elif block.state == ACTIVE:
                self._state[handle] = _ALLOCATED
                self.allocated += block.size
            else:
                self._state[handle] = _PENDING
                self._pending[handle] = None
        self.reserved += segment.total
        return handles

    def _new_block(self, address: int, size: int, index: int) -> int:
        if self._vacant:
            handle = self._vacant.pop()
            self._address[handle] = address
            self._size[handle] = size
            self._pool_of[handle] = index
            self._state[handle] = _FREE
            self._previous[handle] = self._next[handle] = _NONE
            return handle
        self._address.append(address)
        self._size.append(size)
        self._requested.append(0)
        self._previous.append(_NONE)
        self._next.append(_NONE)
        self._state.append(_FREE)
        self._pool_of.append(index)
        return len(self._address) - 1

    def _split(self, handle: int, size: int, remainder: int, at: int) -> None:
        """Cut ``handle`` to ``size``; the rest becomes a free block, which sorts no higher than position ``at``."""
        address = self._address[handle] + size
        index = self._pool_of[handle]
        rest = self._new_block(address, remainder, index)
        following, preceding = self._next, self._previous
        after = following[handle]
        self._size[handle] = size
        following[handle] = rest
        following[rest] = after
        preceding[rest] = handle
        if after != _NONE:
            preceding[after] = rest
        pool = self._pools[index]
        key = remainder << _ADDRESS_BITS | address
        at = bisect_left(pool.keys, key, 0, at)
        pool.keys.insert(at, key)
        pool.handles.insert(at, rest)

    def _release_block(self, handle: int) -> None:
        """Make a block free, merged with the free blocks on either side; the lowest handle of them survives."""
        pool = self._pools[self._pool_of[handle]]
        keys, handles = pool.keys, pool.handles
        sizes, states, addresses = self._size, self._state, self._address
        following, preceding = self._next, self._previous
        size = sizes[handle]
        before, after = preceding[handle], following[handle]
        if before != _NONE and states[before] == _FREE:
            length = sizes[before]
            at = bisect_left(keys, length << _ADDRESS_BITS | addresses[before])
            del keys[at], handles[at]
            size += length
            following[before] = after
            if after != _NONE:
                preceding[after] = before
            states[handle] = _VACANT
            self._vacant.append(handle)
            handle = before
        if after != _NONE and states[after] == _FREE:
            length = sizes[after]
            at = bisect_left(keys, length << _ADDRESS_BITS | addresses[after])
            del keys[at], handles[at]
            size += length
            beyond = following[handle] = following[after]
            if beyond != _NONE:
                preceding[beyond] = handle
            states[after] = _VACANT
            self._vacant.append(after)
        states[handle] = _FREE
        sizes[handle] = size
        key = size << _ADDRESS_BITS | addresses[handle]
        at = bisect_left(keys, key)
        keys.insert(at, key)
        handles.insert(at, handle)

    def _insert(self, handle: int, pool: _Pool) -> None:
        key = self._size[handle] << _ADDRESS_BITS | self._address[handle]
        at = bisect_left(pool.keys, key)
        pool.keys.insert(at, key)
        pool.handles.insert(at, handle)

    def _give_back(self, handle: int, pool: _Pool) -> None:
        size = self._size[handle]
        at = bisect_left(pool.keys, size << _ADDRESS_BITS | self._address[handle])
        del pool.keys[at], pool.handles[at]
        del self._heads[handle]
        self._state[handle] = _VACANT
        self._vacant.append(handle)
        self.reserved -= size
        self.driver.give_back(self._address[handle], size)

    def _grow(self, size: int, requested: int, index: int) -> int:
        """Take a segment for ``size`` bytes; free the cache once and ask again when it is refused."""
        total = segment_size(size)
        address = self._take(total)
        if address is None:
            self.empty_cache()
            self.num_alloc_retries += 1
            address = self._take(total)
        if address is None:
            self.num_ooms += 1
            raise OutOfMemory(
                asked=total,
                requested=requested,
                stream=self._pools[index].stream,
                driver=self.driver.figures(),
                allocated=self.allocated,
                reserved=self.reserved,
                allowed=self.cap,
            )
        handle = self._new_block(address, total, index)
        self._heads[handle] = total
        self.reserved += total
        if self.reserved > self.peak_reserved:
            self.peak_reserved = self.reserved
        return handle

    def _take(self, total: int) -> int | None:
        if self.cap is not None and self.reserved + total > self.cap:
            return None
        return self.driver.take(total)
