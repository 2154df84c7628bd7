"""Record the Megatron model's speed and memory on one H200: ``python -m bench.native.megatron OUTPUT.json``.

Needs the extra [megatron] and a CUDA device. Every figure in docs/native.md comes from what this writes.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.native.batches import packed_batch
from bench.native.work import step_operations
from trainer_rank.devices.cuda import CudaDevice
from trainer_rank.geometry import Topology
from trainer_rank.models.megatron.geometry import QWEN_36_35B_A3B
from trainer_rank.models.megatron.runtime import MegatronRuntime
from trainer_rank.models.protocol import PackedBatch

REPEATS = 3


def outside(device: CudaDevice) -> int:
    """Bytes on the card that PyTorch's allocator does not hold."""
    free, total = device.memory_info()
    return total - free - device.reserved()


def timed(work: Callable[[], Any]) -> float:
    """Seconds of one call, the device idle before and after."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def matrix_peak() -> float:
    """Operations a second of an 8192 x 8192 x 8192 BF16 product on random data, median of ten."""
    one = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    other = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    for _ in range(3):
        one @ other
    return 2 * 8192**3 / statistics.median(timed(lambda: one @ other) for _ in range(10))


def train(runtime: MegatronRuntime, batch: PackedBatch, slot: str) -> int:
    """One forward and backward; returns bytes allocated between them."""
    outputs = runtime.forward(batch, slot=slot, gradients=True)
    retained = torch.cuda.memory_allocated()
    (-outputs.log_probabilities.mean()).backward()  # type: ignore[no-untyped-call]
    for parameter in runtime.adapter_parameters(slot).values():
        parameter.grad = None
    return retained


def measure(runtime: MegatronRuntime, device: CudaDevice, lengths: list[int]) -> dict[str, Any]:
    """First-step and steady figures of one batch shape."""
    batch = packed_batch(lengths, runtime.geometry.vocabulary, device.torch_device)
    first = timed(lambda: train(runtime, batch, "policy"))
    before = device.allocated()
    device.reset_peaks()
    retained = train(runtime, batch, "policy")
    steady = statistics.median(timed(lambda: train(runtime, batch, "policy")) for _ in range(REPEATS))
    return {
        "layers": runtime.geometry.layers,
        "tokens": sum(lengths),
        "sequences": len(lengths),
        "first_step_s": round(first, 3),
        "step_s": round(steady, 4),
        "operations": step_operations(runtime.geometry, lengths),  # type: ignore[arg-type]
        "allocated_before": before,
        "retained": retained - before,
        "peak_allocated": device.peak_allocated(),
        "peak_reserved": device.peak_reserved(),
        "outside_pytorch": outside(device),
    }


@contextmanager
def built(
    device: CudaDevice, layers: int, rank: int = 1, topology: Topology | None = None
) -> Iterator[MegatronRuntime]:
    """A model that is gone, with its cache, when the context closes."""
    runtime = MegatronRuntime(
        QWEN_36_35B_A3B.with_layers(layers),
        device,
        ["policy", "adversary"],
        topology=topology or Topology(),
        rank=rank,
        alpha=32.0,
        seed=593015,
    )
    try:
        yield runtime
    finally:
        runtime.close()
        gc.collect()
        device.empty_cache()


@contextmanager
def without_hooks(runtime: MegatronRuntime, *, dispatchers: bool) -> Iterator[None]:
    """Take the forward hooks off for a while: those of layers with a token dispatcher, or all the others.

    Without the others the frozen base runs with no adapter; without the dispatchers' own, Megatron keeps the routing of
    every layer's last batch, as it does by itself.
    """
    block = runtime._base.block  # type: ignore[union-attr]
    hooked = [
        each for each in block.modules() if each._forward_hooks and hasattr(each, "token_dispatcher") == dispatchers
    ]
    saved = [list(module._forward_hooks.items()) for module in hooked]
    for module in hooked:
        module._forward_hooks.clear()
    try:
        yield
    finally:
        for module, hooks in zip(hooked, saved, strict=True):
            module._forward_hooks.update(hooks)


def retention(device: CudaDevice, layers: int, tokens: int) -> dict[str, Any]:
    """Bytes retained per token with the routing kept and with it released."""
    with built(device, layers) as runtime:
        batch = packed_batch([tokens // 2] * 2, runtime.geometry.vocabulary, device.torch_device)
        train(runtime, batch, "policy")
        before = device.allocated()
        released = train(runtime, batch, "policy") - before
        with without_hooks(runtime, dispatchers=True):
            kept = train(runtime, batch, "policy") - before
    return {"layers": layers, "tokens": tokens, "released": released, "kept": kept}


SECTIONS: dict[str, Callable[[CudaDevice], Any]] = {
    "retention": lambda device: [retention(device, 4, 16_384)],
    "sizes-4": lambda device: _sizes(device, 4, (4_096, 16_384, 65_536)),
    "sizes-16": lambda device: _sizes(device, 16, (4_096, 16_384, 65_536)),
    "sizes-40": lambda device: [*_sizes(device, 40, (4_096, 16_384)), retention(device, 40, 16_384)],
}


def _sizes(device: CudaDevice, layers: int, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    with built(device, layers) as runtime:
        return [measure(runtime, device, [tokens // 2] * 2) for tokens in sizes]


def main(output: Path, wanted: list[str]) -> None:
    """Run the sections in order, writing the recording after each, so that a lease cut short loses one section."""
    device = CudaDevice(0)
    recording: dict[str, Any] = {
        "torch": torch.__version__,
        "card": torch.cuda.get_device_name(),
        "matrix_operations_per_s": matrix_peak(),
        "sections": {},
    }
    for name in wanted or list(SECTIONS):
        began = time.perf_counter()
        try:
            result = SECTIONS[name](device)
        except Exception as error:
            result = {"failed": f"{type(error).__name__}: {error}"}
        recording["sections"][name] = {"seconds": round(time.perf_counter() - began, 1), "result": result}
        output.write_text(json.dumps(recording, indent=1))
        print(name, json.dumps(recording["sections"][name])[:2000], flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
