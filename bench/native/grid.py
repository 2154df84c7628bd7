"""Time random ragged batches with and without the size grid: ``python -m bench.native.grid OUTPUT.json CACHES``.

Each variant runs in processes of its own on the same batches. First both side by side, each with empty kernel caches
(tuning is compiling, one core each, so they hardly disturb one another, and what disturbs falls on both); then, one
after the other, in new processes that find the caches. The caches stay in ``CACHES/grid`` and ``CACHES/as-they-are``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

STEPS = 50
LARGEST = 8_192
LIMIT_S = 150.0
"""No step is begun later than this after the first began."""
VARIANTS = ("grid", "as-they-are")
CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TILELANG_CACHE_DIR": "tilelang",
    "CUDA_CACHE_PATH": "cuda",
    "XDG_CACHE_HOME": "other",
}
"""Where kernels that were built are kept, by the variable that says so."""


def cache_environment(folder: Path) -> dict[str, str]:
    """The environment that keeps every kernel cache in ``folder``."""
    return {name: str(folder / place) for name, place in CACHES.items()} | {"TRITON_CACHE_AUTOTUNING": "1"}


def sizes() -> list[int]:
    """Packed tokens of each step: a quarter of the largest up to the largest, hardly ever the same."""
    return [int(LARGEST * (0.25 + 0.75 * ((step * 0.618034) % 1))) for step in range(STEPS)]


def run_variant(variant: str, output: Path) -> None:
    """Train on the batches in this process; a line for each step done."""
    from bench.native.batches import packed_batch, ragged
    from bench.native.megatron import built, timed, train
    from trainer_rank.devices.cuda import CudaDevice
    from trainer_rank.models.megatron import layout

    if variant == "as-they-are":  # the grid is switched off here and nowhere else
        layout.padded_tokens = lambda tokens, _context=1: tokens  # type: ignore[assignment]
    device = CudaDevice(0)
    with output.open("w") as stream, built(device, 4) as runtime:
        began = time.monotonic()
        for step, tokens in enumerate(sizes()):
            if time.monotonic() - began > LIMIT_S:
                break
            batch = packed_batch(ragged(tokens, step), runtime.geometry.vocabulary, device.torch_device)
            seconds = timed(partial(train, runtime, batch, "policy"))
            stream.write(json.dumps({"tokens": tokens, "seconds": round(seconds, 4)}) + "\n")
            stream.flush()


def start(variant: str, lines: Path, caches: Path) -> subprocess.Popen[bytes]:
    """Begin one variant in a new process."""
    environment = os.environ | cache_environment(caches / variant)
    return subprocess.Popen([sys.executable, "-m", "bench.native.grid", variant, str(lines)], env=environment)


def finish(process: subprocess.Popen[bytes], lines: Path, began: float) -> dict[str, Any]:
    """Wait for a variant and return what it did."""
    try:
        process.wait(timeout=2 * LIMIT_S + 120)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    done = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    return {
        "exit": process.returncode,
        "process_s": round(time.monotonic() - began, 1),
        "tokens": [each["tokens"] for each in done],
        "seconds": [each["seconds"] for each in done],
    }


def main(output: Path, caches: Path) -> None:
    """Run every variant, empty and then with what it left; the recording is written after each."""
    recording: dict[str, Any] = {"largest": LARGEST, "limit_s": LIMIT_S, "steps": STEPS, "runs": {}}
    work = caches / "lines"
    work.mkdir(parents=True, exist_ok=True)
    for name in VARIANTS:
        if any((caches / name).glob("*")):
            raise SystemExit(f"{caches / name} is not empty: name an empty folder")
    for state, groups in (("empty caches", [VARIANTS]), ("kept caches", [(name,) for name in VARIANTS])):
        for group in groups:
            began = time.monotonic()
            files = {name: work / f"{state} {name}.jsonl" for name in group}
            processes = {name: start(name, files[name], caches) for name in group}
            for name, process in processes.items():
                recording["runs"].setdefault(state, {})[name] = finish(process, files[name], began)
            output.write_text(json.dumps(recording, indent=1))
            print(state, {name: len(recording["runs"][state][name]["seconds"]) for name in group}, flush=True)


if __name__ == "__main__":
    if sys.argv[1] in VARIANTS:
        run_variant(sys.argv[1], Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
