"""Devices under test: a virtual card, two of them, or whichever kind a test runs on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from trainer_rank.devices.cuda import CudaDevice
from trainer_rank.devices.protocol import Device
from trainer_rank.devices.virtual import VirtualDevice

DEVICES = ["virtual", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def virtual() -> Iterator[VirtualDevice]:
    device = VirtualDevice("h200")
    yield device
    device.close()


@pytest.fixture
def second() -> Iterator[VirtualDevice]:
    device = VirtualDevice("h200", 1)
    yield device
    device.close()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    if request.param == "virtual":
        opened = VirtualDevice("h200")
        yield opened
        opened.close()
    elif torch.cuda.is_available():
        yield CudaDevice()
    else:
        pytest.skip("needs a CUDA device; run on a GPU host")
