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
    """The model's section; its adapters where no later recording is of them alone."""
    return model.section(document(path), adapters=not (RECORDINGS / "h200-lora.json").exists())


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


def page() -> str:
    """The whole page."""
    sections = [HEADER]
    for name, make in SECTIONS.items():
        if (RECORDINGS / name).exists():
            sections.append(f"{make(RECORDINGS / name)}\n\nRecording: `bench/recordings/{name}`.\n")
    return "\n".join(sections)
