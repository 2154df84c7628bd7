"""Log-probabilities of the targets, chunk by chunk, so that the logits of all rows never exist at once.

Every chunk has the same number of rows (the last one overlaps the one before) and works in buffers made once, so that
memory does not depend on the number of chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

CHUNK_ROWS = 1024


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type that sums of ``dtype`` are made in: float32, and float64 for itself."""
    return torch.promote_types(dtype, torch.float32)


def target_log_probabilities(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, mark: Callable[[str], None]
) -> torch.Tensor:
    """Return float32 (N,): the log-probability of ``targets`` (N,) under ``hidden`` (N, H) @ ``weight`` (V, H).T.

    ``weight`` is frozen. Backward computes the logits again; ``mark`` is told when it begins.
    """
    result: torch.Tensor = _Head.apply(hidden, weight, targets, mark)  # type: ignore[no-untyped-call]
    return result


@torch.no_grad()
def top_log_probabilities(hidden: torch.Tensor, weight: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``count`` largest log-probabilities of each row, float32 (N, count), and their token ids, int64."""
    values = torch.empty(hidden.size(0), count, dtype=wide(hidden.dtype), device=hidden.device)
    indices = torch.empty(hidden.size(0), count, dtype=torch.int64, device=hidden.device)
    work = _Work(hidden, weight)
    for rows in work.chunks():
        logits = work.logits(rows)
        torch.topk(logits, count, out=(values[rows], indices[rows]))
        values[rows] -= work.log_sum_exponentials(logits, work.column)
    return values, indices


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        mark: Callable[[str], None],
    ) -> torch.Tensor:
        result = torch.empty(hidden.size(0), dtype=wide(hidden.dtype), device=hidden.device)
        sums = torch.empty(hidden.size(0), 1, dtype=wide(hidden.dtype), device=hidden.device)
        work = _Work(hidden, weight)
        for rows in work.chunks():
            logits = work.logits(rows)
            torch.gather(logits, 1, targets[rows, None], out=work.column)
            torch.sub(work.column, work.log_sum_exponentials(logits, sums[rows]), out=result[rows, None])
        ctx.save_for_backward(hidden, weight, targets, sums)
        ctx.mark = mark
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        hidden, weight, targets, sums = ctx.saved_tensors
        ctx.mark("backward/head/0")
        result = torch.empty_like(hidden)
        work = _Work(hidden, weight)
        for rows in work.chunks():
            logits = work.logits(rows)
            logits.sub_(sums[rows]).exp_().neg_()
            logits.scatter_add_(1, targets[rows, None], work.ones)
            logits.mul_(gradient[rows, None])
            torch.mm(work.rounded(logits), weight, out=result[rows])
        return result, None, None, None


class _Work:
    """The buffers of one pass over the chunks."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor) -> None:
        self._hidden, self._weight = hidden, weight
        self._rows = min(CHUNK_ROWS, hidden.size(0))
        shape = (self._rows, weight.size(0))
        self._product = torch.empty(shape, dtype=hidden.dtype, device=hidden.device)
        exact = hidden.dtype == wide(hidden.dtype)
        self._logits = self._product if exact else torch.empty(shape, dtype=torch.float32, device=hidden.device)
        self.column = torch.empty(self._rows, 1, dtype=self._logits.dtype, device=hidden.device)
        self._largest = torch.empty_like(self.column)
        self.ones = torch.ones_like(self.column)

    def chunks(self) -> Iterator[slice]:
        """Yield slices of equal length that cover all rows; the last may overlap."""
        total = self._hidden.size(0)
        for start in range(0, total, self._rows):
            start = min(start, total - self._rows)
            yield slice(start, start + self._rows)

    def logits(self, rows: slice) -> torch.Tensor:
        """Return the float32 logits of ``rows``; valid until the next call."""
        torch.mm(self._hidden[rows], self._weight.t(), out=self._product)
        return self._product if self._product is self._logits else self._logits.copy_(self._product)

    def log_sum_exponentials(self, logits: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write the log of each row's sum of exponentials to ``out`` (rows, 1) and return it; ``logits`` is spent."""
        torch.amax(logits, 1, keepdim=True, out=self._largest)
        torch.sum(logits.sub_(self._largest).exp_(), 1, keepdim=True, out=out)
        return out.log_().add_(self._largest)

    def rounded(self, logits: torch.Tensor) -> torch.Tensor:
        """Return ``logits`` in the model's type."""
        return logits if self._product is self._logits else self._product.copy_(logits)
