"""Random steps on a narrow virtual card: does what is admitted run, and does what is refused really not fit?

The caller holds a random part of the card before each step, so that rooms, cut-up caches and plans keep changing. Every
refused batch is then run all the same (oversized), to see whether it would have fitted beside the claims. The card is
deliberately small: a forecast's margin of one 20 MiB segment is a fifth of its room, so refusals are many here. Takes
about eight minutes.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from trainer_rank.devices.virtual import VirtualDevice
from trainer_rank.errors import AdmissionRefused
from trainer_rank.models.reference import TINY, build_reference
from trainer_rank.policies import load_policy
from trainer_rank.rank import TrainerRank
from trainer_rank.requests import Request

STEPS = 3000
ROOM = 110 << 20
"""Bytes of the card beside context and libraries."""
SLOTS = ("policy", "adversary")
_PROBES = ((4,), (60, 17), (300, 120, 31, 5, 1), (90, 33, 2))


class _Trainer:
    """A rank on a narrow card, and what it said."""

    def __init__(self, index: int, ladder: tuple[str, ...]) -> None:
        self.events: Counter[str] = Counter()
        self.figures: dict[str, Any] = {}
        outside = 1_358_757_888
        self.device = VirtualDevice("h200", index, capacity=outside + ROOM)
        model = build_reference(TINY, self.device, slots=SLOTS, seed=3)
        base = load_policy("forecast")
        policy = replace(base, ladder=ladder, probe_lengths=_PROBES, reserve_bytes=2 << 20, collective_claim_bytes=0)
        self.rank = TrainerRank(model, policy, on_event=self._note)

    def _note(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "release" and event["granted"]:
            self.events["releases"] += 1  # one device's cache is returned by a retry that is provoked
        if event["event"] == "forecast":
            self.figures = dict(event)
            self.events[event["rung"]] += 1

    def failures(self) -> tuple[int, int]:
        """Return how often the allocator ran out, and how often it retried other than for a release."""
        return self.device.out_of_memory_count(), self.device.allocator_retries() - self.events["releases"]

    def step(self, batch: list[Request], oversize: bool = False) -> int:
        """Run a batch; returns the tokens that ran."""
        tokens = 0
        for micro_batch in self.rank.forward_micro_batches(batch, allow_oversize=oversize):
            loss = torch.stack([each.log_probabilities.mean() for each in micro_batch.outputs.values()]).mean()
            self.rank.backward(micro_batch, loss)
            tokens += sum(each.log_probabilities.shape[0] for each in micro_batch.outputs.values())
        return tokens


def main() -> None:
    """Run the steps and print what happened."""
    torch.set_num_threads(1)
    trainer = _Trainer(90, ("whole", "split", "host-held", "rerun"))
    draw = random.Random(5)
    generator = torch.Generator().manual_seed(5)
    trainer.step(_batch(draw, generator))
    trainer.rank.optim_step()
    count: Counter[str] = Counter()
    fills, begun = [], time.perf_counter()
    while count["admitted"] < STEPS:
        batch = _batch(draw, generator)
        ballast = _ballast(trainer.device, draw)
        before = trainer.failures()
        try:
            count["tokens"] += trainer.step(batch)
        except AdmissionRefused:
            count["refused"] += 1
            count["false"] += _would_fit(trainer, batch)
        else:
            count["admitted"] += 1
            after = trainer.failures()
            count["out of memory"] += after[0] - before[0]
            count["retries"] += after[1] - before[1]
            fills.append(trainer.device.peak_reserved() / ROOM)
        del ballast
        if count["admitted"] % 10 == 0:
            trainer.rank.optim_step()
    seconds = time.perf_counter() - begun
    fills.sort()
    print(f"admitted {count['admitted']}: out of memory {count['out of memory']}, retries {count['retries']}")
    print(
        f"rungs {dict(trainer.events)}; "
        f"peak reserved of the room: median {fills[len(fills) // 2]:.2f}, most {fills[-1]:.2f}"
    )
    asked = count["admitted"] + count["refused"]
    print(f"refused {count['refused']} of {asked}, of which {count['false']} fitted beside the claims")
    print(f"{count['tokens'] / seconds:.0f} tokens/s, refusals and their checks included")


def _batch(draw: random.Random, generator: torch.Generator) -> list[Request]:
    found = []
    for index in range(draw.randint(1, 6)):
        length = draw.choice((draw.randint(1, 40), draw.randint(1, 300)))
        tokens = torch.randint(0, TINY.vocabulary, (length + 1,), generator=generator)
        found.append(Request(tokens[:-1], tokens[1:], SLOTS[index % 2], group="g"))
    return found


def _ballast(device: VirtualDevice, draw: random.Random) -> list[torch.Tensor]:
    """Hold pieces of what the driver has free, until a random part of it is left."""
    left, held = draw.randint(0, 48 << 20), []
    while (room := device.memory_info().free - left) >= 10 << 20:
        size = draw.randint(10 << 20, room) & -(2 << 20)
        held.append(torch.empty(size, dtype=torch.uint8, device=device.torch_device))
    return held


def _would_fit(trainer: _Trainer, batch: list[Request]) -> bool:
    """Run a refused batch all the same; says whether it stayed within what was free and unclaimed."""
    reserved = trainer.device.reserved()
    _, retries = trainer.failures()
    try:
        trainer.step(batch, oversize=True)
    except Exception as error:
        trainer.rank.discard_gradients()
        if not isinstance(error, AdmissionRefused | torch.OutOfMemoryError):
            raise
        return False
    grown = trainer.device.peak_reserved() - reserved
    return trainer.failures()[1] == retries and grown <= trainer.figures["available"]


if __name__ == "__main__":
    main()
