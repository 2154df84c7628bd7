"""Context parallelism: every rank gets the whole batch, computes its own rows, and returns all results.

Between its own rows a layer needs no other rank. Attention does: there the ranks exchange rows for heads, so that each
of them attends with its own heads over all rows, and exchange them back. Collectives run where the backend of the group
reaches the tensors: on CUDA devices in place, elsewhere through the host, where none waits for a rank that has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import distributed

from trainer_rank.models.layout import Layout
from trainer_rank.models.sharding import local_positions


class Watcher(Protocol):
    """What knows whether another rank has failed."""

    def wait(self, work: distributed.Work) -> None:
        """Wait for a collective, or raise once another rank has failed."""

    def abandon(self, error: BaseException) -> None:
        """Tell all other ranks that this one has left work that they do together."""


_watchers: dict[str, Watcher] = {}


def watch(group: distributed.ProcessGroup, watcher: Watcher) -> None:
    """Let ``watcher`` wait for the collectives of a group on the host from now on."""
    _watchers[group.group_name] = watcher


@contextmanager
def together(group: distributed.ProcessGroup | None) -> Iterator[None]:
    """Do work inside that all ranks of ``group`` do; what this one fails with is told to those that wait for it."""
    try:
        yield
    except BaseException as error:
        if group is not None and group.group_name in _watchers:
            _watchers[group.group_name].abandon(error)
        raise


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a packed batch that this process computes: all of them."""

    layout: Layout

    def local(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this process's part of the caller's ``rows`` (N,), zero where it is padding. Without gradients."""
        padded = rows.new_zeros(self.layout.tokens)
        for start, source, length in self.layout.sources:
            padded[start : start + length] = rows[source : source + length]
        return padded

    def collected(self, rows: torch.Tensor) -> torch.Tensor:
        """Return all ranks' ``rows`` in the caller's order, without padding.

        Every rank must make the same loss of them: in backward each takes its own rows of its own gradient.
        """
        return torch.cat([rows[start : start + length] for start, _, length in self.layout.sources])


@dataclass(frozen=True, eq=False)
class Share(Rows):
    """One rank's share of a batch of M rows, N when padded; n = N / ranks of these are its own. Indices are int64.

    ``order`` (N,): for every padded row its place among all ranks' rows in rank order; ``places``: the inverse.
    ``returned`` (M,): that place for each of the caller's rows; ``asked`` (n,): the caller's row of each own one, M for
    padding.
    """

    group: distributed.ProcessGroup
    order: torch.Tensor
    places: torch.Tensor
    returned: torch.Tensor
    asked: torch.Tensor

    @property
    def own(self) -> torch.Tensor:
        """The padded rows that this rank holds, int64 (n,)."""
        return self.places.view(self.group.size(), -1)[self.group.rank()]

    def local(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's part (n,) of the caller's ``rows``, zero where it is padding. Without gradients."""
        padded = super().local(rows)
        return torch.cat([padded[start:end] for start, end in self.layout.ranges])

    def collected(self, rows: torch.Tensor) -> torch.Tensor:
        """As on one rank; a fixed number of allocations, whatever the number of sequences."""
        result: torch.Tensor = _GatherRows.apply(rows, self)  # type: ignore[no-untyped-call]
        return result

    def to_heads(self, rows: torch.Tensor) -> torch.Tensor:
        """Exchange this rank's rows of all heads, (n, heads, D), for all rows of its heads, (N, heads / ranks, D)."""
        result: torch.Tensor = _Exchange.apply(rows, self, _to_heads, _to_rows)  # type: ignore[no-untyped-call]
        return result

    def to_rows(self, heads: torch.Tensor) -> torch.Tensor:
        """Exchange all rows of this rank's heads for its own rows of all heads; the inverse of :meth:`to_heads`."""
        result: torch.Tensor = _Exchange.apply(heads, self, _to_rows, _to_heads)  # type: ignore[no-untyped-call]
        return result


_Way = Callable[[torch.Tensor, Share], torch.Tensor]


def share_of(layout: Layout, group: distributed.ProcessGroup, device: torch.device) -> Share:
    """Return the share of this process in a batch that was laid out for the ranks of ``group``."""
    ranks = group.size()
    held = [local_positions(layout.lengths, ranks, rank) for rank in range(ranks)]
    places = torch.cat([torch.arange(*each) for ranges in held for each in ranges])
    order = torch.empty_like(places)
    order[places] = torch.arange(layout.tokens)
    real = torch.cat([torch.arange(start, start + length) for start, _, length in layout.sources])
    asked = torch.full_like(places, len(real))
    asked[real] = torch.arange(len(real))
    own = places.view(ranks, -1)[group.rank()]
    indices = (order, places, order[real], asked[own])
    return Share(layout, group, *(each.to(device, non_blocking=True) for each in indices))


def by_rank(heads: Sequence[torch.Tensor], ranks: int) -> torch.Tensor:
    """Join tensors (n, heads, D) along their heads so that each rank's part of all of them stands together."""
    rows, _, dimension = heads[0].shape
    return torch.cat([each.reshape(rows, ranks, -1, dimension) for each in heads], 2).flatten(1, 2)


def sum_over_ranks(tensors: Sequence[torch.Tensor], group: distributed.ProcessGroup) -> None:
    """Replace each tensor by its sum over the ranks, the same bits on each of them."""
    _in_place(tensors, group, lambda here: distributed.all_reduce(here, group=group, async_op=True))


def take_over_first(tensors: Sequence[torch.Tensor], group: distributed.ProcessGroup) -> None:
    """Replace each tensor by that of the group's first rank."""
    _in_place(tensors, group, lambda here: distributed.broadcast(here, group=group, group_src=0, async_op=True))


@torch.no_grad()
def _in_place(
    tensors: Sequence[torch.Tensor],
    group: distributed.ProcessGroup,
    begin: Callable[[torch.Tensor], distributed.Work | None],
) -> None:
    for tensor in tensors:
        here = _reachable(tensor)
        _finish(begin(here), here, group)
        if here is not tensor:
            tensor.copy_(here)


def gather_equal(tensor: torch.Tensor, group: distributed.ProcessGroup) -> list[torch.Tensor]:
    """Return every rank's tensor of this shape, in rank order, where the group's backend reaches them."""
    here = _reachable(tensor).contiguous()
    parts = [torch.empty_like(here) for _ in range(group.size())]
    _finish(distributed.all_gather(parts, here, group=group, async_op=True), here, group)
    return parts


def _reachable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.device.type == "cuda" else tensor.cpu()


def _finish(work: distributed.Work | None, here: torch.Tensor, group: distributed.ProcessGroup) -> None:
    """Wait for a collective: on a CUDA device its stream does, on the host whoever watches the group."""
    assert work is not None
    watcher = None if here.device.type == "cuda" else _watchers.get(group.group_name)
    if watcher is None:
        work.wait()
    else:
        watcher.wait(work)


def _exchanged(parts: torch.Tensor, group: distributed.ProcessGroup) -> torch.Tensor:
    """Send part r of ``parts`` (ranks, ...) to rank r and return what each rank sent here."""
    here = _reachable(parts)
    received = torch.empty_like(here)
    _finish(distributed.all_to_all_single(received, here, group=group, async_op=True), here, group)
    return received.to(parts.device)


def _to_heads(rows: torch.Tensor, share: Share) -> torch.Tensor:
    count, heads, dimension = rows.shape
    ranks = share.group.size()
    parts = rows.reshape(count, ranks, heads // ranks, dimension).transpose(0, 1).contiguous()
    return _exchanged(parts, share.group).flatten(0, 1)[share.order]


def _to_rows(heads: torch.Tensor, share: Share) -> torch.Tensor:
    parts = heads[share.places].view(share.group.size(), -1, *heads.shape[1:])
    return _exchanged(parts, share.group).transpose(0, 1).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    """An exchange only moves values, so its backward is the exchange back."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, share: Share, there: _Way, back: _Way) -> torch.Tensor:  # noqa: ANN401
        ctx.share, ctx.back = share, back
        return there(values, share)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # noqa: ANN401
        return ctx.back(gradient, ctx.share), None, None, None


class _GatherRows(torch.autograd.Function):
    """All ranks' rows in the caller's order, without padding, whose gradient is zero."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, share: Share) -> torch.Tensor:  # noqa: ANN401
        ctx.share = share
        whole = torch.cat(gather_equal(rows, share.group)).to(rows.device)
        return whole[share.returned]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401
        none = gradient.new_zeros(1, *gradient.shape[1:])
        return torch.cat([gradient, none])[ctx.share.asked], None
