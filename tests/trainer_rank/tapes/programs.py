"""Small programs with a known structure, recorded on the allocator model as a device would record them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from trainer_rank.allocator.driver import ModelledDriver
from trainer_rank.allocator.model import CachingAllocator
from trainer_rank.allocator.rules import MIB
from trainer_rank.allocator.snapshot import Snapshot
from trainer_rank.allocator.trace import Event, Trace

CARD = 1 << 40
Size = Callable[[Mapping[str, int]], int]


@dataclass(frozen=True)
class Step:
    """``birth`` names a new allocation of ``size``; ``death`` names one that ends; ``stage`` marks what follows."""

    birth: str | None = None
    size: Size = field(default=lambda _: 0)
    stream: int = 0
    death: str | None = None
    stage: str | None = None


class _WatchedDriver(ModelledDriver):
    def __init__(self, events: list[Event], snapshot: Snapshot | None) -> None:
        super().__init__(CARD, snapshot=snapshot)
        self.events = events
        self.stream = 0

    def take(self, size: int) -> int | None:
        address = super().take(size)
        assert address is not None
        self.events.append(Event("segment_alloc", address, size, self.stream))
        return address


def record(steps: Sequence[Step], features: Mapping[str, int], before: Snapshot | None = None) -> Trace:
    """Run the program once from ``before`` and return its recording."""
    events: list[Event] = []
    driver = _WatchedDriver(events, before)
    allocator = CachingAllocator(driver, before)
    start = allocator.snapshot()
    live: dict[str, tuple[int, int, int]] = {}
    marks: list[tuple[int, str]] = []
    for step in steps:
        if step.stage is not None:
            marks.append((len(events), step.stage))
        elif step.birth is not None:
            size = step.size(features)
            driver.stream = step.stream
            handle = allocator.malloc(size, step.stream)
            live[step.birth] = (handle, size, step.stream)
            events.append(Event("alloc", allocator.address(handle), size, step.stream))
        elif step.death is not None:
            handle, size, stream = live.pop(step.death)
            address = allocator.address(handle)
            allocator.free(handle)
            events += [Event("free_requested", address, size, stream), Event("free_completed", address, size, stream)]
    return Trace(
        before=start,
        events=tuple(events),
        after=allocator.snapshot(),
        peak_allocated=allocator.peak_allocated,
        peak_reserved=allocator.peak_reserved,
        features=dict(features),
        marks=tuple(marks),
        source=f"program at {dict(features)}",
    )


class ScatteredDriver(ModelledDriver):
    """Hands out segments anywhere, as a real driver may."""

    def __init__(self, draw: random.Random, snapshot: Snapshot) -> None:
        super().__init__(CARD << 5, snapshot=snapshot)
        self.draw = draw
        self.taken = [(each.address, each.address + each.total) for each in snapshot.segments]

    def take(self, size: int) -> int | None:
        super().take(size)
        while True:
            address = self.draw.randrange(1, 1 << 25) * (2 * MIB)
            if all(address + size <= low or address >= high for low, high in self.taken):
                self.taken.append((address, address + size))
                return address


def used_before(draw: random.Random) -> Snapshot:
    """Return a cache cut up by what ran before, with live blocks in it."""
    allocator = CachingAllocator(ModelledDriver(CARD << 5))
    ranges = ((1, MIB), (MIB, 10 * MIB), (10 * MIB, 100 * MIB))
    live = [allocator.malloc(draw.randrange(*draw.choice(ranges))) for _ in range(draw.randrange(60))]
    draw.shuffle(live)
    for handle in live[draw.randrange(len(live) + 1) :]:
        allocator.free(handle)
    return allocator.snapshot()


def run_scattered(
    steps: Sequence[Step], features: Mapping[str, int], before: Snapshot, draw: random.Random
) -> CachingAllocator:
    """Run the program from ``before`` on a driver that puts segments anywhere; return the allocator afterwards."""
    allocator = CachingAllocator(ScatteredDriver(draw, before), before)
    live: dict[str, int] = {}
    for step in steps:
        if step.birth is not None:
            live[step.birth] = allocator.malloc(step.size(features), step.stream)
        elif step.death is not None:
            allocator.free(live.pop(step.death))
    return allocator


def rows(coefficient: int, constant: int = 0, feature: str = "packed_tokens") -> Size:
    """Return a size that is a line in one feature."""
    return lambda features: coefficient * features[feature] + constant


def layered(layers: int, sizes: Sequence[Size], boundary: Size) -> list[Step]:
    """Return forward and backward of ``layers`` layers with recomputation; each layer keeps its input."""
    return mixed([sizes] * layers, boundary)


def mixed(kinds: Sequence[Sequence[Size]], boundary: Size) -> list[Step]:
    """Return forward and backward of layers that work on different sizes each."""
    return [*_forward(kinds, boundary), *_backward(kinds, boundary)]


def _forward(kinds: Sequence[Sequence[Size]], boundary: Size) -> Iterator[Step]:
    yield Step(stage="forward/embedding")
    yield Step("input 0", boundary)
    for layer, sizes in enumerate(kinds):
        yield Step(stage=f"forward/layer/{layer}")
        yield from _inside("f", layer, sizes)
        yield Step(f"input {layer + 1}", boundary)
        yield from (Step(death=f"f {layer} {place}") for place in range(len(sizes)))
    yield Step(stage="forward/head")
    yield Step("logits", rows(4096, 512))


def _backward(kinds: Sequence[Sequence[Size]], boundary: Size) -> Iterator[Step]:
    layers = len(kinds)
    yield Step(stage="backward/head")
    yield Step("gradient", boundary)
    yield Step(death="logits")
    yield Step(death=f"input {layers}")
    for layer, sizes in reversed(list(enumerate(kinds))):
        yield Step(stage=f"backward/layer/{layer}")
        yield from _inside("b", layer, sizes)
        yield Step(f"gradient {layer}", boundary)
        yield Step(death="gradient" if layer == layers - 1 else f"gradient {layer + 1}")
        yield from (Step(death=f"b {layer} {place}") for place in reversed(range(len(sizes))))
        yield Step(death=f"input {layer}")
    yield Step(stage="backward/embedding")
    yield Step(death="gradient 0")


def _inside(phase: str, layer: int, sizes: Sequence[Size]) -> Iterator[Step]:
    for place, size in enumerate(sizes):
        yield Step(f"{phase} {layer} {place}", size)
