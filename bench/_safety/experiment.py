"""All parts in order: steps and refusals, the oracle, the peers. What there is is kept after each, and on failure."""

from __future__ import annotations

import gzip
import json
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from bench._safety import oracle, peers
from bench._safety.admitted import Admitted
from bench._safety.batches import Batches
from bench._safety.ground import Ground
from bench._safety.trainer import Trainer
from trainer_rank.policies import load_policy

SHARES = {"steps": 0.55, "frontiers": 0.7, "arms": 1.0}
"""By when each part ends at the latest, as shares of the ground's seconds."""


def run(ground: Ground, keep: Callable[[dict[str, Any]], None] = lambda _: None) -> dict[str, Any]:
    """Run every part and return the recording; ``keep`` is handed what there is after each part."""
    begun = time.perf_counter()
    batches = Batches(ground.model.geometry.vocabulary, ground.longest)
    ours, unseen = Trainer(ground, ground.policy), Trainer(ground, load_policy("none"))
    recording = _warmed(ground, batches, ours, unseen)
    stream = peers.drawn(ground, batches)
    parts: dict[str, Callable[[float], Iterable[dict[str, Any]]]] = {
        "steps": Admitted(ground, ours, batches).rows,
        "frontiers": lambda until: oracle.rows(ground, ours, unseen, batches, until),
        "arms": lambda until: peers.rows(ground, ours, unseen, stream, until),
    }
    for name, rows in parts.items():
        found = recording[name] = []
        try:
            for row in rows(begun + SHARES[name] * ground.seconds):
                found.append(row)
        finally:
            recording["elapsed_s"] = round(time.perf_counter() - begun, 1)
            keep(recording)
    return recording


def _warmed(ground: Ground, batches: Batches, ours: Trainer, unseen: Trainer) -> dict[str, Any]:
    """Probe on the open card, step every optimizer, let libraries take what they take, and narrow the card."""
    begun, draw = time.perf_counter(), random.Random(3)
    small = batches.queue(draw, 4 * ground.longest, 0.5)
    for trainer in (ours, unseen):
        trainer.run(small)
        trainer.rank.optim_step()
    warm = round(time.perf_counter() - begun, 1)
    ground.narrow()
    for trainer in (ours, unseen):
        trainer.run(small)
        trainer.rank.optim_step()
    return {
        "ground": ground.name,
        "torch": torch.__version__,
        "room": ground.room,
        "allocated": ground.device.allocated(),
        "card": ground.device.memory_info().total,
        "reserve": ground.policy.reserve_bytes,
        "warm_s": warm,
    }


def keeper(path: Path) -> Callable[[dict[str, Any]], None]:
    """Return what writes a recording to ``path``, equal bytes for equal recordings."""

    def keep(recording: dict[str, Any]) -> None:
        text = json.dumps(recording, separators=(",", ":")).encode()
        path.write_bytes(gzip.compress(text, mtime=0))

    return keep
