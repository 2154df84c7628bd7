"""Does what is admitted run, and does what is refused not fit? Random steps on a narrow virtual card, and timed peers.

Storages are charged 1,024 times their size: a tiny model then takes about four megabytes a token, and the allocator's
segments of 2 and 20 MiB stand to the room as on a real card. Takes about twenty minutes; ``python -m bench.admission
OUT.json.gz`` keeps the recording.
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
from trainer_rank.devices.virtual import VirtualDevice
from trainer_rank.models.reference import TINY, build_reference
from trainer_rank.policies import load_policy

MAGNIFICATION = 1024
ROOM = 4 << 30
LONGEST = 40
CALLER = 4096
"""Bytes a token that the caller's loss may hold: a thousandth of what a token takes, as the policy's 64 B on a card."""


def _ragged(tokens: int) -> tuple[int, ...]:
    return tuple(lengths(random.Random(tokens), tokens, LONGEST))


PROBES = ((1,), _ragged(300), (2000,), _ragged(4000), _ragged(900))


def ground(steps: int = 3000, seconds: float = 3600.0, frontiers: int = 24, batches: int = 12) -> Ground:
    """Return the virtual card with the tiny model on it."""
    device = VirtualDevice("h200", 90, magnification=MAGNIFICATION)
    base = load_policy("forecast")
    return Ground(
        name="virtual H200, storages charged 1,024 times their size",
        device=device,
        model=build_reference(TINY, device, slots=SLOTS, seed=3),
        policy=replace(base, probe_lengths=PROBES, caller_bytes_per_token=CALLER, collective_claim_bytes=0),
        take=device.take_raw,
        piece=lambda size: torch.empty(max(1, size // MAGNIFICATION), dtype=torch.uint8, device=device.torch_device),
        room=ROOM,
        token_bytes=4_400_000,
        single_bytes=8_000_000,
        longest=LONGEST,
        steps=steps,
        seconds=seconds,
        frontiers=frontiers,
        batches=batches,
    )


def main() -> None:
    """Run the experiment and print its figures."""
    torch.set_num_threads(1)
    kept = [keeper(Path(each)) for each in sys.argv[1:2] if __name__ == "__main__"]
    print(summary(run(ground(), *kept)))


if __name__ == "__main__":
    main()
