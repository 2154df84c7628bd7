"""What the recorders for GPU hosts do, with the reference model on the virtual device or the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.native import grid, learning, lora, pairs, plans, steps, tapes, training
from bench.native.plans import Recorded, plan_of
from qualification.statistics import interleaved
from trainer_rank.admission.ladder import Retention
from trainer_rank.devices.steady import record_steady
from trainer_rank.devices.virtual import VirtualDevice
from trainer_rank.execution import in_phases
from trainer_rank.models.reference import TINY, ReferenceModel, build_reference
from trainer_rank.optimizer import OptimizerSettings, SlotOptimizer
from trainer_rank.policies import load_policy
from trainer_rank.rank import TrainerRank
from trainer_rank.tapes import fit
from trainer_rank.tapes.compose import PlannedPass
from trainer_rank.tapes.forecast import forecast_plan


@pytest.fixture
def model() -> Iterator[ReferenceModel]:
    device = VirtualDevice("h200")
    yield build_reference(TINY, device, slots=("policy", "adversary"), rank=1)
    device.close()


@pytest.fixture
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"a": [64, 64], "b": [90, 30, 41], "c": [256, 200], "d": [150, 20, 77]}
    monkeypatch.setattr(plans, "SHAPES", sizes)


def recorded(model: ReferenceModel, shape: str, retention: Retention) -> tuple[Recorded, list[dict[str, int]]]:
    step = tapes.Step(model, shape, retention)
    optimizer = SlotOptimizer(model.adapter_parameters("policy"), OptimizerSettings())
    optimizer.prepare_gradients()
    with model.device.activate():
        trace = record_steady(model.device, lambda recording: step.run(optimizer, recording)).trace
    features = [tapes.Step(model, pack, retention).features() for pack in shape.split("+")]
    marks = in_phases(trace.marks)
    whole = replace(trace, marks=marks, features=step.features())
    return Recorded(Path(shape), TINY.layers, shape, retention, whole), features


@pytest.mark.usefixtures("small_shapes")
@pytest.mark.parametrize("retention", list(Retention))
def test_plans_of_several_subforwards_are_forecast_from_single_passes(
    model: ReferenceModel, retention: Retention
) -> None:
    tape = fit([recorded(model, shape, retention)[0].trace for shape in ("a", "b", "c")])
    one, features = recorded(model, "d+a", retention)
    passes = [PlannedPass(tape, each, 1, TINY.layers) for each in features]
    made = forecast_plan(passes, plans.whole_step(one.plan), one.trace.before)
    assert made.expected is not None and made.bound is not None
    assert one.trace.peak_allocated is not None and one.trace.peak_reserved is not None
    assert abs(made.expected.allocated / one.trace.peak_allocated - 1) < 0.005
    assert abs(made.expected.reserved / one.trace.peak_reserved - 1) < 0.02
    assert one.trace.peak_allocated <= made.bound.allocated and one.trace.peak_reserved <= made.bound.reserved


def test_a_joined_shape_is_one_plan_over_consecutive_requests() -> None:
    plan = plan_of("2x2048+ragged4096", Retention.HOST)
    assert plan.packed_tokens == (4096, 4000)
    assert [index for each in plan.indices for index in each] == list(range(2 + len(plans.SHAPES["ragged4096"])))
    assert plan.retention is Retention.HOST


def test_the_step_by_hand_does_the_same_as_ours(model: ReferenceModel) -> None:
    slots = model.slots
    for name, parameter in model.adapter_parameters(slots[1]).items():
        with torch.no_grad():
            parameter.copy_(model.adapter_parameters(slots[0])[name])
    batch = steps.requests(model, [40, 25, 60], 3)
    pairs.PlainStep(model, batch, slots[1])()
    (loss,) = steps.our_step(TrainerRank(model, load_policy("none")), batch)
    assert loss.isfinite()
    for name, parameter in model.adapter_parameters(slots[0]).items():
        assert torch.equal(parameter.cpu(), model.adapter_parameters(slots[1])[name].cpu()), name


def test_pairs_are_recorded_to_the_end_of_a_model_that_two_close(
    model: ReferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def built(_device: object, _layers: int) -> Iterator[ReferenceModel]:
        yield model
        model.close()

    def timed(work: Callable[[], object]) -> float:
        work()
        return 0.5

    for name, stand_in in (
        ("built", built),
        ("timed", timed),
        ("TOKENS", 300),
        ("PROBES", ((64, 64), (90, 30, 41), (128,))),
    ):
        monkeypatch.setattr(pairs, name, stand_in)
    found = pairs.pairs(model.device, 4)
    assert found["nanoseconds"] == [500_000_000] * len(pairs.ORDER)
    assert found["tokens"] == 300
    assert found["forecasts"] == len(pairs.ORDER) // 2 + 2
    assert "1.0000 | 1.0000 to 1.0000" in training.overhead({"card": "a card", "torch": "2", "runs": [found]})


def test_repeats_are_compared_by_output_and_gradient(model: ReferenceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "LENGTHS", [20, 30])
    learning.wake(model)
    first = learning.one_pass(model)
    assert learning.difference(first, learning.one_pass(model)) == {
        "outputs": 0, "gradients": {}, "of": len(first.gradients),
    }  # fmt: skip
    name = "layers.1.experts_in.down"
    with torch.no_grad():
        model.adapter_parameters("policy")[name].mul_(2)
    changed = learning.difference(first, learning.one_pass(model))
    assert changed["outputs"] > 0
    assert changed["gradients"][name] > 0
    assert next(iter(changed["gradients"])).startswith("layers.1.")


def test_a_batch_is_memorised(model: ReferenceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "LENGTHS", [20, 30])
    losses = learning.memorise(model)
    assert len(losses) == learning.UPDATES
    assert losses[-1] < losses[0]


def test_the_other_formulas_of_the_adapters_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "randn", _on_host(torch.randn))
    ends = torch.tensor([3, 3, 10, 16], dtype=torch.int32)
    rows, base = torch.randn(16, 24, dtype=torch.bfloat16), torch.randn(16, 32, dtype=torch.bfloat16)
    for rank in lora.RANKS:
        given = lora.adapters(rank, 24, 32, 4)
        torch.testing.assert_close(
            lora.padded_grouped(given, rows, base, ends), given.add_grouped("map", rows, base, ends), rtol=0.02, atol=1
        )
        dense = lora.adapters(rank, 24, 32)
        torch.testing.assert_close(
            lora.unpadded_dense(dense, rows, base), dense.add("map", rows, base), rtol=0.02, atol=1
        )
        for side in ("down", "up"):
            one_side = lora.dense_with_one_side_padded(side, dense, rows, base)
            torch.testing.assert_close(one_side, dense.add("map", rows, base), rtol=0.02, atol=1)


def _on_host(function):  # noqa: ANN001, ANN202
    return lambda *shape, **named: function(*shape, **{**named, "device": "cpu"})


def test_batches_of_the_grid_experiment_hardly_repeat_a_size() -> None:
    sizes = grid.sizes()
    assert len(sizes) == grid.STEPS
    assert len(set(sizes)) > 45
    assert max(sizes) <= grid.LARGEST and min(sizes) >= grid.LARGEST // 4


def test_the_grid_experiment_starts_from_empty_caches_alone(tmp_path: Path) -> None:
    (tmp_path / "grid" / "triton").mkdir(parents=True)
    with pytest.raises(SystemExit, match="grid is not empty"):
        grid.main(tmp_path / "out.json", tmp_path)


def test_the_pairs_are_in_the_order_that_is_compared() -> None:
    assert interleaved(len(pairs.ORDER) // 2) == pairs.ORDER
