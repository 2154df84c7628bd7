"""The largest batch that really runs in a room, found by bisection, beside the one that admission chose."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from bench._safety.batches import Batches, grouped
from bench._safety.ground import Ground
from bench._safety.trainer import DidNotFitError, Trainer
from trainer_rank.requests import Request


def rows(ground: Ground, ours: Trainer, unseen: Trainer, batches: Batches, until: float) -> Iterator[dict[str, Any]]:
    """Yield, for each room, the tokens that were admitted whole and the most that ran whole, unseen, at one try.

    The second has all of the room, without claims, cap or reserve; ``clean`` is the most that ran without the allocator
    having to return its cache on the way.
    """
    draw = random.Random(17)
    for _ in range(ground.frontiers):
        if time.perf_counter() > until:
            return
        room = ground.draw_room(draw)
        queue = batches.queue(draw, 3 * room // ground.token_bytes)
        with ground.narrowed(room):
            steps = ours.run(queue, most=1)
        admitted = sum(step.requests for step in steps)
        retries: dict[int, int | None] = {}

        def tried(
            count: int, room: int = room, queue: list[Request] = queue, seen: dict[int, int | None] = retries
        ) -> int | None:
            if count not in seen:
                seen[count] = _retries(ground, unseen, room, queue[:count])
            return seen[count]

        most = _largest(admitted, len(queue), lambda count: tried(count) is not None)
        clean = _largest(1, most, lambda count: tried(count) == 0)
        lengths = [each.tokens.shape[0] for each in queue]
        yield {
            "room": room,
            "admitted": sum(lengths[:admitted]),
            "rung": steps[0].rung,
            "most": sum(lengths[:most]),
            "clean": sum(lengths[:clean]),
            "next": sum(lengths[admitted : admitted + 1]),
            "tried": {sum(lengths[:count]): found for count, found in sorted(retries.items())},
        }


def _retries(ground: Ground, unseen: Trainer, room: int, requests: list[Request]) -> int | None:
    """Run requests whole; returns the allocator's retries, None when they did not fit."""
    with ground.narrowed(room):
        try:
            return sum(step.retries for step in unseen.run(grouped(requests)))
        except DidNotFitError:
            return None


def _largest(low: int, most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits, from ``low``, which does, by ever longer strides and then by halves."""
    stride, high = max(1, low // 64), most + 1
    while low + 1 < high:
        middle = min(low + stride, (low + high) // 2) if high > most else (low + high) // 2
        if fits(middle):
            low, stride = middle, 2 * stride
        else:
            high = middle
    return low
