"""Claims are physically free before each phase that may need them, again after a teardown, within the account."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from trainer_rank.devices.cards import Card, Outside
from trainer_rank.devices.virtual import VirtualDevice
from trainer_rank.devices.virtual_memory import LibraryDemand
from trainer_rank.events import Announcer
from trainer_rank.policies import load_policy
from trainer_rank.release.account import Balance, Reason, fold
from trainer_rank.release.headroom import Headroom
from trainer_rank.release.libraries import BACKWARD, COLLECTIVE, FORWARD

MIB = 1 << 20
DEMAND = 8_388_608
CARD = Card(
    "small",
    "made for this test",
    400 * MIB,
    "made for this test",
    tuple(
        Outside(phase, size * MIB, "here")
        for phase, size in {"context": 4, "first_forward": 6, "first_backward": 14}.items()
    ),
)


class Bench:
    def __init__(self, policy: str, clock: Callable[[], float] | None = None, **options: Any) -> None:
        demands = [LibraryDemand("reduction", "reduction", DEMAND, "nccl")]
        self.device = VirtualDevice(CARD, 0, demands=demands)
        self.events: list[dict[str, Any]] = []
        options = options if clock is None else options | {"clock": clock}
        self.headroom = Headroom(
            self.device, load_policy(policy), Announcer(lambda event: self.events.append(dict(event))), **options
        )

    def fill(self, left: int) -> None:
        size = (self.device.memory_info().free - left) & -(2 * MIB)
        torch.empty(size, dtype=torch.uint8, device=self.device.torch_device)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    def backward(self) -> None:
        with self.headroom.protected(BACKWARD):
            for phase in ("first_matrix_product", "first_forward", "first_backward"):
                self.device.require(phase)

    def reduction(self) -> int:
        with self.headroom.protected(COLLECTIVE, "reduction"):
            free = self.device.memory_info().free
            self.device.require("reduction")
        return free


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(*arguments: Any, **options: Any) -> Bench:
        made.append(Bench(*arguments, **options))
        return made[-1]

    yield make
    for each in made:
        each.device.close()


def test_each_claim_is_free_before_its_call_and_comes_back_with_every_teardown(bench: Callable[..., Bench]) -> None:
    found = bench("forecast")
    found.fill(1 * MIB)
    found.backward()
    for _ in range(3):
        found.fill(1 * MIB)
        assert found.reduction() >= DEMAND
        assert found.device.give_up("reduction") == DEMAND
    headroom = found.of("headroom")
    assert all(event["free"] >= event["due"] for event in headroom)
    claims = [{claim["name"]: claim["size"] for claim in event["claims"]} for event in headroom]
    first = {"first collective": 16 * MIB}
    assert claims[0] == first | {"libraries of forward": 2 * MIB, "libraries of backward": 8 * MIB}
    assert claims[1:] == [first, {"libraries again": DEMAND}, {"libraries again": DEMAND}]
    assert all(claim["source"] for event in headroom for claim in event["claims"])
    assert len(found.of("release")) == 4


def test_without_claims_the_same_calls_fail(bench: Callable[..., Bench]) -> None:
    found = bench("none")
    found.fill(1 * MIB)
    with pytest.raises(RuntimeError, match="CUBLAS_STATUS_ALLOC_FAILED"):
        found.backward()
    with pytest.raises(torch.distributed.DistBackendError, match="Failed to CUDA malloc 8388608 bytes"):
        found.reduction()
    assert found.events == []


def test_a_hand_off_counts_what_the_plan_will_still_take(bench: Callable[..., Bench]) -> None:
    found = bench("forecast")
    found.backward()
    found.reduction()
    found.fill(40 * MIB)
    found.headroom.hand_off(39 * MIB, trains=True)
    assert not found.of("release")
    found.headroom.hand_off(60 * MIB, trains=True)
    assert len(found.of("release")) == 1
    assert found.device.memory_info().free > 60 * MIB


def test_nothing_is_released_when_nothing_is_missing(bench: Callable[..., Bench]) -> None:
    found = bench("forecast")
    found.backward()
    found.reduction()
    for _ in range(200):
        with found.headroom.protected(FORWARD), found.headroom.working():
            torch.empty(30 * MIB, dtype=torch.uint8, device=found.device.torch_device)
        found.headroom.hand_off(0, trains=True)
        found.backward()
    assert not found.of("release")


def test_unconditional_releases_every_time(bench: Callable[..., Bench]) -> None:
    always = bench("unconditional")
    for _ in range(200):
        with always.headroom.protected(FORWARD), always.headroom.working():
            torch.empty(30 * MIB, dtype=torch.uint8, device=always.device.torch_device)
        always.headroom.hand_off(None, trains=True)
    assert sum(event["release_ns"] > 0 for event in always.of("release")) == 200


def test_three_percent_is_strict_and_for_plans_that_train(bench: Callable[..., Bench]) -> None:
    found = bench("trigger-3-percent")
    found.fill(12 * MIB)
    assert found.device.memory_info().free * 100 == found.device.card.capacity * 3
    found.headroom.hand_off(None, trains=True)
    assert not found.of("release")
    kept = torch.empty(1, device=found.device.torch_device)
    found.headroom.hand_off(None, trains=False)
    assert not found.of("release")
    found.fill(10 * MIB)
    found.headroom.hand_off(None, trains=True)
    assert [event["granted"] for event in found.of("release")] == [True]
    assert kept.numel() == 1


def test_the_cap_makes_the_allocator_return_its_cache_before_it_takes_a_claim(bench: Callable[..., Bench]) -> None:
    found = bench("forecast")
    found.fill(300 * MIB)
    found.headroom.cap(reserve=16 * MIB)
    torch.empty(290 * MIB, dtype=torch.uint8, device=found.device.torch_device)
    assert found.device.memory_info().free >= (16 + 16 + 10) * MIB
    with pytest.raises(torch.OutOfMemoryError, match="allowed"):
        torch.empty(380 * MIB, dtype=torch.uint8, device=found.device.torch_device)
    found.headroom.uncap()
    assert found.device.cap() is None


def test_a_budget_denies_what_costs_too_much_and_the_record_says_so(bench: Callable[..., Bench]) -> None:
    times = iter(range(0, 10_000, 10))
    found = bench("trigger-3-percent", clock=lambda: next(times))
    for _ in range(2):
        found.fill(1 * MIB)
        found.headroom.hand_off(None, trains=True)
    first, second = found.of("release")
    assert (first["granted"], first["reason"]) == (True, Reason.FIRST)
    assert (second["granted"], second["reason"], second["shrunk"]) == (False, Reason.OVER, {})
    assert second["cost_ns"] >= 10


def test_planning_anew_is_charged_to_the_episode_of_its_release(bench: Callable[..., Bench]) -> None:
    now = 0

    def clock() -> int:
        return now

    found = bench("trigger-3-percent", clock=clock)
    for released in (True, False):
        found.fill(1 * MIB)
        with found.headroom.releasing("refused", lambda: True) as done:
            now += 7
        assert done is released
    first, second = found.of("release")
    assert (first["charged_ns"], second["charged_ns"]) == (7, 7)
    with_refill = 7 + first["refill_ns_per_segment"]
    assert (second["cost_ns"], second["dearest_ns"], second["reason"]) == (with_refill, with_refill, Reason.OVER)
    with pytest.raises(RuntimeError), found.headroom.releasing("refused", lambda: True):
        now += 7
        raise RuntimeError
    assert found.of("release")[-1]["charged_ns"] == 7


def test_admission_and_hand_off_share_one_account(bench: Callable[..., Bench]) -> None:
    now = 0
    found = bench("trigger-3-percent", clock=lambda: now)
    found.fill(1 * MIB)
    with found.headroom.releasing("refused", lambda: True) as released:
        now += 7
    found.fill(1 * MIB)
    found.headroom.hand_off(None, trains=True)
    first, second = found.of("release")
    assert (released, first["why"], first["reason"]) == (True, "refused", Reason.FIRST)
    assert (second["why"], second["releases"], second["granted"], second["reason"]) == (
        "hand-off", 1, False, Reason.OVER,
    )  # fmt: skip
    assert second["cost_ns"] >= 7


def test_looking_and_reporting_are_charged_too(bench: Callable[..., Bench]) -> None:
    times = iter(range(0, 10_000))
    found = bench("forecast", clock=lambda: next(times))
    for _ in range(2):
        with found.headroom.protected(FORWARD):
            found.device.require("first_forward")
    spent = found.headroom._account.balance(os.getpid(), need=False).cost
    looks, reads, reports = 2, 4, 2
    assert spent == looks + reads + reports


def test_refill_is_charged_segment_by_segment_up_to_what_was_returned(bench: Callable[..., Bench]) -> None:
    found = bench("unconditional")
    for size in (30, 40):
        torch.empty(size * MIB, dtype=torch.uint8, device=found.device.torch_device)
    found.headroom.hand_off(None, trains=True)
    (event,) = found.of("release")
    kept = [torch.empty(30 * MIB, dtype=torch.uint8, device=found.device.torch_device) for _ in range(3)]
    assert found.headroom._refill.due() == 2 * event["refill_ns_per_segment"]
    assert found.headroom._refill.due() == 0
    assert len(kept) == 3


def test_observing_decides_and_reports_but_releases_nothing(bench: Callable[..., Bench]) -> None:
    found = bench("unconditional")
    found.headroom.observe = True
    found.fill(1 * MIB)
    reserved = found.device.reserved()
    found.headroom.hand_off(None, trains=True)
    (event,) = found.of("release")
    assert (event["granted"], event["observed_only"], event["release_ns"]) == (True, True, 0)
    assert found.device.reserved() == reserved


def test_every_rank_votes_at_a_hand_off_and_any_need_counts(bench: Callable[..., Bench]) -> None:
    votes: list[Balance] = []

    def exchange(mine: Balance) -> Balance:
        votes.append(mine)
        return fold([mine, replace(mine, need=True)])

    found = bench("trigger-3-percent", exchange=exchange)
    torch.empty(30 * MIB, dtype=torch.uint8, device=found.device.torch_device)
    found.headroom.hand_off(None, trains=True)
    assert [vote.need for vote in votes] == [False]
    assert found.of("release")[0]["shrunk"] == {"virtual:0": 30 * MIB}


def test_expandable_segments_forbid_a_release_with_that_reason(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = bench("unconditional")
    found.fill(1 * MIB)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    found.headroom.hand_off(None, trains=True)
    assert found.of("release")[0]["reason"] == Reason.UNSUPPORTED
    assert not found.of("release")[0]["granted"]
