"""A checkpoint is whole or refused by name; the optimizer's state survives it bit for bit."""

import json
from pathlib import Path

import pytest
import torch

from trainer_rank import checkpoint
from trainer_rank.errors import CheckpointError
from trainer_rank.optimizer import OptimizerSettings, SlotOptimizer


def _group() -> checkpoint.Group:
    return checkpoint.Group({"slot-policy": {"parameter/a": torch.arange(5.0)}}, {"slots": {"policy": 0}})


def _saved(tmp_path: Path) -> Path:
    path = tmp_path / "nested" / "one"
    checkpoint.save(path, _group())
    return path


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    group = checkpoint.load(path)
    assert torch.equal(group.tensors["slot-policy"]["parameter/a"], torch.arange(5.0))
    assert group.metadata == {"slots": {"policy": 0}}
    assert [entry.name for entry in path.parent.iterdir()] == ["one"], "no draft is left beside it"


def test_an_existing_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    with pytest.raises(CheckpointError, match=r"one exists and is never overwritten; give another name"):
        checkpoint.save(path, _group())
    assert checkpoint.load(path).metadata == {"slots": {"policy": 0}}


def test_equal_groups_have_equal_bytes(tmp_path: Path) -> None:
    assert checkpoint.save(tmp_path / "a", _group()) == checkpoint.save(tmp_path / "b", _group())


def test_a_folder_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        checkpoint.save(tmp_path / "file" / "one", _group())


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def _edit(path: Path, **changes: object) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | changes))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: _flip(path / "slot-policy.safetensors"), r"slot-policy.safetensors differs from its manifest"),
        (lambda path: (path / "slot-policy.safetensors").write_bytes(b"x"), r"slot-policy.safetensors differs"),
        (lambda path: (path / "slot-policy.safetensors").unlink(), r"slot-policy.safetensors cannot be read"),
        (lambda path: (path / "manifest.json").unlink(), "has no readable manifest"),
        (lambda path: (path / "manifest.json").write_text("{"), "its manifest is no JSON"),
        (lambda path: (path / "extra").write_text(""), "extra is not in the manifest"),
        (lambda path: _edit(path, format=2), "not of format 1"),
        (lambda path: _edit(path, files={"../escape": {}}), "lists no files"),
        (lambda path: _edit(path, metadata=None), "lists no files"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path: Path, damage, message: str) -> None:  # noqa: ANN001
    path = _saved(tmp_path)
    damage(path)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(path)


def _slot(seed: int, dtype: torch.dtype = torch.bfloat16) -> tuple[dict[str, torch.nn.Parameter], SlotOptimizer]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (4, 3), "b": (7,)}
    parameters = {
        name: torch.nn.Parameter(torch.randn(*shape, generator=generator).to(dtype)) for name, shape in shapes.items()
    }
    return parameters, SlotOptimizer(parameters, OptimizerSettings())


def _train(parameters: dict[str, torch.nn.Parameter], optimizer: SlotOptimizer, steps: int, start: int = 0) -> None:
    optimizer.prepare_gradients()
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters.values():
            assert parameter.grad is not None
            parameter.grad += torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


def test_state_is_absent_until_the_first_step_and_zeroes_gradients_after() -> None:
    parameters, optimizer = _slot(1)
    assert not optimizer.exists
    assert sorted(optimizer.state()) == ["parameter/a", "parameter/b"]
    _train(parameters, optimizer, 1)
    assert optimizer.exists
    assert optimizer.steps == 1
    assert all(not parameter.grad.any() for parameter in parameters.values() if parameter.grad is not None)
    assert all(value.dtype == torch.float32 for name, value in optimizer.state().items() if name.startswith("master/"))


def test_the_gradient_norm_is_clipped_but_reported_before() -> None:
    parameters, optimizer = _slot(1, torch.float32)
    optimizer.prepare_gradients()
    parameters["a"].grad = torch.full((4, 3), 10.0)
    assert optimizer.step() == pytest.approx(10.0 * 12**0.5)
    moment = optimizer.state()["exp_avg/a"]
    assert moment.norm() == pytest.approx(0.1, rel=1e-3), "a tenth of a gradient of norm one"


def test_continuing_from_a_checkpoint_equals_never_having_stopped(tmp_path: Path) -> None:
    straight, optimizer = _slot(3)
    _train(straight, optimizer, 4)
    stopped, first = _slot(3)
    _train(stopped, first, 2)
    checkpoint.save(tmp_path / "c", checkpoint.Group({"slot": first.state()}, {}))
    resumed, second = _slot(99)
    second.load(checkpoint.load(tmp_path / "c").tensors["slot"], 2)
    _train(resumed, second, 2, start=2)
    for name, value in optimizer.state().items():
        assert torch.equal(value, second.state()[name]), name


def test_a_state_of_another_adapter_is_refused_by_name() -> None:
    _, optimizer = _slot(1)
    with pytest.raises(CheckpointError, match="differ in parameter/a"):
        optimizer.check({"parameter/b": torch.zeros(7)}, 0)
    with pytest.raises(CheckpointError, match=r"parameter/a of shape \(2,\), the adapter \(4, 3\)"):
        optimizer.check({"parameter/a": torch.zeros(2), "parameter/b": torch.zeros(7)}, 0)
