"""What a recording of the experiment shows, in figures and in tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

from bench._safety.admitted import QUEUE
from bench.native.tables import table

Row = Mapping[str, Any]
RAN, REFUSED = "ran", "refused"


class Steps(NamedTuple):
    """Counts of admitted micro-batches and of asked batches; fills are shares from 0 to 1, over queues alone."""

    admitted: int
    failed: int
    retries: int
    rungs: Mapping[str, int]
    limit_fills: tuple[float, ...]
    room_fills: tuple[float, ...]
    asked: int
    refused: int
    false: int
    ran_beyond: int


def steps_of(recording: Row) -> Steps:
    """Count what happened to every batch.

    A fill of the limit is the peak of reserved memory as a share of the most that PyTorch may hold beside all claims; a
    fill of the room leaves out of both what was held before.
    """
    rows = recording["steps"]
    ran = [row for row in rows if row["outcome"] == RAN]
    refused = [row for row in rows if row["outcome"] == REFUSED]
    queues = [row for row in ran if row["kind"] == QUEUE]
    failures = [row for row in rows if row["outcome"] not in (RAN, REFUSED)]
    return Steps(
        admitted=len(ran) + len(failures),
        failed=len(failures) + sum(row["out_of_memory"] for row in ran),
        retries=sum(row["retries"] for row in ran),
        rungs=Counter(row["rung"] for row in ran),
        limit_fills=tuple(row["peak_reserved"] / row["limit"] for row in queues),
        room_fills=tuple((row["peak_reserved"] - row["held"]) / (row["limit"] - row["held"]) for row in queues),
        asked=len(ran) + len(failures) + len(refused),
        refused=len(refused),
        false=sum(row["within"] for row in refused),
        ran_beyond=sum(row["would"] == RAN and not row["within"] for row in refused),
    )


def ratios(recording: Row, of: str = "most") -> tuple[float, ...]:
    """Tokens admitted whole, as shares of the most that really ran in the same room."""
    return tuple(row["admitted"] / row[of] for row in recording["frontiers"])


def speeds(recording: Row) -> dict[str, float | None]:
    """Tokens per second of each arm that trained on all batches, None of the others; ours over both of its turns."""
    found: dict[str, float | None] = {}
    for name in dict.fromkeys(row["arm"] for row in recording["arms"]):
        rows = [row for row in recording["arms"] if row["arm"] == name]
        done = all(row["outcome"] == "finished" for row in rows)
        found[name] = sum(row["tokens"] for row in rows) / sum(sum(row["seconds"]) for row in rows) if done else None
    return found


def best_constant(found: Mapping[str, float | None]) -> float | None:
    """The fastest constant token budget that ran out of memory in no batch."""
    return max((speed for name, speed in found.items() if name.startswith("constant") and speed), default=None)


def summary(recording: Row) -> str:
    """All figures as markdown; a part that is not there is left out."""
    parts = [_steps(steps_of(recording))] if recording.get("steps") else []
    parts += [_frontiers(recording)] if recording.get("frontiers") else []
    parts += [_arms(recording)] if recording.get("arms") else []
    return "\n\n".join(parts)


def _steps(found: Steps) -> str:
    rungs = ", ".join(f"{count:,} {rung}" for rung, count in sorted(found.rungs.items(), key=lambda each: -each[1]))
    return table(
        ["", "figure"],
        [
            ["admitted micro-batches", f"{found.admitted:,} ({rungs})"],
            ["out of memory", found.failed],
            ["allocator retries", found.retries],
            ["peak of the limit, micro-batches of queues", _spread(found.limit_fills)],
            ["the same, without what was held before", _spread(found.room_fills)],
            ["batches refused, of those asked", f"{found.refused:,} of {found.asked:,}"],
            ["refused, ran within the claims all the same", _share(found.false, found.asked)],
            ["refused, ran, but took what was claimed", _share(found.ran_beyond, found.asked)],
        ],
    )


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"mean {fmean(values):.1%}, median {median(values):.1%}, least {min(values):.1%}, most {max(values):.1%}"


def _share(count: int, whole: int) -> str:
    return f"{count:,} ({count / whole:.1%} of those asked)"


def _frontiers(recording: Row) -> str:
    rooms = len(recording["frontiers"])
    return table(
        [f"admitted whole in {rooms} rooms, as a share of", "figure"],
        [
            ["the most that ran at all", _spread(ratios(recording))],
            ["the most that ran without an allocator retry", _spread(ratios(recording, "clean"))],
        ],
    )


def _arms(recording: Row) -> str:
    found = speeds(recording)
    base = best_constant(found)
    rows = []
    for name, speed in found.items():
        first = next(row for row in recording["arms"] if row["arm"] == name)
        ratio = "-" if speed is None or base is None else f"{speed / base:.3f}"
        told = first["outcome"] if speed is None else f"{speed:,.0f}"
        rows.append([name, told, ratio, first.get("failures", "-"), first.get("retries", "-")])
    head = ["what runs together", "tokens/s", "against the best constant budget", "failures", "allocator retries"]
    return table(head, rows)
