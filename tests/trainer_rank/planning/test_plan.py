from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from trainer_rank.admission.decide import Outcome
from trainer_rank.allocator.trace import load_trace
from trainer_rank.devices.cards import load_card
from trainer_rank.errors import InvalidInputError
from trainer_rank.features import plan_features
from trainer_rank.geometry import Topology
from trainer_rank.planning.assumptions import adapter_parameters, assumptions_for, chosen_assumptions
from trainer_rank.planning.batch import Batch, load_incident, parse_batches
from trainer_rank.planning.choose_tape import Shelf, best_shipped
from trainer_rank.planning.plan import BatchPlan, plan_batch
from trainer_rank.planning.start import start_of
from trainer_rank.planning.target import Target, uncovered_stages
from trainer_rank.policies import load_policy
from trainer_rank.tapes.envelope import Envelope
from trainer_rank.tapes.paths import candidates, find_part
from trainer_rank.tapes.shipped import RECORDINGS, load_shipped, shipped_tapes
from trainer_rank.tapes.tape import Tape

FOUR_LAYERS = "qwen3_6-35b-a3b-4-layers-h200"
EVERYTHING = ("expert-lora", "head", "optimizer", "40-layers", "ragged")
CARD = load_card("h200")
PADDING = {4_096: 32_768, 16_384: 22_273_024, 65_536: 25_795_584}
"""Bytes by which steps of so many rows of two sequences grew more before commit 089158b: the traces of commit 1484b58
against those of today."""


def batch(**keys: Any) -> Batch:
    return parse_batches(json.dumps(keys).encode(), "here")[0]


def plan(what: Batch, *assume: str, capacity: int = CARD.capacity) -> BatchPlan:
    card = replace(CARD, capacity=capacity)
    assumptions = chosen_assumptions(assume, Target(what.context))
    return plan_batch(what, card, Shelf(shipped_tapes()[FOUR_LAYERS]), load_policy("forecast"), assumptions)


def check_rows(made: BatchPlan) -> None:
    """Every request in exactly one subforward, figures that add up, bounds above what is expected."""
    indices = [index for row in made.subforwards for index in row.requests]
    assert sorted(indices) == sorted(shape.index for shape in made.batch.shapes)
    outside = made.card.held_outside("first_backward", made.batch.context > 1)
    for row in made.subforwards:
        assert row.allocated is not None and row.reserved is not None and row.bound is not None
        assert row.allocated <= row.reserved
        assert row.device_used == row.reserved + outside
        assert row.bound[0] >= row.allocated and row.bound[1] >= row.reserved and row.bound[2] >= row.device_used


@pytest.mark.parametrize("name", ["incident-a", "incident-b"])
def test_uncovered_stages_make_an_incident_unknown(name: str) -> None:
    made = plan(load_incident(name))
    assert (made.outcome, made.rung) == (Outcome.UNKNOWN, None)
    assert made.uncovered == EVERYTHING
    assert {row.status for row in made.subforwards} == {"unknown"}
    assert all(stage in made.reason and stage in made.scope for stage in EVERYTHING)
    check_rows(made)


def test_incident_b_is_forecast_by_the_subforwards_of_the_report() -> None:
    made = plan(load_incident("incident-b"))
    assert [(row.group, row.packed_tokens) for row in made.subforwards][:2] == [(0, 400_511), (0, 378_556)]
    assert [row.requests for row in made.subforwards][:2] == [(0, 2, 4, 6, 8), (1, 3, 5, 7, 9)]


@pytest.mark.parametrize("missing", EVERYTHING)
def test_one_stage_left_uncovered_keeps_the_outcome_unknown(missing: str) -> None:
    made = plan(load_incident("incident-b"), *(stage for stage in EVERYTHING if stage != missing))
    assert made.outcome is Outcome.UNKNOWN
    assert made.uncovered == (missing,)


@pytest.mark.parametrize("name", ["incident-a", "incident-b"])
def test_with_every_stage_assumed_a_smaller_plan_is_found(name: str) -> None:
    made = plan(load_incident(name), *EVERYTHING)
    assert (made.outcome, made.rung, made.uncovered) == (Outcome.ADMITTED, "rerun", ())
    assert {each.name for each in made.assumed} == set(EVERYTHING)
    assert made.time_percent == 125
    check_rows(made)
    assert all(row.bound is not None and row.bound[2] <= CARD.capacity for row in made.subforwards)


