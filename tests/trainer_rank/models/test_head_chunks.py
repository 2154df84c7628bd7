from collections.abc import Callable

import pytest
import torch

from trainer_rank.models import head
from trainer_rank.models.head import target_log_probabilities, top_log_probabilities


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    hidden = torch.randn(37, 12, dtype=dtype, requires_grad=True)
    return hidden, torch.randn(101, 12, dtype=dtype), torch.randint(0, 101, (37,))


@pytest.fixture(name="chunk")
def chunk_fixture(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda rows: monkeypatch.setattr(head, "CHUNK_ROWS", rows)


def probabilities(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return target_log_probabilities(hidden, weight, targets, lambda _: None)


def test_values_and_gradients_equal_those_of_full_logits(chunk: Callable[[int], None]) -> None:
    hidden, weight, targets = inputs(torch.float32)
    outer = torch.randn(37)
    chunk(8)
    found = probabilities(hidden, weight, targets)
    found.backward(outer)
    wide = hidden.detach().double().requires_grad_()
    expected = torch.log_softmax(wide @ weight.double().T, -1).gather(-1, targets[:, None]).squeeze(-1)
    expected.backward(outer.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad.double(), wide.grad, rtol=1e-4, atol=1e-5)


def test_chunk_size_changes_nothing_but_memory(chunk: Callable[[int], None]) -> None:
    hidden, weight, targets = inputs(torch.float32)
    chunk(1000)
    whole = probabilities(hidden, weight, targets)
    for rows in (1, 5, 37):
        chunk(rows)
        torch.testing.assert_close(probabilities(hidden, weight, targets), whole)


def test_no_tensor_of_all_logits_is_ever_made(chunk: Callable[[int], None]) -> None:
    hidden, weight, targets = inputs(torch.float32)
    rows, (vocabulary, width) = 4, weight.shape
    with torch.profiler.profile(record_shapes=True) as profile:
        chunk(rows)
        probabilities(hidden, weight, targets).sum().backward()
    shapes = {tuple(shape) for event in profile.events() for shape in event.input_shapes if len(shape) == 2}
    assert (rows, vocabulary) in shapes
    assert not [shape for shape in shapes if shape[1] == vocabulary and shape[0] not in (rows, width)]


def test_top_log_probabilities(chunk: Callable[[int], None]) -> None:
    hidden, weight, _ = inputs(torch.float32)
    chunk(10)
    values, indices = top_log_probabilities(hidden, weight, 3)
    expected = torch.log_softmax(hidden @ weight.T, -1).topk(3)
    torch.testing.assert_close(values, expected.values)
    assert torch.equal(indices, expected.indices)
