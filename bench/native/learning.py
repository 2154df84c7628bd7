"""Record whether the Megatron model repeats itself and learns: ``python -m bench.native.learning OUTPUT.json``.

Four layers on one H200. The same forward and backward twice, bit for bit, in one model and in one built again from the
same seed; then updates on one memorisable batch. Set NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 to have Transformer Engine
choose only kernels that repeat. Needs the extra [megatron].
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.native.batches import packed_batch
from bench.native.megatron import built
from bench.native.steps import our_step, requests
from trainer_rank.devices.cuda import CudaDevice
from trainer_rank.models.protocol import ModelRuntime
from trainer_rank.policies import load_policy
from trainer_rank.rank import TrainerRank

LAYERS = 4
LENGTHS = [512, 300, 1000, 236]
UPDATES = 30
DETERMINISTIC = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"


@dataclass(frozen=True)
class Pass:
    """One forward and backward: log-probabilities and adapter gradients, on the host."""

    log_probabilities: torch.Tensor
    gradients: dict[str, torch.Tensor]


def one_pass(runtime: ModelRuntime) -> Pass:
    """Run the fixed batch through the first slot; nothing is updated."""
    batch = packed_batch(LENGTHS, runtime.geometry.vocabulary, runtime.device.torch_device)
    slot = runtime.slots[0]
    outputs = runtime.forward(batch, slot=slot, gradients=True)
    (-outputs.log_probabilities.mean()).backward()  # type: ignore[no-untyped-call]
    gradients = {}
    for name, parameter in runtime.adapter_parameters(slot).items():
        assert parameter.grad is not None, f"{name} got no gradient"
        gradients[name], parameter.grad = parameter.grad.cpu(), None
    return Pass(outputs.log_probabilities.detach().cpu(), gradients)


def wake(runtime: ModelRuntime) -> None:
    """Give the adapters' zero sides small values, so that every gradient flows."""
    torch.manual_seed(1)
    for name, parameter in runtime.adapter_parameters(runtime.slots[0]).items():
        if name.endswith(".up"):
            torch.nn.init.normal_(parameter, std=1e-3)


def difference(one: Pass, other: Pass) -> dict[str, Any]:
    """What two passes differ in: ``outputs`` rows, and of each differing gradient the share of its norm.

    ``gradients`` are in the order of backward, the last layer first, so that the first one is nearest to the cause.
    """
    shares = {}
    for name in sorted(one.gradients, key=_place, reverse=True):
        first, second = one.gradients[name].float(), other.gradients[name].float()
        if not torch.equal(one.gradients[name], other.gradients[name]):
            shares[name] = float((first - second).norm() / first.norm())
    rows = int((one.log_probabilities != other.log_probabilities).sum())
    return {"outputs": rows, "gradients": shares, "of": len(one.gradients)}


def _place(name: str) -> tuple[int, str]:
    return int(name.split(".")[1]), name


def memorise(runtime: ModelRuntime) -> list[float]:
    """Train on one batch and return the loss before each update."""
    rank = TrainerRank(runtime, load_policy("none"))
    batch = requests(runtime, LENGTHS, 1)
    losses: list[float] = []
    for _ in range(UPDATES):
        found = our_step(rank, batch)
        losses.append(float(torch.stack(found).mean()))
    return losses


def main(output: Path) -> None:
    """Record repeats of one model, of one built again, and the losses of training."""
    device = CudaDevice(0)
    recording: dict[str, Any] = {
        "torch": torch.__version__,
        "card": torch.cuda.get_device_name(),
        "layers": LAYERS,
        "lengths": LENGTHS,
        DETERMINISTIC: os.environ.get(DETERMINISTIC, "1"),
    }
    with built(device, LAYERS) as runtime:
        wake(runtime)
        first = one_pass(runtime)
        recording["same model"] = difference(first, one_pass(runtime))
    with built(device, LAYERS) as runtime:
        wake(runtime)
        recording["built again"] = difference(first, one_pass(runtime))
    with built(device, LAYERS) as runtime:
        recording["losses"] = memorise(runtime)
    output.write_text(json.dumps(recording, indent=1))
    print(json.dumps(recording), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
