"""A byte-exact model of PyTorch's native CUDA caching allocator, and the recordings that prove it."""

from trainer_rank.allocator.driver import Driver, DriverFigures, ModelledDriver
from trainer_rank.allocator.model import CachingAllocator
from trainer_rank.allocator.outofmemory import OutOfMemory, format_size
from trainer_rank.allocator.replay import Divergence, ReplayResult, replay
from trainer_rank.allocator.settings import require_supported, unsupported_settings
from trainer_rank.allocator.snapshot import Block, Segment, Snapshot
from trainer_rank.allocator.trace import Event, Trace, load_trace, save_trace

__all__ = [
    "Block",
    "CachingAllocator",
    "Divergence",
    "Driver",
    "DriverFigures",
    "Event",
    "ModelledDriver",
    "OutOfMemory",
    "ReplayResult",
    "Segment",
    "Snapshot",
    "Trace",
    "format_size",
    "load_trace",
    "replay",
    "require_supported",
    "save_trace",
    "unsupported_settings",
]
