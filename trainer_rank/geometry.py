"""Model geometry and parallel topology as plain data. Sizes are counts; nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass

from trainer_rank.errors import InvalidInputError


@dataclass(frozen=True)
class Topology:
    """Parallel sizes (DP, TP, CP, PP, EP); each at least 1."""

    data: int = 1
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "context", "pipeline", "expert"):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"topology size {name} is {getattr(self, name)}; give a size of at least 1")

    @property
    def label(self) -> str:
        """Short name as used in files and tables, for example ``dp1-tp1-cp2-pp1-ep1``."""
        return f"dp{self.data}-tp{self.tensor}-cp{self.context}-pp{self.pipeline}-ep{self.expert}"


@dataclass(frozen=True)
class ModelGeometry:
    """The sizes of a mixture-of-experts transformer that decide what it allocates."""

    name: str
    layers: int
    hidden: int
    vocabulary: int
    query_heads: int
    key_value_heads: int
    head_dimension: int
    experts: int
    experts_per_token: int
    expert_hidden: int
    shared_expert_hidden: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int) and value < (0 if name == "shared_expert_hidden" else 1):
                raise InvalidInputError(f"geometry {self.name}: {name} is {value}; give a positive size")
        if self.experts_per_token > self.experts:
            raise InvalidInputError(
                f"geometry {self.name}: {self.experts_per_token} experts per token of {self.experts}"
            )
