"""Record what each release policy does under pressure on one GPU: ``python -m bench.native.release OUTPUT.json``;
print a recording as a table: ``python -m bench.native.release --table RECORDING.json``.

A raw driver allocation narrows the card. After one step, whose segments stay cached, the rest is cached too until
0.034734 GB are free, as in the public report: the next forwards are served from the cache. Every backward builds a real
cuBLAS handle and takes 67,108,864 B of driver memory beside it, the largest library allocation of the report's later
profile. Policies run in turn, several rounds, the same batch; arms without pressure before and after give the speed to
compare with.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.native.reference import GEOMETRY, PROBES, requests
from trainer_rank.devices.cuda import CudaDevice
from trainer_rank.devices.protocol import Device
from trainer_rank.models.reference import ReferenceModel, build_reference
from trainer_rank.policies import load_policy
from trainer_rank.rank import TrainerRank

POLICIES = ("none", "unconditional", "trigger-3-percent", "budgeted", "forecast")
ROUNDS, WARM, STEPS, TOKENS = 3, 40, 40, 8_192
LEFT_FREE = 34_734_080
LIBRARY_BYTES = 67_108_864
SPARE = 1 << 30
"""Room beside the largest step and the library, so that the card is narrow and the work still fits."""
LIMIT_S = 150.0
"""No round begins after this many seconds."""


class Driver:
    """Driver memory past PyTorch, and cuBLAS handles of our own."""

    def __init__(self) -> None:
        torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")  # PyTorch's own handle, and the libraries
        self._runtime = ctypes.CDLL(_mapped("libcudart.so"))
        self._cublas = ctypes.CDLL(_mapped("libcublas.so"))

    def take(self, size: int) -> ctypes.c_void_p:
        """Take ``size`` bytes by ``cudaMalloc``; RuntimeError, in cuBLAS's words, when the driver refuses."""
        address = ctypes.c_void_p()
        if self._runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(size)):
            self._runtime.cudaGetLastError()
            raise RuntimeError(f"CUDA error: CUBLAS_STATUS_ALLOC_FAILED: no {size} B for the handle's workspace")
        return address

    def give_back(self, address: ctypes.c_void_p) -> None:
        """Return memory taken with :meth:`take`."""
        self._runtime.cudaFree(address)

    @contextmanager
    def library(self) -> Iterator[None]:
        """A cuBLAS handle and its workspace, held until the end."""
        handle, workspace = ctypes.c_void_p(), None
        try:
            if status := self._cublas.cublasCreate_v2(ctypes.byref(handle)):
                name = "CUBLAS_STATUS_ALLOC_FAILED" if status == 3 else f"status {status}"
                raise RuntimeError(f"CUDA error: {name} when calling `cublasCreate(handle)`")
            workspace = self.take(LIBRARY_BYTES)
            yield
        finally:
            if workspace is not None:
                self.give_back(workspace)
            if handle.value:
                self._cublas.cublasDestroy_v2(handle)


def _mapped(name: str) -> str:
    """The shared library of this name that this process has loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith(name):
            return str(path)
    raise OSError(f"{name} is not loaded; it comes with PyTorch for CUDA")


class Arm:
    """One policy's rank over the shared model, through all rounds."""

    def __init__(self, policy: str, device: Device, model: ReferenceModel, driver: Driver) -> None:
        self._device, self._driver = device, driver
        self.events: list[Mapping[str, Any]] = []
        settings = load_policy(policy)
        if settings.forecasts:
            settings = dataclasses.replace(settings, probe_lengths=PROBES)
        self._rank = TrainerRank(model, settings, on_event=self.events.append)

    def step(self) -> float:
        """Seconds of one forward, loss and backward; the library wants its memory as the backward begins."""
        batch = requests(TOKENS, seed=1)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        with ExitStack() as held:

            def want(gradient: torch.Tensor) -> torch.Tensor:
                held.enter_context(self._driver.library())
                return gradient

            for micro_batch in self._rank.forward_micro_batches(batch):
                outputs = [each.log_probabilities.mean() for each in micro_batch.outputs.values()]
                loss = -torch.stack(outputs).mean()
                loss.register_hook(want)  # type: ignore[no-untyped-call]
                self._rank.backward(micro_batch, loss)
                del outputs, loss
        self._rank.libraries_torn_down()
        torch.cuda.synchronize()
        return time.perf_counter() - begun

    def run(self, steps: int) -> dict[str, Any]:
        """Outcome and figures of ``steps`` steps, or of those before the first failure. Bytes, seconds, counts."""
        self.events.clear()
        retries, seconds, outcome = self._device.allocator_retries(), [], "finished"
        for _ in range(steps):
            try:
                seconds.append(self.step())
            except Exception as error:
                outcome = f"{type(error).__name__}: {str(error)[:200]}"
                self._rank.discard_gradients()
                break
        releases = [each for each in self.events if each["event"] == "release" and each["release_ns"]]
        observed = [each["peak_reserved"] for each in self.events if each["event"] == "observed"]
        return {
            "outcome": outcome,
            "seconds": seconds,
            "releases": len(releases),
            "returned_bytes": sum(sum(each["shrunk"].values()) for each in releases),
            "charged_s": sum(each["charged_ns"] for each in releases) / 1e9,
            "release_s": sum(each["release_ns"] for each in releases) / 1e9,
            "refill_ns_per_segment": next((each["refill_ns_per_segment"] for each in releases), None),
            "denied": sum(each["event"] == "release" and not each["granted"] for each in self.events),
            "peak_reserved": max(observed, default=None),
            "allocator_retries": self._device.allocator_retries() - retries,
            "events": [each for each in self.events if each["event"] in ("release", "headroom", "forecast")][:8],
        }


