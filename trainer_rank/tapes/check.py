"""Compare forecasts with recordings that may not have been part of the fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainer_rank.allocator.replay import replay
from trainer_rank.allocator.trace import Trace
from trainer_rank.errors import TraceError
from trainer_rank.features import recorded_features
from trainer_rank.tapes.forecast import Figures, Forecast, forecast
from trainer_rank.tapes.passes import UNNAMED_STAGE
from trainer_rank.tapes.tape import Tape


@dataclass(frozen=True)
class Comparison:
    """A forecast beside what was observed, both in bytes."""

    tokens: int
    observed: Figures
    forecast: Forecast

    @property
    def allocated_error(self) -> float | None:
        """Return the error of peak allocated in percent of what was observed; positive when forecast too high."""
        expected = self.forecast.expected
        return None if expected is None else _percent(expected.allocated, self.observed.allocated)

    @property
    def reserved_error(self) -> float | None:
        """Return the error of peak reserved in percent of what was observed; positive when forecast too high."""
        expected = self.forecast.expected
        return None if expected is None else _percent(expected.reserved, self.observed.reserved)

    @property
    def bound_holds(self) -> bool | None:
        """Whether both peaks stayed within the bound; None when the forecast is unknown."""
        bound = self.forecast.bound
        if bound is None:
            return None
        return self.observed.allocated <= bound.allocated and self.observed.reserved <= bound.reserved


def compare(tape: Tape, trace: Trace) -> Comparison:
    """Forecast the pass of ``trace`` from its own ``before`` snapshot; its events serve only to know what happened.

    TraceError when the recording is cut or contradicts itself so that its peaks mean nothing.
    """
    features = trace.features or {}
    plan = recorded_features(features)
    allocated, reserved = trace.peak_allocated, trace.peak_reserved
    if allocated is None or reserved is None:
        result = replay(trace)
        if not result.exact or result.partial:
            raise TraceError(f"{trace.source}: states no peaks and cannot be replayed to its end; record it again")
        allocated, reserved = result.peak_allocated, result.peak_reserved
    phases = dict.fromkeys(stage.partition("/")[0] for _, stage in trace.marks)
    made = forecast(
        tape,
        plan,
        trace.before,
        context=features.get("context", 1),
        layers=features.get("layers"),
        stages=[phase for phase in phases if phase != UNNAMED_STAGE],
    )
    if made.expected is not None and trace.memory_info and made.expected.reserved > trace.memory_info[1]:
        note = f"expected reserved of {made.expected.reserved} B exceeds the card's {trace.memory_info[1]} B"
        made = replace(made, notes=(*made.notes, note))
    tokens = features.get("tokens", plan["packed_tokens"])
    return Comparison(tokens, Figures(allocated, reserved, None), made)


def _percent(forecast_bytes: int, observed: int) -> float:
    return 100.0 * (forecast_bytes - observed) / observed if observed else 0.0
