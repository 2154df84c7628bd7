"""Admitted steps in random rooms, and every refusal put to the test by running it all the same."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from bench._safety.batches import Batches, grouped
from bench._safety.ground import SLOTS, Ground
from bench._safety.trainer import DidNotFitError, Step, Trainer
from trainer_rank.errors import AdmissionRefused, TrainerRankError
from trainer_rank.requests import Request

QUEUE, GROUP, SINGLE = "queue", "group", "single"
"""Ungrouped requests, more than fit; one group that no micro-batch divides; one long request."""
MOST = 4
"""Micro-batches of a queue that run before the next room is drawn."""
STEPPED = 10
"""Rooms between two steps of the optimizer."""


class Admitted:
    """Draws rooms and batches until enough micro-batches of queues ran, or the time is up."""

    def __init__(self, ground: Ground, trainer: Trainer, batches: Batches) -> None:
        self._ground = ground
        self._trainer = trainer
        self._batches = batches
        self._draw = random.Random(5)

    def rows(self, until: float) -> Iterator[dict[str, Any]]:
        """Yield one row a micro-batch, and one a refused batch; ``until`` is a reading of the monotonic clock."""
        done = number = 0
        while done < self._ground.steps and time.perf_counter() < until:
            for row in self._room():
                done += row["outcome"] == "ran"
                yield row
            number += 1
            if number % STEPPED == 0:
                self._trainer.rank.optim_step()

    def _room(self) -> Iterator[dict[str, Any]]:
        draw, ground = self._draw, self._ground
        room = ground.draw_room(draw)
        kind = draw.choices((QUEUE, GROUP, SINGLE), (4, 1, 1))[0]
        batch = self._batch(kind, room)
        with ground.narrowed(room):
            held = ground.pieces(draw, room)
            base = {"kind": kind, "room": room, "asked": sum(each.tokens.shape[0] for each in batch)}
            try:
                for step in self._trainer.steps(batch, most=MOST if kind == QUEUE else None):
                    yield {**base, "outcome": "ran", **asdict(step)}
            except AdmissionRefused:
                yield {**base, "outcome": "refused", **self._tested(batch)}
            except DidNotFitError as error:
                yield {**base, "outcome": str(error)}
            except TrainerRankError as error:
                yield {**base, "outcome": f"{type(error).__name__}: {str(error)[:300]}"}
            del held

    def _tested(self, batch: list[Request]) -> dict[str, Any]:
        """Run a refused batch all the same; says whether it ran, and whether it stayed within what it was refused."""
        try:
            steps = self._trainer.run(batch, oversize=True)
        except DidNotFitError as error:
            return {"would": str(error), "within": False}
        except AdmissionRefused:
            return {"would": "unknown", "within": False}
        within = all(_within(step) for step in steps)
        return {"would": "ran", "within": within, **asdict(steps[-1])}

    def _batch(self, kind: str, room: int) -> list[Request]:
        draw, fits = self._draw, room // self._ground.token_bytes
        if kind == QUEUE:
            return self._batches.queue(draw, (MOST + 1) * fits * 3 // 2, draw.choice((0.0, 0.5)))
        if kind == GROUP:
            return grouped(self._batches.queue(draw, int(fits * draw.uniform(0.3, 3.0)), draw.choice((0.0, 0.5))))
        return [
            self._batches.request(int(room // self._ground.single_bytes * draw.uniform(0.6, 1.4)), draw.choice(SLOTS))
        ]


def _within(step: Step) -> bool:
    return step.limit is not None and step.peak_reserved <= step.limit and not step.retries and not step.out_of_memory
