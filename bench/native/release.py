"""Record what each release policy does under pressure on one GPU: ``python -m bench.native.release FOLDER``;
put the committed recording's table into docs/headroom.md: ``python -m bench.native.release --page``.

A process of its own records the tapes first, so that no arm probes. A raw driver allocation narrows the card. In every
round each arm takes one step, then the rest of the card is cached until 0.034734 GB are free, as in the public report,
and equal steps follow. Every backward builds a real cuBLAS handle and takes 67,108,864 B of driver memory beside it,
the largest library allocation of the report's later profile. The arm without pressure, in the same rounds, is the speed
to compare with. Takes up to 110 s and writes ``FOLDER/h200-release.json`` and ``FOLDER/tapes/``.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from bench.native.reference import GEOMETRY, PROBES, requests
from bench.native.tables import table
from trainer_rank.devices.protocol import Device
from trainer_rank.geometry import ModelGeometry
from trainer_rank.models.reference import ReferenceModel, build_reference
from trainer_rank.policies import load_policy
from trainer_rank.rank import TrainerRank
from trainer_rank.requests import Request

if TYPE_CHECKING:
    from qualification.workloads.driver_memory import DriverMemory

POLICIES = ("none", "unconditional", "trigger-3-percent", "budgeted", "forecast")
CALM = "without pressure"
"""The arm to compare with: policy none, nothing cached beyond its own step, no ballast."""
LEFT_FREE = 34_734_080
LIBRARY_BYTES = 67_108_864
SPARE = 1 << 30
"""Room beside the largest step and the library, so that the card is narrow and the work still fits."""
RECORDING = Path(__file__).parent.parent / "recordings" / "h200-release.json"
PAGE = Path(__file__).parent.parent.parent / "docs" / "headroom.md"
BEGIN, END = "<!-- made by python -m bench.native.release --page -->\n", "<!-- until here -->\n"


class Sizes(NamedTuple):
    """How much is run: tokens of the batch, steps that earn credit first, steps after each fill, rounds, and seconds
    after which no round begins."""

    tokens: int = 32_768
    warm: int = 16
    steps: int = 36
    rounds: int = 3
    seconds: float = 85.0


class Ground(NamedTuple):
    """A device with its driver, and the model that is built there."""

    device: Device
    driver: DriverMemory
    geometry: ModelGeometry
    precision: torch.dtype
    probes: tuple[tuple[int, ...], ...]

    def model(self) -> ReferenceModel:
        """The model, equal for every arm and process."""
        return build_reference(
            self.geometry, self.device, slots=["policy"], rank=8, alpha=16.0, seed=1, dtype=self.precision
        )

    def rank(self, model: ReferenceModel, policy: str, **options: Any) -> TrainerRank:  # noqa: ANN401 - passed on
        """A rank of ``policy`` over the model; ``ladder`` replaces the policy's own."""
        settings = load_policy(policy)
        if settings.forecasts:
            ladder = options.pop("ladder", settings.ladder)
            settings = dataclasses.replace(settings, probe_lengths=self.probes, ladder=ladder)
        return TrainerRank(model, settings, **options)

    def batch(self, tokens: int) -> list[Request]:
        """The batch of every step: ragged, one slot, one group."""
        return requests(tokens, 1, self.geometry.vocabulary)


def real() -> Ground:
    """The first CUDA device."""
    from qualification.workloads.driver_memory import DriverMemory
    from trainer_rank.devices.cuda import CudaDevice

    return Ground(CudaDevice(0), DriverMemory(), GEOMETRY, torch.bfloat16, PROBES)


def record_tapes(ground: Ground, folder: Path) -> None:
    """Record every kind of pass that the policies' ladders may need, and keep the tapes."""
    model = ground.model()
    for ladder in (("whole", "split"), ("host-held",), ("rerun",)):
        rank = ground.rank(model, "forecast", ladder=ladder)
        for micro_batch in rank.forward_micro_batches(ground.batch(sum(ground.probes[-1]))):
            rank.backward(micro_batch, _loss(micro_batch.outputs))
        rank.save_tapes(folder)


def _loss(outputs: Mapping[int, Any]) -> torch.Tensor:
    return -torch.stack([each.log_probabilities.mean() for each in outputs.values()]).mean()


