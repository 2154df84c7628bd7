"""Tapes of the real reference model on the virtual device: self-consistency, not accuracy on a card."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from trainer_rank.devices.virtual import VirtualDevice
from trainer_rank.models.reference import TINY, build_reference
from trainer_rank.recording import StepProbes
from trainer_rank.tapes import Tape, fit
from trainer_rank.tapes.check import compare


@pytest.fixture(scope="module")
def probes() -> Iterator[StepProbes]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    device = VirtualDevice("h200")
    model = build_reference(TINY, device)
    try:
        yield StepProbes(model)
    finally:
        model.close()
        device.close()
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tape(probes: StepProbes) -> Tape:
    traces = [each.trace for each in probes.record_within(20.0, 700)]
    assert 3 <= len(traces) <= 8
    return fit(traces)


@pytest.mark.parametrize("lengths", [(300,), (100, 200, 30, 5), (640, 3, 77), (64,) * 10])
def test_shapes_that_were_never_probed_are_forecast(tape: Tape, probes: StepProbes, lengths: tuple[int, ...]) -> None:
    compared = compare(tape, probes.record(probes.shape(lengths)).trace)
    assert compared.bound_holds
    assert compared.allocated_error is not None and abs(compared.allocated_error) <= 0.1
    assert compared.reserved_error is not None and abs(compared.reserved_error) <= 0.1


def test_a_tape_of_steps_covers_every_stage_of_a_step(tape: Tape) -> None:
    assert tape.covers >= {"forward", "forward/layer", "forward/head", "caller", "backward/layer/1", "optimizer"}
