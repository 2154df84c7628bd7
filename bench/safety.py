"""Does what admission lets run fit, and is what it refuses too large? ``python -m bench safety`` prints docs/safety.md
as it follows from the committed recordings; ``python -c 'from bench.safety import write; write()'`` writes it with its
plot.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench._safety.admitted import SINGLE
from bench._safety.summary import RAN, REFUSED, summary

RECORDINGS = Path(__file__).parent / "recordings"
DOCS = Path(__file__).parent.parent / "docs"
GIB = 1 << 30
SECTIONS = {
    "virtual-safety.json.gz": "python -m bench.admission bench/recordings/virtual-safety.json.gz",
    "h200-safety.json.gz": "python -m bench.native.safety h200-safety.json.gz",
}
"""Recordings, and the command that makes each."""
HEADER = """# Safety: what is admitted runs, what is refused does not fit

![Requests by their tokens and the room they met: admitted, refused, out of memory](safety.svg)

One long request at a time, in rooms of random size; crosses are what the bisection tried. Everything on this page, the
plot included, follows from recordings in `bench/recordings/`: `python -m bench safety` prints it.

## What was done
- A raw driver allocation narrows the card, so that libraries feel it too; a tensor of the caller's leaves a random
  room, and pieces of random size lie in it. Weights, adapters and optimizer states stay.
- **Queues** of requests that share nothing, more than fit, half of them with as much to score as to train: the widest
  micro-batches are admitted, up to four a room. **Groups** that no micro-batch may divide, up to three rooms large,
  and **single** long requests take the ladder, or are refused.
- Every **refused** batch then runs all the same (`allow_oversize`). It was refused falsely when its peak stayed within
  what is free beside all claims.
- The **oracle** knows nothing and tries: bisection finds the most leading requests of a queue that run whole in the
  same room, with all of it to themselves, without claims, reserve or cap. At the frontier what runs is not a matter of
  size alone: blocks fall differently, so one more request may run where one less did not.
- **Throughput**: optimizer steps of the same batches in the same rooms, in one process, everything counted. A constant
  token budget runs as many requests as it allows, whole and unseen; several are tried, and the best is that of the
  most tokens a second among those that met no batch that ran out of memory. *Halving* runs as many requests as ran
  last; when they run out of memory, half as many, and the batch again from its start. Admission runs first and last;
  both count.
"""


def recordings() -> dict[str, dict[str, Any]]:
    """The recordings that are there, by file name."""
    found = {}
    for name in SECTIONS:
        if (RECORDINGS / name).exists():
            found[name] = json.loads(gzip.decompress((RECORDINGS / name).read_bytes()))
    return found


def page(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The whole page."""
    return "\n".join([HEADER, *(_section(name, recording) for name, recording in found.items())])


def _section(name: str, recording: Mapping[str, Any]) -> str:
    room, held = recording["room"] / GIB, recording["allocated"] / GIB
    return f"""## {recording["ground"]}

`{SECTIONS[name]}`: torch {recording["torch"]}, rooms of {room / 2:.0f} to {room:.0f} GiB beside {held:.2f} GiB that
stay; {recording["elapsed_s"]:,.0f} s in all.

{summary(recording)}
"""


def points(recording: Mapping[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """(Room in GiB, thousand tokens) of single requests and of what the bisection tried, by what became of them."""
    found: dict[str, list[tuple[float, float]]] = {
        "admitted whole": [],
        "admitted by another rung": [],
        "refused, does not fit": [],
        "refused, would have run": [],
        "out of memory": [],
        "bisection: ran": [],
        "bisection: out of memory": [],
    }
    for row in recording["steps"]:
        if row["kind"] == SINGLE:
            found[_fate(row)].append((row["room"] / GIB, row["asked"] / 1000))
    for row in recording["frontiers"]:
        for tokens, retries in row["tried"].items():
            fate = "bisection: out of memory" if retries is None else "bisection: ran"
            found[fate].append((row["room"] / GIB, int(tokens) / 1000))
    return found


def _fate(row: Mapping[str, Any]) -> str:
    if row["outcome"] == RAN:
        return "admitted whole" if row["rung"] == "whole" else "admitted by another rung"
    if row["outcome"] == REFUSED:
        return "refused, would have run" if row["within"] else "refused, does not fit"
    return "out of memory"


def draw(found: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw one frontier beside the other."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "safety"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(found), figsize=(6 * len(found), 5), layout="constrained", squeeze=False)
    styles = zip(("o", "s", "v", "D", "X", "+", "x"), ("C0", "C2", "C7", "C1", "C3", "black", "C3"), strict=True)
    looks = list(styles)
    for recording, one in zip(found, axes[0], strict=True):
        for (name, where), (marker, colour) in zip(points(recording).items(), looks, strict=True):
            rooms, tokens = zip(*where, strict=True) if where else ((), ())
            small = 14 if name.startswith("bisection") else 30
            one.scatter(
                rooms, tokens, s=small, marker=marker, color=colour, label=f"{name} ({len(where)})", linewidth=0.8
            )
        one.set(xlabel="room, GiB", ylabel="thousand tokens", title=recording["ground"])
        one.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def write() -> None:
    """Write the page and its plot."""
    found = recordings()
    (DOCS / "safety.md").write_text(page(found))
    draw(list(found.values()), DOCS / "safety.svg")


def main() -> None:
    """Print the page."""
    print(page(recordings()))


if __name__ == "__main__":
    main()
