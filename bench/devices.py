"""What the devices cost: the virtual device against the plain host, and recording against not recording."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import cast

import torch

from bench.native.batches import packed_batch
from trainer_rank.devices.cuda import CudaDevice
from trainer_rank.devices.protocol import Device
from trainer_rank.devices.virtual import VirtualDevice
from trainer_rank.models.reference import SMALL, ReferenceModel, build_reference

TOKENS = (1024, 4096)
RECORDED_TOKENS = {"lazy": 1024, "cuda": 65536}
ROUNDS = 3


class _Host:
    """As much of a device as the reference model asks for, on plain CPU tensors."""

    torch_device = torch.device("cpu")
    activate = nullcontext

    def mark(self, stage: str) -> None:
        """Nothing is recorded."""

    def synchronize(self) -> None:
        """The host has finished when it returns."""


def main() -> None:
    """Print time per training step of the small reference model, best of three, and the ratios.

    Processor time on the host and the virtual device, elapsed time on CUDA.
    """
    torch.set_num_threads(1)
    host, virtual = cast(Device, _Host()), VirtualDevice("h200")
    devices = [virtual, CudaDevice()] if torch.cuda.is_available() else [virtual]
    for tokens in TOKENS:
        plain = _best(_stepper(host, tokens), time.process_time)
        modelled = _best(_stepper(virtual, tokens), time.process_time)
        print(f"{tokens} tokens: host {plain:.3f} s, virtual {modelled:.3f} s, ratio {modelled / plain:.2f}")
    for device in devices:
        _recording(device, RECORDED_TOKENS[device.torch_device.type])


def _recording(device: Device, tokens: int) -> None:
    step = _stepper(device, tokens)

    def recorded() -> None:
        with device.record():
            step()

    clock = time.perf_counter if device.torch_device.type == "cuda" else time.process_time
    off, on, whole = _best(step, clock), _best(_inside(device, step, clock), clock), _best(recorded, clock)
    print(
        f"{device.name}, {tokens} tokens: {off * 1e3:.1f} ms; while recorded {on / off - 1:+.1%}; "
        f"with taking the recording up {whole / off - 1:+.1%}"
    )


def _inside(device: Device, step: Callable[[], None], clock: Callable[[], float]) -> Callable[[], float]:
    def timed() -> float:
        with device.record():
            start = clock()
            step()
            return clock() - start

    return timed


def _best(run: Callable[[], float | None], clock: Callable[[], float]) -> float:
    """Return the shortest of some runs after a warm-up; a run may time itself."""
    run()
    times = []
    for _ in range(ROUNDS):
        start = clock()
        own = run()
        times.append(clock() - start if own is None else own)
    return min(times)


def _stepper(device: Device, tokens: int) -> Callable[[], None]:
    model: ReferenceModel = build_reference(SMALL, device, rank=4)
    batch = packed_batch([tokens // 2, tokens // 4, tokens // 4], SMALL.vocabulary, device.torch_device)
    optimizer = torch.optim.AdamW(model.adapter_parameters("policy").values(), foreach=False)

    def step() -> None:
        model.forward(batch, slot="policy", gradients=True).log_probabilities.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        device.synchronize()

    return step
