"""The reference model on two real ranks equals the one on one rank, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name that everyone uses
from torch import distributed

from tests.trainer_rank.models.batches import HOST, gradients, packed
from tests.trainer_rank.models.ranked import as_ranks
from trainer_rank.errors import InvalidInputError
from trainer_rank.geometry import Topology
from trainer_rank.models.context import sum_over_ranks, take_over_first
from trainer_rank.models.reference import TINY, build_reference

LENGTHS = (7, 64, 1, 30, 12)


def _grouped_mm(rows: torch.Tensor, weights: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
    """Multiply expert by expert, since PyTorch's grouped product takes no float64 on the host."""
    parts = torch.tensor_split(rows, offs[:-1].tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


def run(group: distributed.ProcessGroup | None) -> dict[str, Any]:
    """Return outputs and, after a loss of all of them, gradients of one pass."""
    torch.set_default_dtype(torch.float64)
    F.grouped_mm = _grouped_mm
    model = build_reference(TINY, HOST, slots=("policy", "other"), rank=2, dtype=torch.float64, group=group)
    outputs = model.forward(packed(LENGTHS, TINY, HOST.torch_device), slot="policy", gradients=True, hidden=True, top=3)
    assert outputs.hidden is not None and outputs.top is not None
    weights = torch.randn(sum(LENGTHS), TINY.hidden, generator=torch.Generator().manual_seed(3))
    loss = (outputs.log_probabilities * weights[:, 0]).sum() + (outputs.hidden * weights).mean()
    loss.backward()
    found = {"log_probabilities": outputs.log_probabilities.detach(), "hidden": outputs.hidden.detach()}
    return found | {"top": outputs.top, "gradients": gradients(model), "topology": model.topology}


def run_on_ranks() -> dict[str, Any]:
    group = distributed.group.WORLD
    assert group is not None
    found = run(group)
    sum_over_ranks(list(found["gradients"].values()), group)
    first = torch.full((3,), float(group.rank() + 1))
    take_over_first([first], group)
    return found | {"first": first.tolist()}


def run_alone() -> dict[str, Any]:
    return run(None)


def test_outputs_and_summed_gradients_are_those_of_one_rank() -> None:
    (alone,), ranks = as_ranks(run_alone, ranks=1), as_ranks(run_on_ranks)
    for found in ranks:
        assert found["topology"] == Topology(context=2)
        assert found["first"] == [1.0] * 3
        assert found["gradients"].keys() == alone["gradients"].keys()
        pairs = [(found[name], alone[name]) for name in ("log_probabilities", "hidden")]
        pairs += [(found["top"][0], alone["top"][0])]
        pairs += [(found["gradients"][name], alone["gradients"][name]) for name in alone["gradients"]]
        for got, expected in pairs:
            assert got.shape == expected.shape
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
        assert torch.equal(found["top"][1], alone["top"][1])
        assert max(float(each.abs().max()) for each in found["gradients"].values()) > 1e-3
    for name, gradient in ranks[0]["gradients"].items():
        assert torch.equal(gradient, ranks[1]["gradients"][name])


def refused() -> str:
    with pytest.raises(InvalidInputError) as caught:
        build_reference(TINY, HOST, group=distributed.group.WORLD)
    return str(caught.value)


def test_ranks_must_divide_the_heads() -> None:
    assert set(as_ranks(refused, ranks=3)) == {
        "geometry reference-tiny: 3 context-parallel ranks must divide 2 key-value heads"
    }
