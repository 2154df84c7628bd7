"""Record how NVML behaves round a killed process on one H200: ``python -m bench.native.nvml OUTPUT.json [INDEX]``.

A process takes memory and is killed; NVML is sampled until the card reads its baseline again. Then ``qualify exec``
runs the same commands, so that receipts of real cards are on record too. Needs the extra [pipeline] and a CUDA device.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pynvml

GIB = 1 << 30
HELD = (1, 40, 120)
"""GiB held when the process is killed."""
LIMIT_S = 20.0
QUALIFY = "from flows.cli.main import main; main()"

HOLDER = """
import sys, time, torch
blocks = [torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(int(sys.argv[1]))]
torch.cuda.synchronize()
print("holding", flush=True)
time.sleep(float(sys.argv[2]))
"""


def latencies(handle: object, calls: int = 200) -> dict[str, dict[str, int]]:
    """Nanoseconds of the memory query and of the process list: median, 99th percentile, longest."""
    result = {}
    for name, call in (
        ("memory", pynvml.nvmlDeviceGetMemoryInfo),
        ("processes", pynvml.nvmlDeviceGetComputeRunningProcesses),
    ):
        taken = []
        for _ in range(calls):
            began = time.perf_counter_ns()
            call(handle)
            taken.append(time.perf_counter_ns() - began)
        ordered = sorted(taken)
        result[name] = {
            "median": round(statistics.median(taken)),
            "p99": ordered[int(0.99 * calls)],
            "longest": ordered[-1],
        }
    return result


def killed(handle: object, held: int) -> dict[str, Any]:
    """Kill a process that holds ``held`` GiB and sample (ns since the kill, used bytes, pids) until baseline."""
    baseline = pynvml.nvmlDeviceGetMemoryInfo(handle).used
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(held), "600"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    holding = pynvml.nvmlDeviceGetMemoryInfo(handle).used
    listed = [(each.pid, each.usedGpuMemory) for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    began = time.monotonic_ns()
    os.kill(process.pid, signal.SIGKILL)
    samples: list[tuple[int, int, int]] = []
    reaped = None
    while time.monotonic_ns() - began < LIMIT_S * 1e9:
        if reaped is None and process.poll() is not None:
            reaped = time.monotonic_ns() - began
        used = pynvml.nvmlDeviceGetMemoryInfo(handle).used
        pids = len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
        sample = (time.monotonic_ns() - began, used, pids)
        if not samples or samples[-1][1:] != sample[1:]:
            samples.append(sample)
        if reaped is not None and used <= baseline:
            break
    return {
        "held_gib": held,
        "baseline": baseline,
        "holding": holding,
        "own_pid_listed": [pid for pid, _ in listed] == [process.pid],
        "listed": listed,
        "reaped_ns": reaped,
        "baseline_ns": time.monotonic_ns() - began if samples[-1][1] <= baseline else None,
        "samples": samples,
    }


def receipts(uuid: str) -> list[dict[str, Any]]:
    """Receipts of ``qualify exec`` round a command that ends by itself and one that is killed for its time."""
    result = []
    for held, seconds, timeout in ((1, "1", "60"), (40, "600", "20")):
        command = [sys.executable, "-c", QUALIFY, "exec", "--json", "--gpu", uuid, "--timeout", timeout, "--"]
        began = time.monotonic()
        done = subprocess.run(
            [*command, sys.executable, "-c", HOLDER, str(held), seconds], capture_output=True, text=True, check=False
        )
        receipt = json.loads(done.stdout) if done.stdout.startswith("{") else {"stderr": done.stderr[-2000:]}
        result.append({"exit": done.returncode, "wall_s": round(time.monotonic() - began, 3), "receipt": receipt})
    return result


def main(output: Path, index: int) -> None:
    """Record everything about one card, which must be idle."""
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    os.environ["CUDA_VISIBLE_DEVICES"] = pynvml.nvmlDeviceGetUUID(handle)
    recording: dict[str, Any] = {
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "name": pynvml.nvmlDeviceGetName(handle),
        "total": pynvml.nvmlDeviceGetMemoryInfo(handle).total,
        "idle": pynvml.nvmlDeviceGetMemoryInfo(handle).used,
        "latency_ns": latencies(handle),
        "killed": [killed(handle, held) for held in HELD],
    }
    output.write_text(json.dumps(recording, indent=1))
    recording["receipts"] = receipts(pynvml.nvmlDeviceGetUUID(handle))
    output.write_text(json.dumps(recording, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
