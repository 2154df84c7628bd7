"""Low-rank adapters of named slots beside frozen weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everyone uses

_ALIGNED_RANK = 8
"""A dense product with fewer inner columns than this is padded to it: cuBLAS has slow kernels alone for unaligned rows.

On an H200 that pays for the widest product and costs more than it saves for narrow ones (docs/native.md, adapters by
rank). What is padded is part of every recorded tape.
"""


@dataclass(frozen=True)
class AdapterSettings:
    """Rank, scale numerator and dropout rate of every adapter; rank 0 means none."""

    rank: int
    alpha: float
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        """Factor of the adapter's output."""
        return self.alpha / self.rank


@dataclass(frozen=True, eq=False)
class Adapters:
    """The adapters of one slot by the name of the weight that they stand beside, a map of I inputs to O outputs.

    ``down`` (R, I) and ``up`` (R, O), each with a leading E where E experts have one each. The rank comes first so that
    rows stay aligned at every rank and grouped products need no padding.
    """

    settings: AdapterSettings
    down: Mapping[str, torch.nn.Parameter]
    up: Mapping[str, torch.nn.Parameter]

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Both sides of every adapter by name, ``down`` sides first."""
        sides = (("down", self.down), ("up", self.up))
        return {f"{name}.{side}": parameter for side, part in sides for name, parameter in part.items()}

    def add(self, name: str, inputs: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        """Return ``outputs`` (..., O) plus the adapter's part of ``inputs`` (..., I)."""
        if name not in self.down:
            return outputs
        down: torch.Tensor = self.down[name]
        up = self.up[name] * self.settings.scale
        if missing := -self.settings.rank % _ALIGNED_RANK:
            down, up = F.pad(down, (0, 0, 0, missing)), F.pad(up, (0, 0, 0, missing))
        return outputs + F.linear(self._dropped(inputs), down) @ up

    def add_grouped(self, name: str, inputs: torch.Tensor, outputs: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """As :meth:`add`, for rows sorted by expert; ``ends`` int32 (E,) are the experts' last rows plus one."""
        if name not in self.down:
            return outputs
        low = F.grouped_mm(self._dropped(inputs), self.down[name].mT, offs=ends)
        return outputs + F.grouped_mm(low, self.up[name] * self.settings.scale, offs=ends)

    def _dropped(self, inputs: torch.Tensor) -> torch.Tensor:
        return F.dropout(inputs, self.settings.dropout) if self.settings.dropout else inputs
