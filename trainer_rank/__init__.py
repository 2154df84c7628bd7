"""Memory admission for large-model training by recorded allocation tapes.

The names below load on first use, so that planning without a GPU never pays for importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer_rank.errors import AdmissionRefused, CheckpointError, TrainerRankError
    from trainer_rank.geometry import ModelGeometry, Topology
    from trainer_rank.rank import TrainerRank
    from trainer_rank.requests import Request

_HOMES = {
    "AdmissionRefused": "trainer_rank.errors",
    "CheckpointError": "trainer_rank.errors",
    "ModelGeometry": "trainer_rank.geometry",
    "Request": "trainer_rank.requests",
    "Topology": "trainer_rank.geometry",
    "TrainerRank": "trainer_rank.rank",
    "TrainerRankError": "trainer_rank.errors",
}

__all__ = [
    "AdmissionRefused",
    "CheckpointError",
    "ModelGeometry",
    "Request",
    "Topology",
    "TrainerRank",
    "TrainerRankError",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - the module's attributes have many types
    if name not in _HOMES:
        raise AttributeError(f"module 'trainer_rank' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
