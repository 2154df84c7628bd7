from bench.native import accuracy
from bench.native.report import PAGE, page
from bench.native.work import step_operations
from trainer_rank.models.megatron.geometry import QWEN_36_35B_A3B


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