class Arm:
    """One policy's rank over the shared model, through all rounds."""

    def __init__(self, ground: Ground, model: ReferenceModel, policy: str, batch: list[Request], tapes: Path) -> None:
        self._device, self._driver, self._batch = ground.device, ground.driver, batch
        self.events: list[Mapping[str, Any]] = []
        known = tapes if load_policy(policy).forecasts else None
        self._rank = ground.rank(model, policy, on_event=self.events.append, tapes=known)

    def step(self) -> float:
        """Seconds of one forward, loss and backward; the library wants its memory as the backward begins."""
        self._device.synchronize()
        begun = time.perf_counter()
        with ExitStack() as held:

            def want(gradient: torch.Tensor) -> torch.Tensor:
                handle = self._driver.handle()
                held.callback(self._driver.destroy, handle)
                refused = f"CUDA error: CUBLAS_STATUS_ALLOC_FAILED: no {LIBRARY_BYTES} B for the handle's workspace"
                held.callback(self._driver.give_back, self._driver.take(LIBRARY_BYTES, refused))
                return gradient

            for micro_batch in self._rank.forward_micro_batches(self._batch):
                loss = _loss(micro_batch.outputs)
                loss.register_hook(want)  # type: ignore[no-untyped-call]
                self._rank.backward(micro_batch, loss)
                del loss
        self._rank.libraries_torn_down()
        self._device.synchronize()
        return time.perf_counter() - begun

    def run(self, steps: int) -> dict[str, Any]:
        """Outcome and figures of ``steps`` steps, or of those before the first failure. Bytes, seconds, counts."""
        self.events.clear()
        retries, taken = self._device.allocator_retries(), self._device.driver_allocations()
        seconds, outcome = [], "finished"
        for _ in range(steps):
            try:
                seconds.append(self.step())
            except Exception as error:
                outcome = f"{type(error).__name__}: {str(error)[:200]}"
                self._rank.discard_gradients()
                break
        releases = [each for each in self.events if each["event"] == "release" and each["release_ns"]]
        return {
            "outcome": outcome,
            "seconds": seconds,
            "releases": len(releases),
            "segments_returned": sum(each["segments"] for each in releases),
            "segments_taken": self._device.driver_allocations() - taken,
            "returned_bytes": sum(sum(each["shrunk"].values()) for each in releases),
            "charged_s": sum(each["charged_ns"] for each in releases) / 1e9,
            "release_s": sum(each["release_ns"] for each in releases) / 1e9,
            "refill_ns_per_segment": next((each["refill_ns_per_segment"] for each in releases), None),
            "denied": sum(each["event"] == "release" and not each["granted"] for each in self.events),
            "probes": sum(each["event"] == "probe" for each in self.events),
            "peak_reserved": max((e["peak_reserved"] for e in self.events if e["event"] == "observed"), default=None),
            "allocator_retries": self._device.allocator_retries() - retries,
            "events": [each for each in self.events if each["event"] in ("release", "headroom", "forecast")][:8],
        }


def _empty(device: Device) -> None:
    """Give everything unused back to the driver."""
    gc.collect()
    device.empty_cache()


def _fill(device: Device) -> None:
    """Cache what is free but ``LEFT_FREE`` bytes in one segment."""
    size = (device.memory_info().free - LEFT_FREE) & -(2 << 20)
    torch.empty(size, dtype=torch.uint8, device=device.torch_device)


def _round(ground: Ground, name: str, arm: Arm, room: int, steps: int) -> dict[str, Any]:
    """One arm in one round: narrow, one step, fill, then the steps that count."""
    device = ground.device
    _empty(device)
    if name == CALM:
        arm.run(1)
        return {"policy": name, "free_before": device.memory_info().free, **arm.run(steps)}
    ballast = ground.driver.take(device.memory_info().free - room, "no ballast")
    try:
        first = arm.run(1)
        _fill(device)
        free = device.memory_info().free
        return {"policy": name, "first_step": first["outcome"], "free_before": free, **arm.run(steps)}
    finally:
        ground.driver.give_back(ballast)


def compare(ground: Ground, tapes: Path, output: Path, sizes: Sizes = Sizes()) -> dict[str, Any]:  # noqa: B008 - frozen
    """Run every arm in turn in every round, each round in another order; write the recording after each arm."""
    begun = time.perf_counter()
    model, batch = ground.model(), ground.batch(sizes.tokens)
    arms = {name: Arm(ground, model, name, batch, tapes) for name in POLICIES}
    warm = {name: arm.run(sizes.warm) for name, arm in arms.items()}  # earns every account the same credit
    arms[CALM] = arms["none"]
    _empty(ground.device)
    room = max(each["peak_reserved"] for each in warm.values()) - ground.device.reserved() + LIBRARY_BYTES + SPARE
    recording: dict[str, Any] = {
        "torch": torch.__version__,
        "card": ground.device.card.title,
        "tokens": sizes.tokens,
        "tapes": sorted(file.name for file in tapes.iterdir()),
        "room_bytes": room,
        "warm": {name: each["seconds"] for name, each in warm.items()},
        "arms": [],
    }
    names = list(arms)
    for number in range(sizes.rounds):
        if time.perf_counter() - begun > sizes.seconds:
            break
        for name in names[number % len(names) :] + names[: number % len(names)]:
            result = _round(ground, name, arms[name], room, sizes.steps)
            recording["arms"].append({"round": number, **result})
            recording["elapsed_s"] = round(time.perf_counter() - begun, 1)
            output.write_text(json.dumps(recording, indent=1, default=str))
            print(number, name, result["outcome"], result["releases"], median(result["seconds"] or [0.0]), flush=True)
    return recording


