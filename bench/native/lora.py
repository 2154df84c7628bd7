"""Time the adapters by rank on one H200: ``python -m bench.native.lora OUTPUT.json [products|steps]``.

``products``: each kind of adapted product at the real geometry's shapes, ranks interleaved, beside the formula that
pads the other way. It needs torch alone. ``steps``: whole steps of four layers, frozen base, rank 1 and rank 16
interleaved. It needs the extra [megatron].
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from bench.native.batches import packed_batch
from bench.native.megatron import built, timed, train, without_hooks
from trainer_rank.devices.cuda import CudaDevice
from trainer_rank.models.adapters import Adapters, AdapterSettings

RANKS = (1, 8, 16)
TOKENS = 16_384
EXPERTS, PER_TOKEN = 256, 8
GROUPED = {"expert FC1": (2048, 1024), "expert FC2": (512, 2048)}
DENSE = {"delta net in": (2048, 12_352), "delta net out": (4096, 2048), "shared FC1": (2048, 1024)}
REPEATS = 30
TRIPLES = 20


def adapters(rank: int, inputs: int, outputs: int, *experts: int) -> Adapters:
    """One adapter in BF16 with no side at zero."""
    factory: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    return Adapters(
        AdapterSettings(rank, 32.0),
        {"map": torch.nn.Parameter(torch.randn(*experts, rank, inputs, **factory) / inputs**0.5)},
        {"map": torch.nn.Parameter(torch.randn(*experts, rank, outputs, **factory))},
    )


def padded_grouped(given: Adapters, rows: torch.Tensor, base: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The grouped adapter with both weights padded to eight ranks in every forward."""
    missing = -given.settings.rank % 8
    down, up = (functional.pad(side["map"], (0, 0, 0, missing)) for side in (given.down, given.up))
    low = functional.grouped_mm(rows, down.mT.contiguous(), offs=ends)
    return base + functional.grouped_mm(low * given.settings.scale, up, offs=ends)


def unpadded_dense(given: Adapters, rows: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """The dense adapter at its own rank, whatever the alignment."""
    low = functional.linear(rows, given.down["map"])
    return base + (low * given.settings.scale) @ given.up["map"]


def dense_with_one_side_padded(side: str, given: Adapters, rows: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """The dense adapter with the product of ``down`` or of ``up`` alone padded to eight ranks."""
    missing = -given.settings.rank % 8
    down, up = given.down["map"], given.up["map"] * given.settings.scale
    if side == "down":
        low = functional.linear(rows, functional.pad(down, (0, 0, 0, missing)))
        return base + low[:, : given.settings.rank] @ up
    low = functional.pad(functional.linear(rows, down), (0, missing))
    return base + low @ functional.pad(up, (0, 0, 0, missing))


def forward_and_backward(
    work: Callable[[], torch.Tensor], rows: torch.Tensor, gradient: torch.Tensor, given: Adapters
) -> float:
    """Seconds of one forward and backward, no gradient kept."""
    seconds = timed(lambda: work().backward(gradient))  # type: ignore[no-untyped-call]
    for leaf in (rows, *given.parameters().values()):
        leaf.grad = None
    return seconds


def uneven_ends(rows: int) -> torch.Tensor:
    """Experts' ends of a random routing."""
    counts = torch.multinomial(torch.ones(EXPERTS), rows, replacement=True).bincount(minlength=EXPERTS)
    return counts.cumsum(0).to("cuda", torch.int32)


def products() -> list[dict[str, Any]]:
    """Median seconds of each product, rank and formula; formulas and ranks take turns."""
    torch.manual_seed(0)
    found = []
    for name, (inputs, outputs) in GROUPED.items():
        ends = uneven_ends(TOKENS * PER_TOKEN)
        rows, base = _rows(TOKENS * PER_TOKEN, inputs, outputs)
        works = {}
        for rank in RANKS:
            given = adapters(rank, inputs, outputs, EXPERTS)
            works["as shipped", rank] = given, partial(given.add_grouped, "map", rows, base, ends)
            works["weights padded", rank] = given, partial(padded_grouped, given, rows, base, ends)
        found += _interleaved(name, rows, base, works)
    for name, (inputs, outputs) in DENSE.items():
        rows, base = _rows(TOKENS, inputs, outputs)
        works = {}
        for rank in RANKS:
            given = adapters(rank, inputs, outputs)
            works["as shipped", rank] = given, partial(given.add, "map", rows, base)
            works["not padded", rank] = given, partial(unpadded_dense, given, rows, base)
            for side in ("down", "up") if rank % 8 else ():
                works[f"{side} padded", rank] = given, partial(dense_with_one_side_padded, side, given, rows, base)
        found += _interleaved(name, rows, base, works)
    return found


def _rows(count: int, inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.randn(count, inputs, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    return rows, torch.randn(count, outputs, dtype=torch.bfloat16, device="cuda")


def _interleaved(name: str, rows: torch.Tensor, gradient: torch.Tensor, works: dict[Any, Any]) -> list[dict[str, Any]]:
    times: dict[Any, list[float]] = {key: [] for key in works}
    for repeat in range(REPEATS + 3):
        for key, (given, work) in works.items():
            seconds = forward_and_backward(work, rows, gradient, given)
            if repeat >= 3:
                times[key].append(seconds)
    return [
        {"product": name, "formula": formula, "rank": rank, "median_us": round(1e6 * statistics.median(all_of), 1)}
        for (formula, rank), all_of in times.items()
    ]


def steps(device: CudaDevice) -> dict[str, list[float]]:
    """Seconds of whole steps; the frozen base and both ranks take turns in the order of a rotating triple."""
    times: dict[str, list[float]] = {}
    with ExitStack() as stack:
        one, sixteen = (stack.enter_context(built(device, 4, rank)) for rank in (1, 16))
        batch = packed_batch([TOKENS // 2] * 2, one.geometry.vocabulary, device.torch_device)

        def frozen() -> float:
            with without_hooks(one, dispatchers=False):
                return timed(lambda: train(one, batch, "policy"))

        arms: dict[str, Callable[[], float]] = {
            "rank 1": lambda: timed(lambda: train(one, batch, "policy")),
            "rank 16": lambda: timed(lambda: train(sixteen, batch, "policy")),
            "frozen base": frozen,
        }
        for arm in arms.values():
            arm()
        names = list(arms)
        for turn in range(TRIPLES):
            for name in names[turn % 3 :] + names[: turn % 3]:
                times.setdefault(name, []).append(round(arms[name](), 5))
    return times


def main(output: Path, wanted: list[str]) -> None:
    """Record what is wanted into one file, keeping what it holds already."""
    device = CudaDevice(0)
    recording: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {}
    recording |= {"torch": torch.__version__, "card": torch.cuda.get_device_name(), "tokens": TOKENS}
    for name in wanted or ["products", "steps"]:
        recording[name] = products() if name == "products" else steps(device)
        output.write_text(json.dumps(recording, indent=1))
        print(name, json.dumps(recording[name])[:3000], flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
