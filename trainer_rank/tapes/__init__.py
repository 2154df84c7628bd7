"""Allocation tapes: what recorded passes allocate, explained by the plan's features, and forecast from it."""

from trainer_rank.tapes.fit import fit
from trainer_rank.tapes.forecast import Figures, Forecast, Status, forecast
from trainer_rank.tapes.tape import Tape

__all__ = ["Figures", "Forecast", "Status", "Tape", "fit", "forecast"]
