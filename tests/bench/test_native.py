from pathlib import Path

import pytest

from bench.native import accuracy, adapters, plans, report, training
from bench.native.report import PAGE, page
from bench.native.work import step_operations
from trainer_rank.models.megatron.geometry import QWEN_36_35B_A3B
from trainer_rank.tapes.shipped import RECORDINGS


def test_the_page_follows_from_the_recordings() -> None:
    assert PAGE.read_text() == page(), "run `python -m bench.native` and commit docs/native.md"


def test_pairs_keep_a_forecast_with_its_own_step() -> None:
    forecast = {
        "event": "forecast", "packed_tokens": [3, 4], "peak_allocated": 110, "peak_reserved": 220,
        "bound_allocated": 120, "bound_reserved": 240, "bound_device_used": 340,
    }  # fmt: skip
    observed = {"event": "observed", "peak_allocated": 100, "peak_reserved": 200, "device_used": 300}
    (pair,) = accuracy.pairs([{**forecast, "step": 0}, {**observed, "step": 0}])
    assert pair.tokens == 7
    assert {name: round(accuracy.errors([pair], name)[0], 6) for name in pair.forecast} == {
        "allocated": 10.0,
        "reserved": 10.0,
        "device used": 6.666667,
    }


def test_operations_grow_with_layers_and_with_the_square_of_a_sequence() -> None:
    four, eight = (step_operations(QWEN_36_35B_A3B.with_layers(layers), [1024]) for layers in (4, 8))
    head = step_operations(QWEN_36_35B_A3B.with_layers(4), [1]) * 1024
    assert four < eight < 2 * four
    assert step_operations(QWEN_36_35B_A3B.with_layers(4), [512, 512]) < four
    assert four > head


CARD = {"card": "a card", "torch": "2.11"}


def test_a_recording_that_is_not_there_has_no_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RECORDINGS", tmp_path)
    text = report.page()
    assert text.startswith(report.HEADER)
    assert [line for line in text.splitlines() if line.startswith("## ")] == ["## Not recorded"]
    assert all(what in text for what in (*report.NOT_RECORDED.values(), "whole steps by rank", "16 and 40 layers"))


def test_adapters_are_compared_turn_by_turn() -> None:
    steps = {"rank 1": [1.1, 2.2, 3.3], "rank 16": [1.0, 2.0, 3.3], "frozen base": [1.0, 2.0, 3.0]}
    products = [
        {"product": "FC1", "formula": "as shipped", "rank": rank, "median_us": time}
        for rank, time in ((1, 90.0), (16, 100.0))
    ]
    text = adapters.section({**CARD, "tokens": 7, "steps": steps, "products": products})
    assert "| rank 1 | 2.2000 s | 1.1000 (1.1000 to 1.1000) |" in text
    assert "Rank 1 against rank 16: 1.1000 (1.0500 to 1.1000)." in text
    assert "| FC1 | as shipped | 90 us | 100 us | 0.900 |" in text
    dense = [{**products[0], "product": "dense"}, {**products[0], "product": "dense", "formula": "not padded"}]
    dense[1]["median_us"] = 70.0
    text = adapters.section({**CARD, "tokens": 7, "products": [*products, *dense]})
    assert "| dense | not padded | 70 us | - | - |" in text
    assert "at rank 1 these 1 take 90 us together, and 70 us not padded" in text


def test_overhead_is_the_median_of_pairs_with_its_interval() -> None:
    order = "ABBAABBAABBA"
    times = [1_000_000 if arm == "A" else 1_010_000 for arm in order]
    run = {"layers": 4, "tokens": 16_000, "order": order, "nanoseconds": times}
    text = training.overhead({**CARD, "runs": [run]})
    assert "| 4 | 16,000 | 6 | 0.0010 s | 0.0010 s | 1.0100 | 1.0100 to 1.0100 |" in text
    with pytest.raises(AssertionError, match="at least 5 are needed"):
        training.overhead({**CARD, "runs": [{**run, "order": "ABBA", "nanoseconds": times[:4]}]})


def test_slow_steps_are_told_from_steady_ones_and_a_stopped_run_says_how_far_it_came() -> None:
    done = {"seconds": [90.0, 0.2, 12.0, 0.4], "process_s": 130.0, "exit": 0}
    none = {"seconds": [], "process_s": 3.0, "exit": 1}
    text = training.sizes(
        {"steps": 50, "largest": 8192, "limit_s": 150.0, "runs": {"empty": {"grid": done, "as": none}}}
    )
    assert "| empty | grid | 4 | 102.6 s | 90.0 s | 1 | 102.0 s | 0.300 s | 130 s |" in text
    assert "| empty | as | 0 | - | - | - | - | - | ended with 1 |" in text
    assert "With empty nothing can be compared." in text
    other = {**done, "seconds": [100.0, 0.4, 22.0, 0.8]}
    text = training.sizes(
        {"steps": 4, "largest": 8192, "limit_s": 150.0, "runs": {"kept": {"grid": done, "as": other}}}
    )
    assert (
        "With kept slow steps took 102.0 s with the grid against 122.0 s, steady steps -50.0 % in the median." in text
    )


def test_the_gradient_nearest_to_the_cause_is_named() -> None:
    equal = {"outputs": 0, "gradients": {}, "of": 9}
    differs = {"outputs": 0, "gradients": {"layers.3.a": 0.001, "layers.0.b": 0.02}, "of": 9}
    recording = {
        **CARD, "layers": 4, "lengths": [1], "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1", "losses": [12.5, 11.0],
        "same model": equal, "built again": differs,
    }  # fmt: skip
    text = training.repeats([recording])
    assert "| any kernel | same model | 0 | all 9 equal | - |" in text
    assert "2 of 9 differ, in backward order first `layers.3.a` | 2.0000 % of its norm |" in text
    assert "any kernel: 12.500 before the first update, 11.000 before the last of 2" in text


def test_recorded_steps_are_forecast_by_tapes_that_have_not_seen_them(tmp_path: Path) -> None:
    name = "h200_megatron_cp1_L4_2x2048_{}.json.gz"
    (tmp_path / name.format("device")).symlink_to(RECORDINGS / "lora" / name.format("device"))
    found = plans.recordings(tmp_path)
    assert [(each.layers, each.shape, each.retention.value) for each in found] == [(4, "2x2048", "device")]
    row = plans.section(found).splitlines()[-1]
    assert row.startswith("| 4 | 2x2048 | device | shipped |")
    errors = [float(cell.removesuffix(" %")) for cell in row.split(" | ") if cell.endswith(" %")]
    assert errors == [0, pytest.approx(0, abs=0.1)]
    assert row.endswith("| holds |")


def test_host_held_passes_are_forecast_from_the_others_of_their_kind(tmp_path: Path) -> None:
    recorded = sorted((RECORDINGS / "lora").glob("h200_megatron_cp1_L8_*_device.json.gz"))
    for path in recorded:  # passes of another kind stand in: none was recorded host-held yet
        (tmp_path / path.name.replace("device", "host")).symlink_to(path)
    rows = plans.section(plans.recordings(tmp_path)).splitlines()[-len(recorded) :]
    assert all("| host | 3 other passes |" in row and row.endswith("| holds |") for row in rows)
