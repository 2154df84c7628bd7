"""The fixed rules of PyTorch's native CUDA caching allocator under default settings. Sizes in bytes.

Source: ``CUDACachingAllocator`` of PyTorch 2.11 to 2.13; the recordings under ``trainer_rank/tapes/recordings`` obey
them byte for byte. Other settings follow other rules: :mod:`trainer_rank.allocator.settings` names them.
"""

from __future__ import annotations

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
EIB = 1 << 60

BLOCK_GRANULE = 512
"""Every request is rounded up to a multiple of this; also the smallest remainder that a small block leaves."""
SMALL_LIMIT = MIB
"""Largest rounded request that the small pool serves; a large block's remainder must exceed it to be split off."""
SMALL_SEGMENT = 2 * MIB
"""What the small pool takes from the driver at a time."""
LARGE_SEGMENT = 20 * MIB
"""What the large pool takes for requests below ``LARGE_SEGMENT_LIMIT``."""
LARGE_SEGMENT_LIMIT = 10 * MIB
"""From this size on a request gets a segment of its own size, rounded up to ``SEGMENT_GRANULE``."""
SEGMENT_GRANULE = 2 * MIB
LARGEST_REQUEST = EIB
"""PyTorch refuses anything above; such a size is a broken number, not a lack of memory."""


def round_size(requested: int) -> int:
    """Return the block size that serves a request of ``requested`` >= 1 bytes."""
    return (requested + BLOCK_GRANULE - 1) & -BLOCK_GRANULE


def is_small(size: int) -> bool:
    """Tell whether the small pool serves a block of the rounded ``size``."""
    return size <= SMALL_LIMIT


def segment_size(size: int) -> int:
    """Return what the allocator asks the driver for when no cached block serves the rounded ``size``."""
    if size <= SMALL_LIMIT:
        return SMALL_SEGMENT
    if size < LARGE_SEGMENT_LIMIT:
        return LARGE_SEGMENT
    return whole_granules(size)


def whole_granules(size: int) -> int:
    """Round up to what the driver hands out."""
    return (size + SEGMENT_GRANULE - 1) & -SEGMENT_GRANULE


def splits(remainder: int, small: bool) -> bool:
    """Tell whether ``remainder`` bytes become a free block of their own instead of staying with the request."""
    return remainder >= BLOCK_GRANULE if small else remainder > SMALL_LIMIT
