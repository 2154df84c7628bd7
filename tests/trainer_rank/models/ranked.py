"""Run a function as several ranks of a real Gloo group, one process each, for tests of what ranks do together."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing


def as_ranks(function: Callable[..., Any], *arguments: object, ranks: int = 2) -> list[Any]:
    """Return what ``function(*arguments)`` gives on every rank, saved and loaded with torch; it must be importable."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        multiprocessing.spawn(_rank, args=(folder, ranks, function, arguments), nprocs=ranks)
        return [torch.load(folder / str(rank), weights_only=False) for rank in range(ranks)]


def _rank(rank: int, folder: Path, ranks: int, function: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    store = (folder / "store").as_uri()
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    (folder / f"{rank}.joined").touch()
    while len(list(folder.glob("*.joined"))) < ranks:  # one that is done at once would leave while others still join
        time.sleep(0.01)
    torch.save(function(*arguments), folder / str(rank))
    os._exit(0)  # a group whose rank has failed cannot be taken down together
