"""The comparison under pressure runs whole on a modelled card: tapes first, then every policy, and the page's table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.native import release
from tests.bench.modelled import Driver
from trainer_rank.devices.virtual import VirtualDevice
from trainer_rank.models.reference import TINY


@pytest.fixture
def ground() -> Iterator[release.Ground]:
    device = VirtualDevice("h200")
    probes = ((16,), (96, 33), (300, 40, 5), (200, 131, 77))
    yield release.Ground(device, Driver(device), TINY, torch.float32, probes)
    device.close()


def test_every_arm_runs_and_none_probes(ground: release.Ground, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    release.record_tapes(ground, tmp_path / "tapes")
    assert len(list((tmp_path / "tapes").iterdir())) == 3
    sizes = release.Sizes(tokens=400, warm=1, steps=2, rounds=2)
    recording = release.compare(ground, tmp_path / "tapes", tmp_path / "out.json", sizes)
    assert json.loads((tmp_path / "out.json").read_text())["arms"] == json.loads(json.dumps(recording["arms"]))
    arms = {name: [each for each in recording["arms"] if each["policy"] == name] for name in release.POLICIES}
    assert {each["probes"] for each in recording["arms"]} == {0}
    assert all("CUBLAS_STATUS_ALLOC_FAILED" in each["outcome"] for each in arms["none"])
    for name, releases in (("unconditional", 2), ("forecast", 1)):
        assert [(each["outcome"], each["releases"]) for each in arms[name]] == [("finished", releases)] * 2
    assert all(0 <= each["free_before"] - release.LEFT_FREE < 2 << 20 for each in arms["forecast"])
    text = release.report(recording)
    assert "| `forecast` | 2 of 2 | 2 |" in text
    assert "| `none` | 0 of 2 | 0 | - |" in text


def test_the_page_follows_from_the_recording() -> None:
    text = release.PAGE.read_text()
    assert text == release.page(text), "run `python -m bench.native.release --page` and commit docs/headroom.md"