def empty(device: Device) -> None:
    """Give everything unused back to the driver."""
    gc.collect()
    device.empty_cache()


def fill(device: Device) -> int:
    """Cache what is free but ``LEFT_FREE`` bytes in one segment; returns what is free then."""
    size = (device.memory_info().free - LEFT_FREE) & -(2 << 20)
    torch.empty(size, dtype=torch.uint8, device=device.torch_device)
    return device.memory_info().free


def main(output: Path) -> None:
    """Run one arm without pressure, then every policy in turn, and write the recording after each arm."""
    begun = time.perf_counter()
    device = CudaDevice(0)
    driver = Driver()
    model = build_reference(GEOMETRY, device, slots=["policy"], rank=8, alpha=16.0, seed=1, dtype=torch.bfloat16)
    arms = {name: Arm(name, device, model, driver) for name in POLICIES}
    warm = {name: arm.run(WARM)["seconds"] for name, arm in arms.items()}  # earns every account the same credit
    empty(device)
    room = device.memory_info().free, device.reserved()
    free_run = arms["none"].run(STEPS)
    room_bytes = free_run["peak_reserved"] - room[1] + LIBRARY_BYTES + SPARE
    recording = {
        "torch": torch.__version__,
        "card": torch.cuda.get_device_name(),
        "tokens": TOKENS,
        "room_bytes": room_bytes,
        "warm_s": warm,
        "without_pressure": free_run,
        "arms": [],
    }
    for number in range(ROUNDS):
        if time.perf_counter() - begun > LIMIT_S:
            break
        for name, arm in arms.items():
            empty(device)
            ballast = driver.take(device.memory_info().free - room_bytes)
            first = arm.run(1)["outcome"]
            left = fill(device)
            result = arm.run(STEPS)
            driver.give_back(ballast)
            recording["arms"].append(
                {"round": number, "policy": name, "first_step": first, "free_after_fill": left, **result}
            )
            recording["elapsed_s"] = round(time.perf_counter() - begun, 1)
            output.write_text(json.dumps(recording, indent=1, default=str))
            print(
                name, result["outcome"], result["releases"], statistics.median(result["seconds"] or [0.0]), flush=True
            )
    empty(device)
    again = arms["none"].run(STEPS)
    recording["without_pressure_again"] = again
    output.write_text(json.dumps(recording, indent=1, default=str))
    print(table(recording))


def table(recording: Mapping[str, Any]) -> str:
    """The recording as a table: per policy over all rounds, time against the arms without pressure in the same run."""
    free = [*recording["without_pressure"]["seconds"], *recording.get("without_pressure_again", {}).get("seconds", [])]
    base = statistics.median(free)
    lines = [
        f"without pressure: {base * 1e3:.1f} ms a step, {recording['tokens'] / base:,.0f} tokens/s",
        "| policy | finished | releases | ms charged | ms of the first step | ms of the others, median "
        "| % lost in all | tokens/s | peak reserved, B |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(each["policy"] for each in recording["arms"]):
        arms = [each for each in recording["arms"] if each["policy"] == name]
        finished = [each for each in arms if each["outcome"] == "finished"]
        cells = [name, f"{len(finished)} of {len(arms)}", str(sum(each["releases"] for each in arms))]
        if finished:
            seconds = [second for each in finished for second in each["seconds"]]
            first = statistics.median(each["seconds"][0] for each in finished)
            rest = statistics.median(second for each in finished for second in each["seconds"][1:])
            charged = sum(each["charged_s"] for each in finished)
            cells += [f"{1e3 * figure:.1f}" for figure in (charged, first, rest)]
            cells += [f"{100 * (sum(seconds) / (base * len(seconds)) - 1):.1f}"]
            cells += [f"{recording['tokens'] * len(seconds) / sum(seconds):,.0f}"]
            cells += [f"{max(each['peak_reserved'] for each in finished):,}"]
        lines.append(f"| {' | '.join([*cells, *['-'] * (9 - len(cells))])} |")
    causes = {(each["policy"], each["outcome"]) for each in recording["arms"] if each["outcome"] != "finished"}
    return "\n".join([*lines, *(f"{policy}: {cause}" for policy, cause in sorted(causes))])


if __name__ == "__main__":
    if sys.argv[1] == "--table":
        print(table(json.loads(Path(sys.argv[2]).read_text())))
    else:
        main(Path(sys.argv[1]))
