"""Time our step against the same step without TrainerRank: ``python -m bench.native.pairs OUTPUT.json [LAYERS...]``.

The same packed batch, the same model and optimizer: forward, mean loss, backward and update, measured in pairs of
alternating order. Needs the extra [megatron] and a CUDA device.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bench.native.batches import ragged
from bench.native.megatron import built, timed
from bench.native.steps import our_step, requests
from trainer_rank.devices.cuda import CudaDevice
from trainer_rank.execution import pack
from trainer_rank.models.protocol import ModelRuntime
from trainer_rank.optimizer import OptimizerSettings, SlotOptimizer
from trainer_rank.packing import GroupKey, Subforward
from trainer_rank.policies import load_policy
from trainer_rank.rank import TrainerRank
from trainer_rank.requests import Request, RequestShape

ORDER = "ABBA" * 10
"""The arms as measured: twenty pairs, so that a drift of the machine falls on both alike."""
TOKENS = 16_000
"""Just below a size of the grid."""
PROBES = ((2048,), tuple(ragged(3_000, 1)), (2048, 2048))


class PlainStep:
    """The same work by hand, on a slot of its own."""

    def __init__(self, runtime: ModelRuntime, batch: list[Request], slot: str) -> None:
        self._runtime, self._slot = runtime, slot
        self._requests = dict(enumerate(batch))
        shapes = tuple(RequestShape(index, len(each.tokens), slot, True) for index, each in self._requests.items())
        self._subforward = Subforward(GroupKey(slot, True, False), shapes)
        self._optimizer = SlotOptimizer(runtime.adapter_parameters(slot), OptimizerSettings())
        self._optimizer.prepare_gradients()

    def __call__(self) -> None:
        """Pack, forward, mean loss, backward, update."""
        batch = pack(self._subforward, self._requests, self._runtime.device.torch_device)
        outputs = self._runtime.forward(batch, slot=self._slot, gradients=True)
        parts = outputs.log_probabilities.split(list(batch.lengths))
        (-torch.stack([part.mean() for part in parts]).mean()).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()


def pairs(device: CudaDevice, layers: int) -> dict[str, Any]:
    """Nanoseconds of each arm in the order measured, ``A`` without TrainerRank and ``B`` with it."""
    policy = dataclasses.replace(load_policy("forecast"), probe_lengths=PROBES)
    told: list[Mapping[str, Any]] = []
    lengths = ragged(TOKENS, 100)
    with built(device, layers) as runtime:
        rank = TrainerRank(runtime, policy, on_event=told.append)
        batch = requests(runtime, lengths, 0)
        plain = PlainStep(runtime, batch, "adversary")
        arms = {"A": plain, "B": lambda: our_step(rank, batch)}
        for arm in arms.values():
            arm()
            arm()
        times = [round(1e9 * timed(arms[name])) for name in ORDER]
        rank.close()
    forecasts = [each for each in told if each["event"] == "forecast"]
    return {
        "layers": layers,
        "tokens": TOKENS,
        "sequences": len(lengths),
        "order": ORDER,
        "nanoseconds": times,
        "forecasts": len(forecasts),
    }


def main(output: Path, layers: list[int]) -> None:
    """Record the pairs at each layer count, written after each."""
    device = CudaDevice(0)
    recording = {"torch": torch.__version__, "card": torch.cuda.get_device_name(), "runs": list[dict[str, Any]]()}
    for each in layers or [4]:
        recording["runs"].append(pairs(device, each))  # type: ignore[union-attr]
        output.write_text(json.dumps(recording, indent=1))
        print(json.dumps(recording["runs"][-1]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(each) for each in sys.argv[2:]])
