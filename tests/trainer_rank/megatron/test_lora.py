import pytest
import torch

from trainer_rank.errors import InvalidInputError
from trainer_rank.models.megatron.lora import DenseAdapter, GroupedAdapter

EXPERTS, INPUTS, OUTPUTS = 5, 24, 16


def grouped(rank: int, dtype: torch.dtype) -> GroupedAdapter:
    torch.manual_seed(rank)
    adapter = GroupedAdapter(EXPERTS, INPUTS, OUTPUTS, rank, alpha=32.0, like=torch.empty(0, dtype=dtype))
    torch.nn.init.normal_(adapter.up)
    return adapter


def reference(adapter: GroupedAdapter, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    parts = [
        part @ down.T @ up.T * adapter.scale
        for part, down, up in zip(rows.split(counts), adapter.down.double(), adapter.up.double(), strict=True)
    ]
    return torch.cat(parts)


@pytest.mark.parametrize("rank", [1, 2, 8, 16])
@pytest.mark.parametrize("counts", [[3, 0, 7, 1, 2], [0, 0, 0, 0, 9], [4, 4, 4, 4, 4]])
def test_grouped_adapter_agrees_with_a_loop_in_float64(rank: int, counts: list[int]) -> None:
    adapter = grouped(rank, torch.float32)
    rows = torch.randn(sum(counts), INPUTS, requires_grad=True)
    wide = rows.detach().double().requires_grad_()
    gradient = torch.randn(sum(counts), OUTPUTS)
    offsets = torch.tensor(counts).cumsum(0).int()

    adapter(rows, offsets).backward(gradient)
    found = [rows.grad, adapter.down.grad, adapter.up.grad]
    adapter.zero_grad()
    expected_output = reference(adapter, wide, counts)
    expected_output.backward(gradient.double())
    expected = [wide.grad, adapter.down.grad, adapter.up.grad]

    torch.testing.assert_close(adapter(rows, offsets).double(), expected_output, rtol=1e-4, atol=1e-4)
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert other is not None
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-4)


def test_zero_adapters_add_exactly_nothing() -> None:
    adapter = GroupedAdapter(EXPERTS, INPUTS, OUTPUTS, 1, 32.0, like=torch.empty(0, dtype=torch.bfloat16))
    rows = torch.randn(10, INPUTS, dtype=torch.bfloat16)
    addition = adapter(rows, torch.tensor([2, 4, 6, 8, 10], dtype=torch.int32))
    assert torch.count_nonzero(addition) == 0
    dense = DenseAdapter(INPUTS, OUTPUTS, 4, 32.0, like=torch.empty(0))
    assert torch.count_nonzero(dense(torch.randn(3, INPUTS))) == 0


def test_dense_adapter_gradients_in_float64() -> None:
    adapter = DenseAdapter(6, 5, 2, 8.0, like=torch.empty(0, dtype=torch.float64))
    torch.nn.init.normal_(adapter.up)
    values = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(adapter, (values,))
    torch.testing.assert_close(adapter(values), values @ adapter.down.T @ adapter.up.T * 4.0)


def test_a_rank_below_one_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="rank 0"):
        DenseAdapter(4, 4, 0, 1.0, like=torch.empty(0))