def test_a_recorded_shape_is_forecast_as_it_was_recorded() -> None:
    """The covered part alone: two equal sequences on two ranks, from the recording's own start."""
    recording = load_trace(RECORDINGS / "h200_cp2_L4_T262144.json.gz")
    (row,) = plan(batch(lengths=[131_072, 131_072], context=2)).subforwards
    assert recording.peak_allocated is not None and row.allocated is not None
    assert abs(row.allocated - recording.peak_allocated) <= recording.peak_allocated // 2000
    assert row.reserved == recording.peak_reserved


def test_an_assumption_adds_and_is_named() -> None:
    bare = plan(batch(lengths=[65_536])).subforwards[0]
    for name in ("expert-lora", "head", "optimizer", "40-layers"):
        made = plan(batch(lengths=[65_536]), name)
        assert name in made.scope.split("; without")[0]
        assert (made.subforwards[0].allocated or 0) > (bare.allocated or 0)


def test_forty_layers_as_assumed_meet_what_was_measured_at_forty_layers() -> None:
    """Measured on an H200 with 4,096 tokens at 40 layers: 67.61 GiB peak allocated, norm weights trained."""
    (row,) = plan(batch(lengths=[2_048, 2_048]), "40-layers").subforwards
    assert row.allocated is not None
    assert abs(row.allocated / 2**30 - 67.61) < 1.0


def test_equal_sequences_need_no_ragged_tape() -> None:
    assert "ragged" not in plan(batch(lengths=[4_096, 4_096])).uncovered
    assert "ragged" in plan(batch(lengths=[4_096, 4_095])).uncovered


def test_a_topology_without_recording_is_unknown_and_has_no_figures() -> None:
    made = plan(batch(lengths=[4_096], context=4), *EVERYTHING)
    assert made.outcome is Outcome.UNKNOWN
    assert made.uncovered == ("4-context-ranks",)
    assert made.subforwards == ()


def test_a_card_smaller_than_the_model_refuses() -> None:
    made = plan(load_incident("incident-b"), capacity=69_321_221_375)
    assert made.outcome is Outcome.REFUSED
    assert "69321221376 B" in made.reason
    made = plan(load_incident("incident-b"), *EVERYTHING, capacity=70_000_000_000)
    assert made.outcome is Outcome.REFUSED
    assert "start alone" in made.reason


def test_a_request_that_no_card_holds_is_refused_with_exact_integers() -> None:
    made = plan(batch(lengths=[4, 2**63 - 1], groups=[[0], [1]]), *EVERYTHING)
    assert made.outcome is Outcome.REFUSED
    assert "request 1" in made.reason and str(2**63 - 1) in made.reason and str((2**63 - 1) * 8) in made.reason


def test_a_request_too_long_to_run_alone_is_refused_with_the_shortfall() -> None:
    made = plan(batch(lengths=[1_000_000]), *EVERYTHING)
    assert (made.outcome, made.rung) == (Outcome.REFUSED, None)
    (decision,) = made.decisions
    assert decision.shortfall is not None and decision.required is not None and decision.available is not None
    assert decision.shortfall == decision.required - decision.available > 0
    assert str(decision.shortfall) in made.reason


def test_more_work_never_needs_less() -> None:
    required = []
    for count in range(1, 9):
        made = plan(batch(lengths=[9_000] * count), *EVERYTHING)
        assert made.outcome is Outcome.ADMITTED
        required.append(made.decisions[0].required or 0)
    assert required == sorted(required)


def test_capacity_decides_between_the_rungs() -> None:
    lengths = [30_000] * 4
    rungs = [plan(batch(lengths=lengths), *EVERYTHING, capacity=size * 10**9).rung for size in (400, 150, 110, 80)]
    assert rungs[0] == "whole" and rungs[-1] is None
    known = [rung for rung in rungs if rung is not None]
    assert known == sorted(known, key=["whole", "split", "rerun"].index)


def test_an_unknown_assumption_lists_those_there_are() -> None:
    with pytest.raises(InvalidInputError, match="choose of expert-lora, head, optimizer, 40-layers, ragged"):
        chosen_assumptions(["everything"], Target(1))
    assert tuple(assumptions_for(Target(1))) == EVERYTHING


def test_rank_one_adapters_are_counted_from_the_geometry() -> None:
    experts = 40 * 256 * (2_048 + 2 * 512 + 512 + 2_048)
    assert adapter_parameters(Target(1)) > experts
    assert adapter_parameters(Target(1, adapter_rank=4)) == 4 * adapter_parameters(Target(1))


def covering(features: dict[str, int], layers: int, stages: tuple[str, ...]) -> Tape:
    """The shipped tape, had its first probe shown these features, layers and stages."""
    tape = load_shipped(FOUR_LAYERS)
    path = tape.parts[0].paths[0]
    probe = replace(path.probes[0], features=features)
    seen = replace(path, stages=tuple((0, stage) for stage in stages), probes=(probe,))
    return replace(tape, parts=(replace(tape.parts[0], layers=layers, paths=(seen,)),))


