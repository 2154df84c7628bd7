"""Replay a worker's allocator recordings with the installed (trusted) allocator model, apart from any worker."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from qualification.criteria.observation import Replay
from qualification.figures import Unreadable
from trainer_rank.allocator.replay import replay
from trainer_rank.allocator.trace import load_trace
from trainer_rank.errors import TraceError

SUFFIX = ".trace.json.gz"


def replays(artifacts: Mapping[str, Path]) -> dict[str, Replay | Unreadable]:
    """Replay every artifact whose name ends with ``.trace.json.gz``; one that cannot be read says why."""
    return {name.removesuffix(SUFFIX): _replay(path) for name, path in artifacts.items() if name.endswith(SUFFIX)}


def _replay(path: Path) -> Replay | Unreadable:
    try:
        trace = load_trace(path)
    except TraceError as error:
        return Unreadable(f"cannot be replayed: {str(error)[:300]}")
    result = replay(trace)
    actions = [event.action for event in trace.events]
    return Replay(
        exact=result.exact,
        peak_allocated=result.peak_allocated,
        peak_reserved=result.peak_reserved,
        allocated_after=result.after.allocated,
        segments_freed=actions.count("segment_free"),
        out_of_memory=actions.count("oom"),
        stages=tuple(stage for _, stage in trace.marks),
        divergence=None if result.divergence is None else str(result.divergence),
    )
