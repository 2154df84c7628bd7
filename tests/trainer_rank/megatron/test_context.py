"""Gathering rows over two real Gloo processes."""

import tempfile
from pathlib import Path

import torch
from torch import distributed, multiprocessing

from trainer_rank.models.megatron.context import gather_rows


def gather(rank: int, store: str) -> None:
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    rows = torch.arange(6.0).reshape(3, 2).add(10 * rank).requires_grad_()
    gathered = gather_rows(rows, distributed.group.WORLD)
    assert gathered.shape == (6, 2)
    assert torch.equal(gathered[3:], gathered[:3] + 10)
    weights = torch.arange(12.0).reshape(6, 2)
    (gathered * weights).sum().backward()
    assert torch.equal(rows.grad, weights[3 * rank : 3 * rank + 3])
    distributed.destroy_process_group()


def test_rows_come_in_rank_order_and_gradients_return_to_their_rank() -> None:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(gather, args=((Path(folder) / "store").as_uri(),), nprocs=2)
