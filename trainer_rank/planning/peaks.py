"""What every forecaster of this package says of a plan's subforwards. Pure."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from trainer_rank.admission.decide import Coverage, Demand
from trainer_rank.admission.ladder import Plan
from trainer_rank.admission.search import Forecaster

SAMPLE = 0
"""The one memory sample that a plan without a device is made from."""
UNKNOWN = "unknown"


class SubforwardPeaks(NamedTuple):
    """Peaks in bytes while one subforward runs; None where no tape gives them. ``bound``: allocated, reserved."""

    allocated: int | None = None
    reserved: int | None = None
    bound: tuple[int, int] | None = None
    status: str = UNKNOWN
    notes: tuple[str, ...] = ()


class PeakForecaster(Forecaster, Protocol):
    """A forecaster that can also describe a plan subforward by subforward."""

    def peaks(self, plan: Plan, chosen: bool) -> list[SubforwardPeaks]:
        """Describe each subforward; graphs of the others are included once the plan was ``chosen``."""


def unknown(stages: tuple[str, ...]) -> Demand:
    """Return the demand of a plan with these uncovered stages."""
    return Demand(SAMPLE, Coverage.UNKNOWN, *(None,) * 6, uncovered=stages)