def report(recording: Mapping[str, Any]) -> str:
    """The recording as a table and the sentences that need its figures."""
    rounds = {each["round"]: each["seconds"] for each in recording["arms"] if each["policy"] == CALM}
    step = median(second for seconds in rounds.values() for second in seconds)
    steps = max(map(len, rounds.values()))
    rows = [_row(name, recording, rounds) for name in dict.fromkeys(each["policy"] for each in recording["arms"])]
    causes = {
        (each["policy"], each["outcome"].partition("\n")[0])
        for each in recording["arms"]
        if each["outcome"] != "finished"
    }
    head = ["policy", "finished", "releases", "ms release", "ms refill", "% charged", "ms first step", "ms other steps"]
    return "\n".join(
        [
            f"{recording['card']}, torch {recording['torch']}: {len(rounds)} rounds of {steps} steps of "
            f"{recording['tokens']:,} tokens for each arm, the arms in turn. Releases, refill and what was charged are "
            "those of all rounds, planning anew included; milliseconds of a step are medians. Time lost is that of a "
            f"round against the arm without pressure in it ({step * 1e3:.1f} ms a step): median, lowest and highest "
            "round. For the arm without pressure it is against its own median, which is the noise.",
            "",
            table([*head, "tokens/s", "% of time lost", "peak reserved, B"], rows),
            "",
            *(f"- `{policy}`: {cause}" for policy, cause in sorted(causes)),
        ]
    )


def _row(name: str, recording: Mapping[str, Any], rounds: Mapping[int, Sequence[float]]) -> list[str]:
    arms = [each for each in recording["arms"] if each["policy"] == name]
    finished = [each for each in arms if each["outcome"] == "finished"]
    cells = [f"`{name}`" if name in POLICIES else name, f"{len(finished)} of {len(arms)}"]
    cells.append(str(sum(each["releases"] for each in arms)))
    if not finished:
        return [*cells, *["-"] * 8]
    seconds = [second for each in finished for second in each["seconds"]]
    refill, charged = sum(map(_refill, finished)), sum(each["charged_s"] for each in finished)
    calm = {number: sum(steps) for number, steps in rounds.items()}
    beside = dict.fromkeys(calm, median(calm.values())) if name == CALM else calm
    lost = [100 * (sum(each["seconds"]) / beside[each["round"]] - 1) for each in finished]
    return [
        *cells,
        f"{1e3 * sum(each['release_s'] for each in finished):.1f}",
        f"{1e3 * refill:.1f}",
        f"{100 * (charged + refill) / sum(seconds):.2f}",
        f"{1e3 * median(each['seconds'][0] for each in finished):.1f}",
        f"{1e3 * median(second for each in finished for second in each['seconds'][1:]):.1f}",
        f"{recording['tokens'] * len(seconds) / sum(seconds):,.0f}",
        f"{median(lost):.2f} ({min(lost):.2f} to {max(lost):.2f})",
        f"{max(each['peak_reserved'] for each in finished):,}",
    ]


def _refill(arm: Mapping[str, Any]) -> float:
    """Seconds that an arm's releases cost in segments taken again, at most as many as were returned."""
    return min(arm["segments_returned"], arm["segments_taken"]) * (arm["refill_ns_per_segment"] or 0) / 1e9


def page(text: str) -> str:
    """The text of docs/headroom.md with what the committed recording gives between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{report(json.loads(RECORDING.read_text()))}\n{END}{after}"


def main(folder: Path) -> None:
    """Record the tapes in a process of its own, then compare."""
    folder.mkdir(parents=True, exist_ok=True)
    tapes = folder / "tapes"
    subprocess.run([sys.executable, "-m", "bench.native.release", "--tapes", str(tapes)], check=True)
    print(report(compare(real(), tapes, folder / RECORDING.name)))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--page"]:
            PAGE.write_text(page(PAGE.read_text()))
        case ["--tapes", given]:
            record_tapes(real(), Path(given))
        case [given]:
            main(Path(given))
        case _:
            sys.exit("usage: python -m bench.native.release FOLDER | --page | --tapes FOLDER")
