from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.trainer_rank.tapes.programs import Size, Step, layered, mixed, record, rows
from trainer_rank.errors import TapeError
from trainer_rank.tapes import Status, fit, forecast
from trainer_rank.tapes.sections import section_counts, with_count
from trainer_rank.tapes.tape import Path

SIZES = (rows(8192), rows(30000, 4096), lambda f: min(65536 * f["packed_tokens"], 90 << 20))
BOUNDARY = rows(4096)


def path_of(layers: int) -> Path:
    return (
        fit([record(layered(layers, SIZES, BOUNDARY), {"packed_tokens": n}) for n in (256, 512, 4096)])
        .parts[0]
        .paths[0]
    )


@pytest.mark.parametrize("count", [3, 5, 12, 40])
def test_a_path_with_more_layers_is_the_path_recorded_with_them(count: int) -> None:
    stretched, recorded = with_count(path_of(4), "layer", count), path_of(count)
    assert section_counts(stretched) == {"layer": count}
    assert stretched.operations == recorded.operations
    assert stretched.stages == recorded.stages
    assert len(stretched.allocations) == len(recorded.allocations)


def test_forty_layers_are_forecast_exactly_from_four() -> None:
    tape = fit([record(layered(4, SIZES, BOUNDARY), {"packed_tokens": n, "layers": 4}) for n in (256, 512, 4096)])
    target = record(layered(40, SIZES, BOUNDARY), {"packed_tokens": 1000})
    made = forecast(tape, {"packed_tokens": 1000}, target.before, layers=40)
    assert made.status is Status.EXTRAPOLATED
    assert made.expected is not None and made.bound is not None
    assert made.expected[:2] == (target.peak_allocated, target.peak_reserved)
    assert made.bound.allocated >= made.expected.allocated
    assert made.notes == ("40 layers from recordings of 4",)


DELTA, ATTENTION = SIZES, (rows(2048), rows(70000), rows(100, 8), rows(12345))


def hybrid(layers: int) -> list[Sequence[Size]]:
    """Every fourth layer is of another kind."""
    return [ATTENTION if layer % 4 == 3 else DELTA for layer in range(layers)]


@pytest.mark.parametrize("count", [4, 12, 40])
def test_every_fourth_layer_of_another_kind_stays_every_fourth(count: int) -> None:
    probes = [record(mixed(hybrid(8), BOUNDARY), {"packed_tokens": n, "layers": 8}) for n in (256, 512, 4096)]
    target = record(mixed(hybrid(count), BOUNDARY), {"packed_tokens": 3000})
    made = forecast(fit(probes), {"packed_tokens": 3000}, target.before, layers=count)
    assert made.expected is not None
    assert made.expected[:2] == (target.peak_allocated, target.peak_reserved)


@pytest.mark.parametrize(
    ("recorded", "wanted", "text"),
    [
        (4, 8, "of different kinds and do not repeat"),
        (8, 10, "repeats every 4 instances"),
        (8, 0, "it cannot have 0"),
    ],
)
def test_layers_of_several_kinds_are_repeated_only_as_recorded(recorded: int, wanted: int, text: str) -> None:
    probes = [record(mixed(hybrid(recorded), BOUNDARY), {"packed_tokens": n}) for n in (256, 512, 4096)]
    with pytest.raises(TapeError, match=text):
        with_count(fit(probes).parts[0].paths[0], "layer", wanted)


def test_layers_that_are_never_alike_may_not_be_repeated() -> None:
    with pytest.raises(TapeError, match="no two of its 2 instances are alike"):
        with_count(path_of(2), "layer", 3)
    with pytest.raises(TapeError, match="no two of its 4 instances are alike at a distance of 3"):
        with_count(path_of(4), "layer", 1)


def chunked(tokens: int) -> list[Step]:
    """A head that works through its rows in chunks of 1,024, each in a buffer of its own."""
    steps = [Step(stage="forward/body"), Step("hidden", rows(2048))]
    for chunk in range(-(-tokens // 1024)):
        steps += [
            Step(stage=f"forward/head/{chunk}"),
            Step(f"logits {chunk}", rows(0, 50 << 20)),
            Step(f"kept {chunk}", rows(0, 3 << 20)),
            Step(death=f"logits {chunk}"),
        ]
    return [*steps, Step(stage="backward"), Step("gradient", rows(2048)), Step(death="hidden")]


@pytest.mark.parametrize("tokens", [900, 2000, 4096, 9000, 40_000])
def test_chunks_are_as_many_as_the_rows_of_the_plan_need(tokens: int) -> None:
    probes = [record(chunked(n), {"packed_tokens": n}) for n in (500, 3000, 5000)]
    target = record(chunked(tokens), {"packed_tokens": tokens})
    made = forecast(fit(probes), {"packed_tokens": tokens}, target.before)
    assert made.expected is not None
    assert made.expected[:2] == (target.peak_allocated, target.peak_reserved)


def test_chunks_that_no_feature_explains_make_the_forecast_unknown() -> None:
    probes = [record(chunked(chunks), {"packed_tokens": n}) for n, chunks in ((500, 4000), (900, 2000), (1700, 9000))]
    made = forecast(fit(probes), {"packed_tokens": 1000}, probes[0].before)
    assert made.status is Status.UNKNOWN
    assert made.uncovered == ("section head: no feature explains how often it repeats; record probes that tell",)


def unmarked(kinds: Sequence[Sequence[Size]]) -> list[Step]:
    return [step for step in mixed(kinds, BOUNDARY) if step.stage is None]


@pytest.mark.parametrize("count", [3, 7, 40])
def test_layers_are_found_by_their_repetition_where_nobody_marked_them(count: int) -> None:
    probes = [record(unmarked([SIZES] * 4), {"packed_tokens": n, "layers": 4}) for n in (256, 512, 4096)]
    target = record(unmarked([SIZES] * count), {"packed_tokens": 3000})
    tape = fit(probes)
    assert section_counts(tape.parts[0].paths[0]) == {"layer": 4}
    made = forecast(tape, {"packed_tokens": 3000}, target.before, layers=count)
    assert made.expected is not None
    assert made.expected[:2] == (target.peak_allocated, target.peak_reserved)


def test_where_layers_of_one_kind_do_not_repeat_none_is_named() -> None:
    probes = [record(unmarked(hybrid(4)), {"packed_tokens": n, "layers": 4}) for n in (256, 512, 4096)]
    tape = fit(probes)
    assert section_counts(tape.parts[0].paths[0]) == {}
    made = forecast(tape, {"packed_tokens": 300}, probes[0].before, layers=8)
    assert made.status is Status.UNKNOWN
    assert "8 layers, recorded with 4" in made.uncovered[0]
