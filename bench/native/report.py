"""Make docs/native.md from the committed recordings."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.native import accuracy, adapters, hardware, model, plans, training

RECORDINGS = Path(__file__).parent.parent / "recordings"
PAGE = Path(__file__).parent.parent.parent / "docs" / "native.md"
HEADER = """# Measured on real H200s

Every figure below is computed from a recording in `bench/recordings/` by `python -m bench.native`, which wrote this
page; a test runs it again and compares. The recordings were made by the scripts in `bench/native/`, each of which says
in its first lines how to run it on a host with a GPU (see [gpu.md](gpu.md)).
"""


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The events of a recording of JSON lines."""
    with gzip.open(path, "rt") as stream:
        return [json.loads(line) for line in stream]


def document(path: Path) -> dict[str, Any]:
    """A recording of one JSON document."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _repeats(path: Path) -> str:
    """The recording and, where there is one, that with deterministic kernels."""
    other = path.with_name("h200-learning-deterministic.json")
    return training.repeats([document(each) for each in (path, other) if each.exists()])


def _model(path: Path) -> str:
    """The model's section; whole steps by rank where no later recording has them."""
    later = RECORDINGS / "h200-lora.json"
    return model.section(document(path), adapters=not (later.exists() and "steps" in document(later)))


SECTIONS: dict[str, Callable[[Path], str]] = {
    "h200-reference.jsonl.gz": lambda path: accuracy.section("The reference model", lines_of(path)),
    "h200-megatron-steps.jsonl.gz": lambda path: accuracy.section("The Megatron model", lines_of(path)),
    "plans": lambda path: plans.section(plans.recordings(path)),
    "h200-megatron.json": _model,
    "h200-lora.json": lambda path: adapters.section(document(path)),
    "h200-pairs.json": lambda path: training.overhead(document(path)),
    "h200-grid.json": lambda path: training.sizes(document(path)),
    "h200-learning.json": _repeats,
    "h200-nvml.json": lambda path: hardware.section(document(path)),
}
"""What makes each section, by the recording that it needs; a recording that is not there has no section."""


_PADDED = (
    "Recorded before commit 089158b, when the weights of grouped adapters were padded to eight ranks in every forward."
)
NOTES = {"h200-megatron-steps.jsonl.gz": _PADDED, "h200-megatron.json": _PADDED}
"""What a reader must know of a recording that the code has left behind."""
NOT_RECORDED = {
    "h200-pairs.json": "our step beside the same step without TrainerRank",
    "h200-learning.json": "repeats of a step bit for bit, and a memorised batch",
}
"""What the page would show of recordings that nobody has made yet, by their names."""


def page() -> str:
    """The whole page."""
    sections = [HEADER]
    for name, make in SECTIONS.items():
        if (RECORDINGS / name).exists():
            note = f" {NOTES[name]}" if name in NOTES else ""
            sections.append(f"{make(RECORDINGS / name)}\n\nRecording: `bench/recordings/{name}`.{note}\n")
    return "\n".join([*sections, *_missing()])


def _missing() -> list[str]:
    """What was not measured, as far as it is known here."""
    missing = [what for name, what in NOT_RECORDED.items() if not (RECORDINGS / name).exists()]
    lora, deep = RECORDINGS / "h200-lora.json", list((RECORDINGS / "plans").glob("*_L[14][60]_*"))
    if not lora.exists() or "steps" not in document(lora):
        missing.append("whole steps by rank with grouped adapters that are not padded")
    if not deep:
        missing.append("traces of 16 and 40 layers")
    text = f"`bench/native/session.sh` records these too, but no recording of them is here yet: {'; '.join(missing)}.\n"
    return ["## Not recorded", "", text] if missing else []
