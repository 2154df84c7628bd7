"""Join the ranks that a launcher such as torchrun started: one group that computes, and one on the host that agrees."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

from torch import distributed
from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from trainer_rank.errors import UnsupportedError

PATIENCE = timedelta(minutes=10)
"""How long a collective waits for a rank that lives but does not come; one that dies is noticed at once."""


@dataclass(frozen=True, eq=False)
class Ranks:
    """This process among its peers. ``group`` carries tensors, ``votes`` (Gloo) decisions; ``store`` is their own."""

    store: Store
    group: ProcessGroup
    votes: ProcessGroup

    def leave(self) -> None:
        """Give up both groups."""
        distributed.destroy_process_group()


def join(count: int, backend: str) -> Ranks:
    """Meet the other ranks of a launcher's environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    ``backend``: ``nccl`` for CUDA devices, the current one being this rank's; ``gloo`` for anything else. Raises
    UnsupportedError when this process is not one of ``count`` ranks.
    """
    started = os.environ.get("WORLD_SIZE", "1")
    if started != str(count):
        raise UnsupportedError(f"{count} ranks are needed and {started} was started; start them with torchrun")
    store, rank, _ = next(rendezvous("env://", timeout=PATIENCE))
    distributed.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=PATIENCE)
    group = distributed.group.WORLD
    assert group is not None
    return Ranks(store, group, distributed.new_group(backend="gloo", timeout=PATIENCE))
