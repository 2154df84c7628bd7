"""The public report's failure, rebuilt with its totals: each policy does there what it was recorded or meant to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from trainer_rank.devices.virtual import VirtualDevice
from trainer_rank.events import Announcer
from trainer_rank.policies import load_policy
from trainer_rank.release.headroom import Headroom
from trainer_rank.release.incident import CARD, DEMANDS, elsewhere, snapshot
from trainer_rank.release.libraries import BACKWARD

WAVES = 5
PHASE = DEMANDS[0].phase


@pytest.fixture
def card() -> Iterator[VirtualDevice]:
    device = VirtualDevice(CARD, 5, elsewhere=elsewhere(), demands=DEMANDS, snapshot=snapshot())
    yield device
    device.close()


def test_the_construction_has_the_reports_totals(card: VirtualDevice) -> None:
    free, total = card.memory_info()
    assert round(card.allocated() / 1e9, 3) == 74.662
    assert round(card.reserved() / 1e9, 3) == 147.394
    assert round(free / 1e9, 6) == 0.034734
    assert total == 150_121_021_440
    outside = total - free - card.reserved()
    assert round(outside / 1e9, 2) == 2.69
    allocated = card.allocated()
    assert round(card.empty_cache() / 1e9, 6) == 42.754638
    assert card.allocated() == allocated
    assert round((card.reserved() - allocated) / 1e9, 2) == 29.98


def waves(device: VirtualDevice, policy: str) -> tuple[int, int, str]:
    """Run hand-off and backward five times, the libraries built anew each time; calls, bytes and outcome."""
    events: list[dict[str, Any]] = []
    headroom = Headroom(device, load_policy(policy), Announcer(lambda event: events.append(dict(event))))
    outcome = "finished"
    for _ in range(WAVES):
        with headroom.working():
            torch.empty(300 << 20, dtype=torch.uint8, device=device.torch_device)
        headroom.hand_off(0, trains=True)
        try:
            with headroom.protected(BACKWARD):
                torch.empty(500 << 20, dtype=torch.uint8, device=device.torch_device)
                device.require(PHASE)
        except RuntimeError as error:
            outcome = str(error)
            break
        device.give_up(PHASE)
    releases = [event for event in events if event["event"] == "release" and event["release_ns"]]
    assert device.snapshot().allocated == snapshot().allocated
    return len(releases), sum(sum(event["shrunk"].values()) for event in releases), outcome


def test_without_a_policy_the_first_backward_fails_as_reported(card: VirtualDevice) -> None:
    assert waves(card, "none") == (0, 0, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


def test_ours_needs_the_fewest_calls_and_bytes() -> None:
    found = {}
    for index, policy in enumerate(("unconditional", "forecast")):
        device = VirtualDevice(CARD, 6 + index, elsewhere=elsewhere(), demands=DEMANDS, snapshot=snapshot())
        found[policy] = waves(device, policy)
        device.close()
    assert found["unconditional"][2] == found["forecast"][2] == "finished"
    assert found["forecast"][0] == 1
    assert found["unconditional"][0] == WAVES
    assert found["forecast"][1] < found["unconditional"][1]
