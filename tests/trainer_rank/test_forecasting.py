"""A plan is replayed only where that can change whether it fits, and the answer is that of every replay."""

from __future__ import annotations

import importlib
import random
from dataclasses import replace
from functools import cache
from typing import Any, NoReturn

import pytest
import torch

from tests.trainer_rank.tapes.programs import Step, layered, record, rows, used_before
from trainer_rank import forecasting
from trainer_rank.admission.decide import Coverage, Demand
from trainer_rank.admission.ladder import Plan, Retention
from trainer_rank.allocator.rules import LARGE_SEGMENT, MIB
from trainer_rank.allocator.snapshot import INACTIVE, Snapshot, from_trace
from trainer_rank.devices.protocol import MemoryInfo
from trainer_rank.devices.virtual import VirtualDevice
from trainer_rank.forecasting import Library, PassKey, PlanForecaster, Recorded, Sample
from trainer_rank.models.reference import TINY, build_reference
from trainer_rank.packing import GroupKey, Subforward
from trainer_rank.policies import load_policy
from trainer_rank.rank import TrainerRank
from trainer_rank.requests import Request, RequestShape
from trainer_rank.tapes import fit

GIB = 1024 * MIB
tapes_forecast = importlib.import_module("trainer_rank.tapes.forecast")
KEY = PassKey(0, True, False, Retention.DEVICE)
POLICY = load_policy("forecast")


@cache
def library() -> Library:
    steps = layered(3, [rows(400_000), rows(90_000)], rows(40_960))
    at = next(index for index, step in enumerate(steps) if step.stage == "backward/head")
    steps[at:at] = [Step(stage="caller"), Step("loss", rows(4))]
    tape = fit([record(steps, {"packed_tokens": tokens}) for tokens in (100, 200, 300)])
    return Library({KEY: Recorded(tape, 1, 1)}, lambda *_: KEY, lambda each: {"packed_tokens": each.packed_tokens})


def plan(*lengths: int) -> Plan:
    key = GroupKey("policy", True, False)
    shapes = [RequestShape(index, length, "policy", True) for index, length in enumerate(lengths)]
    return Plan("split", tuple(Subforward(key, (shape,)) for shape in shapes))


def sampled(snapshot: Snapshot) -> Sample:
    return Sample.of(1, MemoryInfo(60 * GIB, 140 * GIB), snapshot)


def untouched() -> Sample:
    def look() -> NoReturn:
        raise AssertionError("the blocks were read although the answer was clear")

    return Sample(1, MemoryInfo(60 * GIB, 140 * GIB), 5 * GIB, 6 * GIB, look)


def forecaster(sample: Sample, room: int | None) -> PlanForecaster:
    return PlanForecaster(library(), POLICY, sample, room)


def test_what_clearly_fits_is_admitted_without_a_look_at_the_blocks() -> None:
    sample = untouched()
    demand = forecaster(sample, 50 * GIB).demand(plan(150, 260))
    assert demand.known and demand.required is not None and demand.required <= 50 * GIB
    assert demand.coverage is Coverage.COVERED and not sample.seen
    assert demand.peak_reserved is None and demand.bound_reserved == sample.reserved + demand.required
    assert "fits even if no block serves another size" in demand.terms[-1].source


def test_what_is_clearly_too_much_is_refused_without_a_look_at_the_blocks() -> None:
    sample = untouched()
    demand = forecaster(sample, 2 * GIB).demand(plan(20_000))
    assert demand.required is not None and demand.required > 2 * GIB
    assert demand.coverage is Coverage.EXTRAPOLATED and demand.bound_reserved is None and not sample.seen
    assert "already too much" in demand.terms[-1].source


@pytest.mark.parametrize("counts_cached", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_whatever_the_room_the_answer_is_that_of_every_replay(seed: int, counts_cached: bool) -> None:
    draw = random.Random(seed)
    policy = replace(POLICY, counts_cached=counts_cached)
    asked = plan(*(draw.randrange(60, 500) for _ in range(draw.randrange(1, 4))))
    sample = sampled(used_before(draw))
    exact = PlanForecaster(library(), policy, sample).demand(asked)
    assert exact.required is not None
    near = [exact.required + difference for difference in (-1, 0, 1, LARGE_SEGMENT, 2 * LARGE_SEGMENT)]
    for room in (*near, 0, exact.required // 2, *(draw.randrange(4 * exact.required + 1) for _ in range(6))):
        found = PlanForecaster(library(), policy, sample, room).demand(asked)
        assert found.required is not None
        assert (found.required <= room) is (exact.required <= room)
        assert found.coverage is exact.coverage


@pytest.mark.parametrize("exact", [True, False])
def test_a_rank_announces_exact_figures_unless_told_that_limits_are_enough(exact: bool) -> None:
    events: list[dict[str, Any]] = []
    device = VirtualDevice("h200", 0)
    model = build_reference(TINY, device, slots=("policy",), seed=5)
    policy = replace(POLICY, probe_lengths=((4,), (40, 17), (150, 60, 31, 5), (64, 33, 2)))
    rank = TrainerRank(model, policy, on_event=events.append, exact_figures=exact)
    tokens = torch.arange(51) % TINY.vocabulary
    for micro_batch in rank.forward_micro_batches([Request(tokens[:-1], tokens[1:], "policy")]):
        rank.backward(micro_batch, micro_batch.outputs[0].log_probabilities.mean())
    (told,) = (event for event in events if event["event"] == "forecast")
    (seen,) = (event for event in events if event["event"] == "observed")
    assert told["peak_reserved"] == (seen["peak_reserved"] if exact else None)
    assert exact or told["peak_allocated"] <= seen["peak_allocated"]
    assert seen["peak_allocated"] <= told["bound_allocated"]
    assert seen["peak_reserved"] <= told["bound_reserved"]
    assert rank.close()["allocated"] is not None
    device.close()


def test_equal_blocks_are_forecast_once_and_others_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that was kept is the one that a forecast without any memory gives, also where little has changed."""
    asked: list[tuple[Sample, int]] = []
    draw = random.Random(11)
    for _ in range(6):
        snapshot = used_before(draw)
        emptied = [
            each._replace(blocks=tuple(block._replace(requested=0, state=INACTIVE) for block in each.blocks))
            for each in snapshot.segments[:1]
        ]
        for each in (snapshot, Snapshot((*emptied, *snapshot.segments[1:]))):
            asked.extend((sampled(_again(each)), room) for room in (256 * MIB, 320 * MIB))
    plans = [plan(150, 260), plan(300)]
    kept = [forecaster(sample, room).demand(each) for sample, room in asked * 2 for each in plans]
    fresh = []
    for sample, room in asked * 2:
        for remembered in (tapes_forecast._forecast, tapes_forecast.start_of, forecasting._known):
            remembered.cache_clear()
        fresh.extend(forecaster(sampled(_again(sample.snapshot)), room).demand(each) for each in plans)
    assert kept == fresh and len({each.required for each in kept}) > 2

    def refuse(*_: object) -> NoReturn:
        raise AssertionError("replayed although these blocks were forecast before")

    sample, room = asked[-1]
    known = replayed(sample, room)
    monkeypatch.setattr(tapes_forecast, "_replay", refuse)
    assert replayed(sampled(_again(sample.snapshot)), room) == known


def replayed(sample: Sample, room: int) -> Demand:
    return PlanForecaster(library(), POLICY, sample, room, figures=True).demand(plan(150, 260))


def _again(snapshot: Snapshot) -> Snapshot:
    """Equal blocks in new objects."""
    return from_trace(snapshot.to_trace())
