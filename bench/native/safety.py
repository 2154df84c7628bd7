"""Put admission to the test on one H200: ``python -m bench.native.safety OUT.json.gz``, at most 200 seconds.

The same experiment as ``python -m bench admission``: the card is narrowed by a raw driver allocation, so that libraries
feel it too; random batches are admitted and run, every refused one is run all the same, bisection finds the largest
that really runs, and other ways to choose train on the same batches in the same rooms. The recording is written after
each part.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import torch

from bench._safety.batches import lengths
from bench._safety.experiment import keeper, run
from bench._safety.ground import SLOTS, Ground
from bench._safety.summary import summary
from bench.native.reference import GEOMETRY
from qualification.workloads.driver_memory import DriverMemory
from trainer_rank.devices.cuda import CudaDevice
from trainer_rank.models.reference import build_reference
from trainer_rank.policies import load_policy

ROOM = 4 << 30
LONGEST = 800
TOKEN_BYTES = 90_000
SECONDS = 170.0


def _ragged(tokens: int) -> tuple[int, ...]:
    return tuple(lengths(random.Random(tokens), tokens, LONGEST))


PROBES = (
    (1,),
    *map(_ragged, (2_500, 8_000, 14_000, 20_000, 26_000, 33_000, 41_000, 50_000, 60_000, 75_000, 120_000)),
    *((each,) for each in (9_000, 22_000, 34_000, 46_000, 70_000)),
    _ragged(30_000),
)
"""From one token to more than a room holds, in one request and in hundreds. Dense where rooms are filled: between two
probes whose events come in another order, the forecast's bound allows for both orders."""


def ground(device: CudaDevice) -> Ground:
    """Return one card with the medium reference model on it."""
    driver = DriverMemory()
    model = build_reference(GEOMETRY, device, slots=SLOTS, rank=8, alpha=16.0, seed=1, dtype=torch.bfloat16)
    return Ground(
        name=torch.cuda.get_device_name(),
        device=device,
        model=model,
        policy=replace(load_policy("forecast"), probe_lengths=PROBES),
        take=lambda size: driver.take(size, f"no {size} B for the ballast"),
        piece=lambda size: torch.empty(max(1, size), dtype=torch.uint8, device=device.torch_device),
        room=ROOM,
        token_bytes=TOKEN_BYTES,
        single_bytes=TOKEN_BYTES,
        longest=LONGEST,
        steps=300,
        seconds=SECONDS,
        frontiers=8,
        batches=6,
    )


def main(output: Path) -> None:
    """Run the experiment and print its figures."""
    print(summary(run(ground(CudaDevice(0)), keeper(output))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
