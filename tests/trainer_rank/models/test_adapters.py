import pytest
import torch

from trainer_rank.models.adapters import Adapters, AdapterSettings

EXPERTS, INPUTS, OUTPUTS = 5, 24, 16


def adapters(rank: int, *experts: int, zero: bool = False, dtype: torch.dtype = torch.float32) -> Adapters:
    torch.manual_seed(rank)
    up = torch.zeros if zero else torch.randn
    return Adapters(
        AdapterSettings(rank, alpha=32.0),
        {"map": torch.nn.Parameter(torch.randn(*experts, rank, INPUTS, dtype=dtype))},
        {"map": torch.nn.Parameter(up(*experts, rank, OUTPUTS, dtype=dtype))},
    )


def reference(given: Adapters, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    sides = zip(rows.split(counts), given.down["map"].double().mT, given.up["map"].double(), strict=True)
    return torch.cat([part @ down @ up * given.settings.scale for part, down, up in sides])


@pytest.mark.parametrize("rank", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("counts", [[3, 0, 7, 1, 2], [0, 0, 0, 0, 9], [4, 4, 4, 4, 4]])
def test_grouped_adapter_agrees_with_a_loop_in_float64(rank: int, counts: list[int]) -> None:
    given = adapters(rank, EXPERTS)
    rows = torch.randn(sum(counts), INPUTS, requires_grad=True)
    base = torch.randn(sum(counts), OUTPUTS)
    wide = rows.detach().double().requires_grad_()
    gradient = torch.randn(sum(counts), OUTPUTS)
    found = given.add_grouped("map", rows, base, torch.tensor(counts).cumsum(0).int())
    found.backward(gradient)
    gradients = [rows.grad, *(parameter.grad for parameter in given.parameters().values())]
    for parameter in given.parameters().values():
        parameter.grad = None
    expected = base.double() + reference(given, wide, counts)
    expected.backward(gradient.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)
    for one, other in zip(gradients, [wide.grad, *(p.grad for p in given.parameters().values())], strict=True):
        assert one is not None
        assert other is not None
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_adapters_change_nothing(dtype: torch.dtype) -> None:
    base = torch.randn(10, OUTPUTS, dtype=dtype)
    rows = torch.randn(10, INPUTS, dtype=dtype)
    ends = torch.tensor([2, 4, 6, 8, 10], dtype=torch.int32)
    assert torch.equal(adapters(1, EXPERTS, zero=True, dtype=dtype).add_grouped("map", rows, base, ends), base)
    assert torch.equal(adapters(4, zero=True, dtype=dtype).add("map", rows, base), base)


def test_dense_adapter_gradients_in_float64() -> None:
    given = adapters(2, dtype=torch.float64)
    values = torch.randn(4, INPUTS, dtype=torch.float64, requires_grad=True)
    base = torch.randn(4, OUTPUTS, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda rows: given.add("map", rows, base), (values,))
    expected = base + values @ given.down["map"].mT @ given.up["map"] * 16.0
    torch.testing.assert_close(given.add("map", values, base), expected)
