"""The same batches in the same rooms under other ways to choose what runs together, timed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from bench._safety.batches import Batches, budgeted, grouped
from bench._safety.ground import Ground
from bench._safety.trainer import DidNotFitError, Trainer
from trainer_rank.requests import Request

SHARES = (0.95, 1.0, 0.85, 1.05, 0.75, 1.1)
"""Constant budgets that are tried, as shares of what is admitted of training requests in the narrowest room."""


class Batch(NamedTuple):
    """One optimizer step's requests and the room that they meet."""

    room: int
    requests: list[Request]


class Arm(NamedTuple):
    """``run`` trains on one batch and returns how often it ran out of memory; ``trainer`` steps the optimizer."""

    name: str
    trainer: Trainer
    run: Callable[[list[Request]], int]


def drawn(ground: Ground, batches: Batches) -> list[Batch]:
    """Draw the batches: about four rooms full each, half of them with as much to score as to train."""
    draw = random.Random(29)
    found = []
    for number in range(ground.batches):
        room = ground.draw_room(draw)
        tokens = 4 * ground.room // ground.token_bytes
        found.append(Batch(room, batches.queue(draw, tokens, (number % 2) / 2)))
    return found


def rows(
    ground: Ground, ours: Trainer, unseen: Trainer, stream: Sequence[Batch], until: float
) -> Iterator[dict[str, Any]]:
    """Yield one row an arm: seconds of the batches, tokens, failures. Ours runs first and last."""
    admission = Arm("admission", ours, lambda requests: len(ours.run(requests)) and 0)
    with ground.narrowed(min(each.room for each in stream)):
        training = [each for batch in stream for each in batch.requests if each.gradients]
        (step,) = ours.run(training, most=1)
    constants = [_constant(unseen, int(step.tokens * share)) for share in SHARES]
    arms = [admission, Arm("halving", unseen, Halving(ground, unseen)), *constants, admission]
    for arm in arms:
        if time.perf_counter() > until:
            return
        yield {"arm": arm.name, **_timed(ground, arm, stream)}


def _constant(unseen: Trainer, most: int) -> Arm:
    return Arm(f"constant {most}", unseen, lambda requests: len(unseen.run(budgeted(requests, most))) and 0)


class Halving:
    """As many requests as ran last; when they run out of memory, half as many, and the batch again from its start."""

    def __init__(self, ground: Ground, unseen: Trainer) -> None:
        self._ground = ground
        self._unseen = unseen
        self._size: int | None = None

    def __call__(self, requests: list[Request]) -> int:
        """Train on a batch; returns the failures on the way."""
        failures = 0
        self._size = self._size or len(requests)
        while True:
            parts = [requests[at : at + self._size] for at in range(0, len(requests), self._size)]
            try:
                for number, part in enumerate(parts):
                    self._unseen.run(grouped(part, str(number)))
            except DidNotFitError:
                if self._size == 1:
                    raise
                failures += 1
                self._size //= 2
                self._ground.clean()
            else:
                return failures


def _timed(ground: Ground, arm: Arm, stream: Sequence[Batch]) -> dict[str, Any]:
    """Run the stream, until a failure that the arm does not survive."""
    seconds: list[float] = []
    retries, failures = ground.device.allocator_retries(), 0
    for batch in stream:
        with ground.narrowed(batch.room):
            ground.device.synchronize()
            begun = time.perf_counter()
            try:
                failures += arm.run(batch.requests)
                arm.trainer.rank.optim_step()
            except DidNotFitError as error:
                return {"outcome": str(error), "batches": len(seconds), "seconds": seconds}
            ground.device.synchronize()
            seconds.append(time.perf_counter() - begun)
    tokens = sum(each.tokens.shape[0] for batch in stream for each in batch.requests)
    found = ground.device.allocator_retries() - retries
    return {"outcome": "finished", "seconds": seconds, "tokens": tokens, "failures": failures, "retries": found}
