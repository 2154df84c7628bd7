"""Exchange release balances between the ranks of a process group: one collective, then the fold of the account."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from trainer_rank.release.account import Balance, Reason, fold

_REASONS = tuple(Reason)


def exchange(balance: Balance, gather: Callable[[torch.Tensor], list[torch.Tensor]]) -> Balance:
    """Return the folded balance of all ranks, the same on each; every rank must call it.

    ``gather`` returns every rank's tensor, in one all-gather.
    """
    rows = gather(torch.tensor(_row(balance), dtype=torch.float64))
    return fold([_balance(each.tolist()) for each in rows])


def _row(balance: Balance) -> list[float]:
    dearest = math.nan if balance.dearest is None else balance.dearest
    known = 0 if balance.dearest is None else 1
    fault = -1 if balance.fault is None else _REASONS.index(balance.fault)
    return [balance.cost, dearest, known, balance.work, balance.releases, balance.need, fault]


def _balance(row: list[float]) -> Balance:
    cost, dearest, known, work, releases, need, fault = row
    return Balance(
        cost=cost,
        dearest=dearest if known else None,
        work=work,
        releases=int(releases),
        need=bool(need),
        fault=None if fault < 0 else _REASONS[int(fault)],
    )
