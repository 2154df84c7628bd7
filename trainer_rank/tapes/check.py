"""Compare forecasts with recordings that may not have been part of the fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from trainer_rank.allocator.replay import ReplayResult, replay
from trainer_rank.allocator.trace import Trace
from trainer_rank.tapes.fit import where
from trainer_rank.tapes.forecast import Figures, Forecast, Status, forecast
from trainer_rank.tapes.passes import UNNAMED_STAGE, stated_features
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

    Unknown where the recording was cut, contradicts itself or ends out of memory, so that its peaks mean nothing.
    """
    features = trace.features or {}
    plan = stated_features(trace)
    result = replay(trace)
    doubt = _doubt(result)
    made = _forecast(tape, trace, plan) if doubt is None else Forecast(Status.UNKNOWN, None, None, uncovered=(doubt,))
    made = replace(made, notes=(*made.notes, *result.notes))
    if made.expected is not None and trace.memory_info and made.expected.reserved > trace.memory_info[1]:
        note = f"expected reserved of {made.expected.reserved} B exceeds the card's {trace.memory_info[1]} B"
        made = replace(made, notes=(*made.notes, note))
    observed = Figures(
        result.peak_allocated if trace.peak_allocated is None else trace.peak_allocated,
        result.peak_reserved if trace.peak_reserved is None else trace.peak_reserved,
        None,
    )
    return Comparison(features.get("tokens", plan["packed_tokens"]), observed, made)


def _forecast(tape: Tape, trace: Trace, plan: Mapping[str, int]) -> Forecast:
    phases = dict.fromkeys(stage.partition("/")[0] for _, stage in trace.marks)
    return forecast(
        tape,
        plan,
        trace.before,
        context=trace.features.get("context", 1),
        layers=trace.features.get("layers"),
        stages=[phase for phase in phases if phase != UNNAMED_STAGE],
    )


def _doubt(result: ReplayResult) -> str | None:
    """Say why nothing can be compared with what a recording states; None when its events lead to its peaks."""
    if result.partial:
        return "the recording ends out of memory, its peaks are lower bounds: record a pass that ends"
    if not result.exact:
        return f"the recording is not what PyTorch's default allocator does, {where(result.divergence)}: record again"
    return None


def _percent(forecast_bytes: int, observed: int) -> float | None:
    return 100.0 * (forecast_bytes - observed) / observed if observed else None
