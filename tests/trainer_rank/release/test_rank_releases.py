"""A rank's own steps under each policy: releases only where a need is shown, and a direct forward is protected too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from trainer_rank.devices.virtual import VirtualDevice
from trainer_rank.devices.virtual_memory import LibraryDemand
from trainer_rank.models.reference import TINY, build_reference
from trainer_rank.policies import load_policy
from trainer_rank.rank import TrainerRank
from trainer_rank.requests import Request

CONTEXT = 1_358_757_888  # what the h200 card's libraries hold from the first backward on
LEFT = 1 << 20


class Bench:
    def __init__(self, policy: str, *demands: LibraryDemand) -> None:
        self.events: list[dict[str, Any]] = []
        self.device = VirtualDevice("h200", capacity=CONTEXT + (1 << 29), demands=demands)
        settings = load_policy(policy)
        if settings.forecasts:
            settings = replace(settings, probe_lengths=((4,), (40, 17), (150, 60, 31, 5), (64, 33, 2)))
            settings = replace(settings, ladder=("whole", "split"))
        model = build_reference(TINY, self.device, slots=("policy",), seed=5)
        self.rank = TrainerRank(model, settings, on_event=lambda event: self.events.append(dict(event)))

    def step(self) -> None:
        generator = torch.Generator().manual_seed(3)
        tokens = torch.randint(0, TINY.vocabulary, (61,), generator=generator)
        for micro_batch in self.rank.forward_micro_batches([Request(tokens[:-1], tokens[1:], "policy")]):
            self.rank.backward(micro_batch, -micro_batch.outputs[0].log_probabilities.mean())

    def fill(self) -> None:
        size = (self.device.memory_info().free - LEFT) & -(2 << 20)
        torch.empty(size, dtype=torch.uint8, device=self.device.torch_device)

    def releases(self) -> int:
        return sum(event["event"] == "release" and event["release_ns"] > 0 for event in self.events)


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(policy: str, *demands: LibraryDemand) -> Bench:
        made.append(Bench(policy, *demands))
        return made[-1]

    yield make
    for each in made:
        each.rank.close()
        each.device.close()


@pytest.mark.parametrize(("policy", "releases"), [("forecast", 0), ("budgeted", 0), ("unconditional", 20)])
def test_equal_steps_without_pressure(bench: Callable[..., Bench], policy: str, releases: int) -> None:
    found = bench(policy)
    found.step()
    before = found.releases()
    for _ in range(20):
        found.step()
    assert found.releases() - before == releases


@pytest.mark.parametrize("policy", ["forecast", "budgeted", "trigger-3-percent", "unconditional"])
def test_one_release_answers_one_episode_of_pressure(bench: Callable[..., Bench], policy: str) -> None:
    found = bench(policy)
    found.step()
    found.fill()
    before = found.releases()
    found.step()
    assert found.releases() - before == 1
    assert found.device.memory_info().free > (1 << 28)
    assert found.device.cap() is None


def test_a_direct_forward_is_protected(bench: Callable[..., Bench]) -> None:
    found = bench("forecast")
    found.step()
    found.fill()
    with found.rank.direct_forward():
        assert found.device.memory_info().free >= 16 << 20
    (event,) = [event for event in found.events if event["event"] == "headroom" and event["before"] == "direct forward"]
    assert event["free"] >= event["due"] > 0


@pytest.mark.parametrize(("policy", "finds_memory"), [("none", False), ("forecast", True)])
def test_a_reduction_outside_any_hand_off_finds_its_24_bytes(
    bench: Callable[..., Bench], policy: str, finds_memory: bool
) -> None:
    found = bench(policy, LibraryDemand("gradient norms", "reduction", 24, "nccl"))
    found.step()
    free = found.device.memory_info().free
    torch.empty(free & -(2 << 20), dtype=torch.uint8, device=found.device.torch_device)
    found.device.take_raw(found.device.memory_info().free)
    with found.rank.collective("gradient norms"):
        assert (found.device.memory_info().free >= 16 << 20) is finds_memory
        if finds_memory:
            found.device.require("reduction")
            return
        with pytest.raises(torch.distributed.DistBackendError, match="Failed to CUDA malloc 24 bytes"):
            found.device.require("reduction")
