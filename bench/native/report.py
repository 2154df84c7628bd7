"""Make docs/native.md from the committed recordings."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from bench.native import accuracy, hardware, model

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


def page() -> str:
    """The whole page; a recording that is not there has no section."""
    sections = [HEADER]
    for name, make in (
        ("h200-reference.jsonl.gz", lambda path: accuracy.section("The reference model", lines_of(path))),
        ("h200-megatron-steps.jsonl.gz", lambda path: accuracy.section("The Megatron model", lines_of(path))),
        ("h200-megatron.json", lambda path: model.section(json.loads(path.read_text()))),
        ("h200-nvml.json", lambda path: hardware.section(json.loads(path.read_text()))),
    ):
        if (RECORDINGS / name).exists():
            sections.append(f"{make(RECORDINGS / name)}\n\nRecording: `bench/recordings/{name}`.\n")
    return "\n".join(sections)
