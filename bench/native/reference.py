"""Record forecasts against observations on one H200: ``python -m bench.native.reference OUTPUT.jsonl [SHAPES]``.

The reference model trains on ragged packed shapes that were never probes, up to 16 times the largest probe, under three
kinds of routing. Every line is one event of TrainerRank, in order: a forecast is written before its forward begins.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bench.native.batches import ragged
from trainer_rank.devices.cuda import CudaDevice
from trainer_rank.geometry import ModelGeometry
from trainer_rank.models.reference import ReferenceModel, build_reference
from trainer_rank.policies import load_policy
from trainer_rank.rank import TrainerRank
from trainer_rank.requests import Request

GEOMETRY = ModelGeometry(
    name="reference-medium",
    layers=6,
    hidden=1024,
    vocabulary=32_768,
    query_heads=16,
    key_value_heads=4,
    head_dimension=64,
    experts=64,
    experts_per_token=4,
    expert_hidden=512,
    shared_expert_hidden=512,
)
PROBES = ((64,), (400, 133), (1100, 300, 137), (900, 600, 500, 48))
"""Some beyond the head's chunk of 1,024 rows, where the sizes that follow it stop growing."""
ROUTINGS = ("natural", "zipf", "one-hot")


def route(model: ReferenceModel, routing: str) -> None:
    """Bend the frozen routers: rows scaled by 1 / rank give a skewed choice, equal rows give one choice for all."""
    for layer in model._layers:
        router = layer["router"]
        if routing == "one-hot":
            router.zero_()
        elif routing == "zipf":
            router.div_(torch.arange(1, router.size(0) + 1, device=router.device, dtype=router.dtype)[:, None])


def sizes(count: int, smallest: int, largest: int) -> list[int]:
    """``count`` packed sizes spread evenly in their logarithm, in an order that mixes small and large."""
    spread = [
        round(math.exp(math.log(smallest) + (math.log(largest) - math.log(smallest)) * index / (count - 1)))
        for index in range(count)
    ]
    return [spread[index * 73 % count] for index in range(count)]


def requests(tokens: int, seed: int, vocabulary: int = GEOMETRY.vocabulary) -> list[Request]:
    """One ragged batch of one slot, kept together as a group."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for length in ragged(tokens, seed, smallest=8):
        row = torch.randint(0, vocabulary, (length + 1,), generator=generator)
        result.append(Request(row[:-1], row[1:], "policy", group="batch"))
    return result


def main(output: Path, count: int) -> None:
    """Run ``count`` shapes under every routing; steps the optimizer after each."""
    device = CudaDevice(0)
    with output.open("w") as stream:

        def tell(event: Mapping[str, Any]) -> None:
            stream.write(json.dumps({"ns": time.monotonic_ns(), **event}, default=str) + "\n")
            stream.flush()

        for number, routing in enumerate(ROUTINGS):
            model = build_reference(
                GEOMETRY, device, slots=["policy"], rank=8, alpha=16.0, seed=number, dtype=torch.bfloat16
            )
            route(model, routing)
            policy = dataclasses.replace(load_policy("forecast"), probe_lengths=PROBES)
            rank = TrainerRank(model, policy, on_event=tell)
            probe = max(map(sum, PROBES))
            tell({"event": "routing", "routing": routing, "largest_probe": probe})
            for index, tokens in enumerate(sizes(count, 64, 16 * probe)):
                batch = requests(tokens, 1000 * number + index)
                tell({"event": "shape", "lengths": [len(each.tokens) for each in batch]})
                for micro_batch in rank.forward_micro_batches(batch):
                    losses = [each.log_probabilities.mean() for each in micro_batch.outputs.values()]
                    rank.backward(micro_batch, -torch.stack(losses).mean())
                    del losses
                rank.optim_step()
            tell({"event": "closed", "report": str(rank.close())})


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 80)
