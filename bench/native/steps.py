"""Train the Megatron model under TrainerRank on one H200: ``python -m bench.native.steps OUTPUT.jsonl [LAYERS]``.

Forecasts against observations on ragged packs of the size grid that were never probes. Lines are events in order; a
forecast is written before its forward begins.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bench.native.batches import ragged
from bench.native.megatron import built
from trainer_rank.devices.cuda import CudaDevice
from trainer_rank.models.protocol import ModelRuntime
from trainer_rank.policies import load_policy
from trainer_rank.rank import TrainerRank
from trainer_rank.requests import Request

PROBES = ((2048, 2048), tuple(ragged(8_000, 11)), tuple(ragged(4_000, 12)), (4096, 4096))
SIZES = (4_000, 8_000, 16_000, 64_000)
"""Just below four sizes of the grid, the largest eight times the largest probe."""
SHAPES = 44


def requests(runtime: ModelRuntime, lengths: list[int], seed: int) -> list[Request]:
    """One ragged batch of one slot, kept together as a group."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(16, runtime.geometry.vocabulary, (length + 1,), generator=generator) for length in lengths]
    return [Request(row[:-1], row[1:], "policy", group="batch") for row in rows]


def our_step(rank: TrainerRank, batch: list[Request]) -> list[torch.Tensor]:
    """Forward, mean loss, backward and update of one batch; its micro-batches' losses, which are not waited for."""
    losses = []
    for micro_batch in rank.forward_micro_batches(batch):
        outputs = micro_batch.outputs.values()
        loss = -torch.stack([each.log_probabilities.mean() for each in outputs]).mean()
        rank.backward(micro_batch, loss)
        losses.append(loss.detach())
    rank.optim_step()
    return losses


def main(output: Path, layers: int) -> None:
    """Record every forecast and observation."""
    device = CudaDevice(0)
    policy = dataclasses.replace(load_policy("forecast"), probe_lengths=PROBES)
    with output.open("w") as stream, built(device, layers) as runtime:

        def tell(event: Mapping[str, Any]) -> None:
            stream.write(json.dumps({"ns": time.monotonic_ns(), **event}, default=str) + "\n")
            stream.flush()

        rank = TrainerRank(runtime, policy, on_event=tell)
        tell({"event": "model", "layers": layers, "largest_probe": max(map(sum, PROBES))})
        for index in range(SHAPES):
            lengths = ragged(SIZES[index % len(SIZES)] - 7 * index, 100 + index)
            tell({"event": "shape", "lengths": lengths})
            our_step(rank, requests(runtime, lengths, index))
        tell({"event": "closed", "report": str(rank.close())})


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 4)
