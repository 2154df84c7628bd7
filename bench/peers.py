"""Peak allocated memory as tapes and as others forecast it, against what real cards showed on the same shapes.

Observed peaks and our forecasts, written before each step, are the committed recording's. The others run here and now;
accelerate and DeepSpeed have their columns when they are installed. ``python -m bench peers`` prints the page;
``python -m bench.peers`` writes it as docs/peers.md, with its plot, once all of them are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

from bench import _estimators as others
from bench.native.report import RECORDINGS, lines_of
from bench.native.tables import table

DOCS = Path(__file__).parent.parent / "docs"
SHAPES = 12
GIB = 1 << 30


@dataclass(frozen=True)
class Step:
    """A recorded step: its sequences, and bytes of peak allocated as forecast and as observed."""

    lengths: tuple[int, ...]
    forecast: int
    observed: int

    @property
    def rows(self) -> int:
        """Packed rows."""
        return sum(self.lengths)


@dataclass(frozen=True)
class Peer:
    """One way to forecast: bytes for each step (None where it cannot), and milliseconds for one answer."""

    name: str
    forecasts: tuple[int | None, ...]
    milliseconds: float | None


def recorded_steps() -> list[Step]:
    """Steps of the recording's first routing, as many as are shown, spread evenly in size."""
    found: list[Step] = []
    lengths: tuple[int, ...] = ()
    forecast = 0
    for event in lines_of(RECORDINGS / "h200-reference.jsonl.gz"):
        if event["event"] == "routing" and found:
            break
        if event["event"] == "shape":
            lengths = tuple(event["lengths"])
        elif event["event"] == "forecast":
            forecast = event["peak_allocated"]
        elif event["event"] == "observed":
            found.append(Step(lengths, forecast, event["peak_allocated"]))
    found.sort(key=lambda step: step.rows)
    return [found[index * (len(found) - 1) // (SHAPES - 1)] for index in range(SHAPES)]


def peers(steps: Sequence[Step]) -> list[Peer]:
    """Every peer's forecasts, ours first."""
    from bench.native.reference import GEOMETRY

    return [
        Peer("tapes", tuple(step.forecast for step in steps), None),
        _asked("MemTracker", steps, lambda step: others.mem_tracker(GEOMETRY, step.lengths)),
        _asked("hand formula", steps, lambda step: others.hand_formula(GEOMETRY, step.rows)),
        _asked("accelerate", steps, lambda _: others.accelerate(GEOMETRY)),
        _asked("DeepSpeed", steps, lambda _: others.deepspeed(GEOMETRY)),
    ]


def _asked(name: str, steps: Sequence[Step], ask: Callable[[Step], int | None]) -> Peer:
    times, answers = [], []
    for step in steps:
        begun = perf_counter()
        answers.append(ask(step))
        times.append(1000 * (perf_counter() - begun))
    return Peer(name, tuple(answers), median(times))


def page(steps: Sequence[Step], found: Sequence[Peer]) -> str:
    """The page with both tables."""
    rows = [
        (f"{step.rows:,}", len(step.lengths), f"{step.observed / GIB:.3f}", *(_error(peer, i, step) for peer in found))
        for i, step in enumerate(steps)
    ]
    head = ("packed rows", "sequences", "observed, GiB", *(peer.name for peer in found))
    summary = [(peer.name, *_summary(peer, steps)) for peer in found]
    return "\n".join(
        [
            "# Forecasts of peak allocated memory, side by side",
            "",
            "Errors in percent of what a real H200 showed for whole training steps of the reference model with",
            "adapters (`bench/recordings/h200-reference.jsonl.gz`). Tapes were recorded on the card before the first",
            "step, and each forecast was written before its step ran. The others need no card and ran afterwards, on",
            "the same shapes. `python -m bench peers` prints this page; `python -m bench.peers` writes it and its",
            "plot, for which `pip install accelerate deepspeed` comes first: the pipeline itself needs neither.",
            "",
            table(head, rows),
            "",
            table(("", "median of errors", "largest error", "an answer takes"), summary),
            "",
            "![Forecast against observed peaks, both axes logarithmic](peers.svg)",
            "",
            "- MemTracker runs under FakeTensorMode over two steps; frozen weights are external tensors to it.",
            "- The hand formula is that of Megatron's memory report, told of frozen weights and of recomputation.",
            "- accelerate and DeepSpeed estimate model states, not activations, and take every parameter as trained.",
            "- The smallest shape is the first step: optimizer states did not exist yet.",
            "",
        ]
    )


def _error(peer: Peer, index: int, step: Step) -> str:
    forecast = peer.forecasts[index]
    return "not installed" if forecast is None else f"{100 * (forecast / step.observed - 1):+.4f}"


def _summary(peer: Peer, steps: Sequence[Step]) -> tuple[str, str, str]:
    known = [
        100 * abs(forecast / step.observed - 1)
        for forecast, step in zip(peer.forecasts, steps, strict=True)
        if forecast is not None
    ]
    took = "see [tapes.md](tapes.md)" if peer.milliseconds is None else f"{peer.milliseconds:.1f} ms"
    if not known:
        return "not installed", "not installed", "-"
    return f"{median(known):.4f} %", f"{max(known):.4f} %", took


def draw(steps: Sequence[Step], found: Sequence[Peer], file: Path) -> None:
    """Draw forecast against observed on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 6))
    observed = [step.observed / GIB for step in steps]
    axes.plot(observed, observed, color="black", linewidth=0.7, label="as observed")
    for peer, marker in zip(found, "osv^D", strict=True):
        if None not in peer.forecasts:
            axes.plot(observed, [(each or 0) / GIB for each in peer.forecasts], marker, markersize=5, label=peer.name)
    axes.set(xscale="log", yscale="log", xlabel="observed peak allocated, GiB", ylabel="forecast, GiB")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def write() -> None:
    """Write the page and its plot, or exit where a peer is missing: a page without it would compare less."""
    steps = recorded_steps()
    found = peers(steps)
    if missing := [peer.name for peer in found if None in peer.forecasts]:
        sys.exit(f"docs/peers.md is as it was: {', '.join(missing)} not installed; pip install accelerate deepspeed")
    (DOCS / "peers.md").write_text(page(steps, found))
    draw(steps, found, DOCS / "peers.svg")


def main() -> None:
    """Print the page."""
    steps = recorded_steps()
    print(page(steps, peers(steps)))


if __name__ == "__main__":
    write()
