"""Draw where a card's memory goes over one step under pressure: ``python -m bench.headroom [OUTPUT.png [RECORDING]]``.

Records on a virtual card, with the policy forecast held to undivided plans, what the workload pressure does at its
first call: one ordinary step, the backward's library memory given back, the cache filled, then the step that is drawn.
With a RECORDING that ``python -m bench.native.headroom`` made on a GPU, that is drawn instead. Every figure of the
picture is read from the device or from the recording of that step.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import torch

from trainer_rank.allocator.trace import Trace, load_trace
from trainer_rank.devices.protocol import Device
from trainer_rank.devices.virtual import VirtualDevice
from trainer_rank.devices.virtual_memory import LibraryDemand
from trainer_rank.models.protocol import ModelRuntime
from trainer_rank.models.reference import SMALL, build_reference
from trainer_rank.policies import load_policy
from trainer_rank.rank import TrainerRank
from trainer_rank.requests import Request

CAPACITY, LEFT_FREE, LEAD = 1_800_000_000, 34_734_080, 400
LENGTHS = (2100, 1700, 1200, 900, 450, 300, 150, 90, 60, 30)
PHASE, READING = "first_backward", "reading"
LABEL = f"allocator events of one step, after {LEAD} places for the state before it"
BANDS = ("context", "libraries", "weights and adapters", "retained", "working set", "cached", "headroom", "free")
COLOURS = ("#4c4c4c", "#8c6bb1", "#2b6ca3", "#4fa3d1", "#9fd0ea", "#d9d9d9", "#f2a65a", "#ffffff")


class Scene(NamedTuple):
    """Where the step runs. ``meet`` has the backward's library take its memory, ``tear_down`` has it give that back.

    ``narrow`` makes all of the card but so many bytes somebody else's and says how many those are; it is given what the
    step takes at most, claims and all.
    """

    device: Device
    model: ModelRuntime
    lengths: Sequence[int]
    meet: Callable[[], None]
    tear_down: Callable[[], None]
    narrow: Callable[[int], int]


class Watched(VirtualDevice):
    """A virtual card that reports whenever a library may have taken memory."""

    watch: Callable[[], None] | None = None

    def require(self, phase: str) -> None:
        """Reach ``phase`` and report."""
        super().require(phase)
        if self.watch is not None:
            self.watch()


def record() -> Trace:
    """Run the scenario on a virtual card."""
    torch.set_num_threads(1)
    device = Watched("h200", capacity=CAPACITY, demands=[LibraryDemand("backward", PHASE, 8_388_608)])

    def watch(read: Callable[[], None] | None) -> None:
        device.watch = read

    scene = Scene(
        device,
        build_reference(SMALL, device, seed=7),
        LENGTHS,
        meet=lambda: None,
        tear_down=lambda: (device.give_up(PHASE), None)[1],
        narrow=lambda _: 0,
    )
    try:
        return record_step(scene, watch)
    finally:
        device.close()


def record_step(scene: Scene, watch: Callable[[Callable[[], None] | None], None] = lambda _: None) -> Trace:
    """Return the recording of the step under pressure, with its readings as marks ``reading/OUTSIDE/CLAIMED`` (bytes).

    ``watch`` is handed what to call whenever a library may have taken memory, and None at the end.
    """
    device = scene.device
    stages: list[Callable[[str], None]] = []

    def tell(stage: str) -> None:
        for each in stages:
            each(stage)

    told: list[Mapping[str, Any]] = []
    policy = replace(load_policy("forecast"), ladder=("whole",))
    rank = TrainerRank(scene.model, policy, on_stage=tell, on_event=told.append)
    _step(rank, scene, lambda: None)
    scene.tear_down()
    claimed = sum(claim.size or 0 for claim in rank._headroom.claims())  # sees what was given back, before it narrows
    (forecast,) = (each for each in told if each["event"] == "forecast")
    needed = forecast["bound_reserved"] - device.allocated() + sum(claim["size"] for claim in forecast["claims"])
    elsewhere = scene.narrow(needed + claimed)
    size = (device.memory_info().free - LEFT_FREE) & -(2 << 20)
    torch.empty(size, dtype=torch.uint8, device=device.torch_device)
    with device.record() as recording:
        start = _outside(device)

        def read() -> None:
            outside = _outside(device)
            claimed = sum(claim.size or 0 for claim in rank._headroom.claims()) - max(0, outside - start)
            recording.mark(f"{READING}/{outside - elsewhere}/{max(0, claimed)}")

        def begin(stage: str) -> None:
            recording.mark(stage)
            read()

        begin("admission")
        stages.append(begin)
        watch(read)
        _step(rank, scene, read)
        watch(None)
    rank.close()
    features = {"capacity": device.card.capacity - elsewhere, "context": device.card.context}
    return replace(recording.trace(), features=features)


def _outside(device: Device) -> int:
    free, total = device.memory_info()
    return total - free - device.reserved()


def _step(rank: TrainerRank, scene: Scene, read: Callable[[], None]) -> None:
    generator = torch.Generator().manual_seed(3)
    batch = []
    for length in scene.lengths:
        tokens = torch.randint(0, scene.model.geometry.vocabulary, (length + 1,), generator=generator)
        batch.append(Request(tokens[:-1], tokens[1:], "policy", group="batch"))

    def begin(gradient: torch.Tensor) -> torch.Tensor:
        scene.meet()
        read()
        return gradient

    for micro_batch in rank.forward_micro_batches(batch):
        loss = -torch.stack([each.log_probabilities.mean() for each in micro_batch.outputs.values()]).mean()
        loss.register_hook(begin)  # type: ignore[no-untyped-call]
        rank.backward(micro_batch, loss)
        del loss


class Reading(NamedTuple):
    """Bytes outside the allocator and claimed, and the event before which they were read."""

    event: int
    outside: int
    claimed: int


def readings(trace: Trace) -> list[Reading]:
    """Return the readings among the marks."""
    found = [(event, stage.split("/")) for event, stage in trace.marks if stage.startswith(f"{READING}/")]
    return [Reading(event, int(outside), int(claimed)) for event, (_, outside, claimed) in found]


def bands(trace: Trace) -> list[tuple[int, ...]]:
    """Return the bytes of every band after every allocator event, in the order of ``BANDS``; they make up the card."""
    capacity, context = trace.features["capacity"], trace.features["context"]
    live = {
        block.address: (-1, block.size) for each in trace.before.segments for block in each.blocks if block.requested
    }
    baseline, reserved = sum(size for _, size in live.values()), trace.before.reserved
    retained = _retained(trace)
    kept, allocated = 0, baseline
    rows: list[tuple[int, ...]] = []
    found = readings(trace)
    following = iter([*found[1:], found[-1]._replace(event=len(trace.events) + 1)])
    sample, upcoming = found[0], next(following)
    for index, event in enumerate(trace.events):
        while upcoming.event <= index:
            sample, upcoming = upcoming, next(following)
        if event.action == "alloc":
            live[event.address] = (index, _rounded(event.size))
            allocated += _rounded(event.size)
            kept += _rounded(event.size) if index in retained else 0
        elif event.action == "free_completed":
            born, size = live.pop(event.address)
            allocated -= size
            kept -= size if born in retained else 0
        elif event.action.startswith("segment_"):
            reserved += event.size if event.action == "segment_alloc" else -event.size
        free = capacity - reserved - sample.outside
        claimed = max(0, min(sample.claimed, free))
        working = max(0, allocated - baseline - kept)
        lowest = (context, sample.outside - context, min(baseline, allocated), kept, working)
        rows.append((*lowest, reserved - sum(lowest[2:]), claimed, free - claimed))
    return rows


def _filled(trace: Trace) -> tuple[int, ...]:
    """Return the bands before the first event."""
    before, outside, context = trace.before, readings(trace)[0].outside, trace.features["context"]
    free = trace.features["capacity"] - before.reserved - outside
    return (context, outside - context, before.allocated, 0, 0, before.reserved - before.allocated, 0, free)


def _retained(trace: Trace) -> set[int]:
    """Return the events whose blocks were born in the forward and are still there when the outputs are handed over."""
    first = next(index for index, stage in trace.marks if stage.startswith("forward/"))
    last = next(index for index, stage in trace.marks if stage == "caller")
    live: dict[int, int] = {}
    for index, event in enumerate(trace.events[:last]):
        if event.action == "alloc" and index >= first:
            live[event.address] = index
        elif event.action == "free_completed":
            live.pop(event.address, None)
    return set(live.values())


def _rounded(size: int) -> int:
    return -(-size // 512) * 512


def draw(trace: Trace, path: Path) -> None:
    """Write the picture."""
    matplotlib.use("agg")
    from matplotlib import pyplot

    capacity = trace.features["capacity"] / 1e9
    rows = bands(trace)
    figure, axes = pyplot.subplots(figsize=(10, 5.2), layout="constrained")
    rows = [_filled(trace)] * LEAD + rows
    series = [[row[band] / 1e9 for row in rows] for band in range(len(BANDS))]
    axes.stackplot(range(len(rows)), series, labels=BANDS, colors=COLOURS, step="post", linewidth=0)
    for index, stage in _turns(trace):
        axes.axvline(index, color="black", linewidth=0.6, linestyle=":")
        side = "right" if stage == "hand-off" else "left"
        axes.text(index, capacity * 1.01, stage, fontsize=8, ha=side, va="bottom")
    axes.set(xlim=(0, len(rows) - 1), ylim=(0, capacity), xlabel=LABEL, ylabel="GB")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), reverse=True, frameon=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def _turns(trace: Trace) -> list[tuple[int, str]]:
    """Where each phase of the step begins."""
    found: dict[str, int] = {}
    for index, stage in trace.marks:
        found.setdefault(stage.partition("/")[0], index)
    names = {"caller": "hand-off", "admission": "admission", "forward": "forward", "backward": "backward"}
    return [(index and index + LEAD, names[stage]) for stage, index in found.items() if stage in names]


def main() -> None:
    given = sys.argv[1:] if __name__ == "__main__" else []
    trace = load_trace(given[1]) if len(given) > 1 else record()
    rows = bands(trace)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(given[0]) if given else Path(folder, "headroom.png")
        draw(trace, path)
        print(f"{path}: {len(rows)} events, {path.stat().st_size} B")
    for band, name in enumerate(BANDS):
        values = [row[band] for row in rows]
        print(f"{name:22} {min(values):>14,} to {max(values):>14,} B")


if __name__ == "__main__":
    main()
