"""What the recordings from real cards say, each forecast from the others."""

from __future__ import annotations

import json
from functools import cache

import pytest

from trainer_rank.allocator.trace import Trace, load_trace
from trainer_rank.features import recorded_features
from trainer_rank.tapes import Status, fit
from trainer_rank.tapes.anatomy import PRESENT, anatomy
from trainer_rank.tapes.check import compare
from trainer_rank.tapes.envelope import Envelope
from trainer_rank.tapes.paths import candidates, find_part
from trainer_rank.tapes.shipped import RECORDINGS, fit_shipped, load_shipped, shipped_tapes
from trainer_rank.tapes.storage import document

NAMES = [
    "h200_cp1_L4_T4096", "h200_cp1_L4_T16384", "h200_cp1_L4_T65536", "h200_cp2_L4_T4096", "h200_cp2_L4_T262144"
]  # fmt: skip
SHIPPED = "qwen3_6-35b-a3b-4-layers-h200"


@cache
def recording(name: str) -> Trace:
    return load_trace(RECORDINGS / f"{name}.json.gz")


@pytest.mark.parametrize("unseen", NAMES)
def test_each_recording_is_forecast_from_the_other_four(unseen: str) -> None:
    tape = fit([recording(name) for name in NAMES if name != unseen])
    compared = compare(tape, recording(unseen))
    assert compared.allocated_error is not None and compared.reserved_error is not None
    assert compared.bound_holds
    assert abs(compared.allocated_error) <= 0.01
    if unseen != "h200_cp2_L4_T4096":  # then its topology is known from one recording, 64 times larger
        assert abs(compared.reserved_error) <= 0.05


def test_one_recording_of_each_topology_is_enough_for_the_others_within_a_percent() -> None:
    tape = fit([recording("h200_cp1_L4_T4096"), recording("h200_cp2_L4_T262144")])
    for name in NAMES:
        compared = compare(tape, recording(name))
        assert compared.allocated_error is not None and compared.reserved_error is not None
        assert compared.bound_holds
        assert abs(compared.allocated_error) <= 0.2
        assert abs(compared.reserved_error) <= 1.0


def test_a_topology_that_nobody_recorded_is_unknown() -> None:
    tape = fit([recording("h200_cp1_L4_T4096")])
    compared = compare(tape, recording("h200_cp2_L4_T4096"))
    assert compared.forecast.status is Status.UNKNOWN
    assert compared.bound_holds is None and compared.allocated_error is None
    assert "2 context ranks" in compared.forecast.uncovered[0]


def test_saturation_seen_under_context_parallelism_holds_on_one_card() -> None:
    tape = load_shipped(SHIPPED)
    part, _ = find_part(tape, 1, 4)
    assert part is not None
    features = {"packed_tokens": 262144, "tokens": 262144}
    path = candidates(part, features)[0]
    sizes = [tape.size(k, features) for k in path.allocations]
    assert sizes.count(276_824_064) == 8
    assert sizes.count(150_994_944) == 3


def test_every_explanation_gives_the_recorded_bytes() -> None:
    tape = load_shipped(SHIPPED)
    from trainer_rank.tapes.passes import read_pass

    for name in NAMES:
        recorded = read_pass(recording(name))
        part = tape.part(recorded.context, recorded.layers)
        assert part is not None
        path = next(each for each in part.paths if each.operations == recorded.operations)
        assert tuple(tape.size(k, recorded.features) for k in path.allocations) == recorded.sizes
        assert tuple(tape.size(k, recorded.features) for k in path.ancestors) == recorded.ancestors


def test_the_shipped_tape_is_what_its_recordings_give() -> None:
    for shipped in shipped_tapes().values():
        again = json.dumps(document(fit_shipped(shipped)), sort_keys=True)
        assert again == json.dumps(document(load_shipped(shipped.name)), sort_keys=True)


@pytest.mark.parametrize("name", NAMES)
def test_the_envelope_answers_allocated_without_a_replay(name: str) -> None:
    tape, trace = load_shipped(SHIPPED), recording(name)
    features = recorded_features(trace.features or {})
    part, _ = find_part(tape, (trace.features or {})["context"], 4)
    assert part is not None
    grown = Envelope(tape, candidates(part, features)[0]).growth(features)
    assert grown is not None
    assert trace.before.allocated + grown.requested == pytest.approx(trace.peak_allocated, rel=5e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_composition_of_a_peak_sums_to_it(name: str) -> None:
    tape = load_shipped(SHIPPED)
    path, probe = next(
        (path, probe)
        for part in tape.parts
        for path in part.paths
        for probe in path.probes
        if probe.source == f"{name}.json.gz"
    )
    found = anatomy(tape, path, probe)
    assert sum(found.composition.values()) == recording(name).peak_allocated
    assert 0 < found.composition[PRESENT] <= recording(name).before.allocated