def test_a_tape_covers_a_stage_when_a_recording_shows_it() -> None:
    everything = {"packed_tokens": 10, "tokens": 10, "sequences": 2, "longest_sequence": 9, "output_rows": 10}
    tape = covering(everything | {"adapter_bytes": 5}, 40, ("forward", "backward", "optimizer"))
    assert uncovered_stages(tape, Target(1), [(3, 4)]) == ()
    assert uncovered_stages(covering(everything, 40, ("optimizer",)), Target(1), [(3, 4)]) == ("expert-lora",)
    assert uncovered_stages(covering({"packed_tokens": 10}, 4, ("step",)), Target(1), [(3, 4)]) == EVERYTHING


def test_incident_a_is_replanned_from_recordings_of_every_stage() -> None:
    """Nothing is assumed: adapters, head and optimizer were recorded, and two recorded periods of layers repeat."""
    made = plan_batch(load_incident("incident-a"), CARD, best_shipped(Target(1)), load_policy("forecast"))
    assert (made.outcome, made.rung, made.uncovered, made.assumed) == (Outcome.ADMITTED, "rerun", (), ())
    assert made.time_percent == 125
    check_rows(made)
    assert len(made.subforwards) > 1
    assert all(row.status == "extrapolated" for row in made.subforwards)
    assert all(row.bound is not None and row.bound[2] <= CARD.capacity for row in made.subforwards)
    (decision,) = made.decisions
    assert decision.required is not None and decision.available is not None
    assert decision.required <= decision.available


def test_a_composed_plan_starts_from_what_was_measured_at_forty_layers() -> None:
    """Measured on an H200 at 40 layers before an optimizer had stepped: 69,820,081,664 B; its states take 12 B each."""
    recorded = shipped_tapes()["qwen3_6-35b-a3b-lora-h200"].start
    assert recorded is not None
    start = start_of(recorded, Target(1), slots=1).snapshot.allocated
    measured = 69_820_081_664 + 12 * adapter_parameters(Target(1))
    assert start == pytest.approx(measured, rel=2e-3)
    assert start_of(recorded, Target(1), slots=2).snapshot.allocated - start == pytest.approx(
        16 * adapter_parameters(Target(1)), abs=2 << 20
    )


def test_the_bytes_of_a_further_layer_are_those_of_the_recordings() -> None:
    shipped = shipped_tapes()["qwen3_6-35b-a3b-lora-h200"]
    assert shipped.start is not None
    four, eight = (
        load_trace(RECORDINGS / f"lora/h200_megatron_cp1_L{layers}_2x2048_device.json.gz").before.allocated
        for layers in (4, 8)
    )
    assert 4 * shipped.start.layer_bytes == eight - four


def test_a_short_batch_of_one_card_fits_whole_and_a_small_card_refuses_it() -> None:
    short = batch(lengths=[512, 2_000, 700])
    shelf, policy = best_shipped(Target(1)), load_policy("forecast")
    made = plan_batch(short, CARD, shelf, policy)
    assert (made.outcome, made.rung, made.time_percent) == (Outcome.ADMITTED, "whole", 100)
    check_rows(made)
    refused = plan_batch(short, replace(CARD, capacity=74 * 10**9), shelf, policy)
    assert (refused.outcome, refused.rung) == (Outcome.REFUSED, None)
    assert refused.subforwards[0].reserved is None and (refused.subforwards[0].allocated or 0) > 70 * 10**9


@pytest.mark.parametrize(
    ("layers", "rows", "peak"),
    [(16, 4_096, 1_845_597_696), (16, 65_536, 26_431_131_648), (40, 4_096, 2_248_250_880), (40, 16_384, 8_237_898_240)],
)
def test_repeated_layers_meet_steps_that_were_run_with_them(layers: int, rows: int, peak: int) -> None:
    """Growth of allocated measured on an H200 at layer counts that no fit has seen (bench/recordings/h200-megatron).

    Those steps padded the weights of grouped adapters, which the recordings do not: taken off is what padding took.
    """
    tape = load_shipped("qwen3_6-35b-a3b-lora-h200")
    geometry = Target(1).geometry.with_layers(layers)
    target = Target(1, geometry)
    features = plan_features([rows // 2] * 2, geometry, Topology(), adapter_bytes=2 * adapter_parameters(target))
    part, _ = find_part(tape, 1, layers)
    assert part is not None
    grown = Envelope(tape, candidates(part, features)[0]).growth(features)
    assert grown is not None
    assert grown.requested == pytest.approx(peak - PADDING[rows], rel=6e-4)
