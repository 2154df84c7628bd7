"""Forecasts against observations, from the events of TrainerRank."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.native.tables import table


@dataclass(frozen=True)
class Pair:
    """One step: what was forecast before it and what was seen. Bytes; ``kind`` is the routing or empty."""

    kind: str
    tokens: int
    forecast: dict[str, int]
    observed: dict[str, int]
    bound: dict[str, int]


FIGURES = {"allocated": "peak_allocated", "reserved": "peak_reserved"}


def pairs(events: Sequence[dict[str, Any]]) -> list[Pair]:
    """Each observed step with the forecast that came before it, in order."""
    kind, waiting, found = "", {}, []
    for event in events:
        if event["event"] == "routing":
            kind, waiting = event["routing"], {}
        elif event["event"] == "forecast":
            waiting[event["step"]] = event
        elif event["event"] == "observed":
            found.append(_pair(kind, waiting.pop(event["step"]), event))
    return found


def _pair(kind: str, forecast: dict[str, Any], observed: dict[str, Any]) -> Pair:
    used = observed["device_used"]
    outside = forecast["bound_device_used"] - forecast["bound_reserved"]
    return Pair(
        kind,
        sum(forecast["packed_tokens"]),
        {name: forecast[key] for name, key in FIGURES.items()} | {"device used": outside + forecast["peak_reserved"]},
        {name: observed[key] for name, key in FIGURES.items()} | {"device used": used},
        {name: forecast[f"bound_{name}"] for name in FIGURES} | {"device used": forecast["bound_device_used"]},
    )


def errors(found: Sequence[Pair], figure: str) -> list[float]:
    """Signed errors in percent of what was observed; positive is over."""
    return [100 * (each.forecast[figure] / each.observed[figure] - 1) for each in found]


def section(title: str, events: Sequence[dict[str, Any]]) -> str:
    """Errors by figure and kind, bounds broken, retries and failures."""
    found = pairs(events)
    probe = next(event["largest_probe"] for event in events if "largest_probe" in event)
    rows = []
    for kind in [*dict.fromkeys(each.kind for each in found), "all"]:
        chosen = [each for each in found if kind in (each.kind, "all")]
        if kind != "all" or len({each.kind for each in found}) > 1:
            rows.extend(_row(kind or "all", figure, chosen) for figure in chosen[0].forecast)
    observed = [event for event in events if event["event"] == "observed"]
    smallest, largest = min(each.tokens for each in found), max(each.tokens for each in found)
    return "\n\n".join(
        [
            f"## Forecast accuracy: {title[0].lower()}{title[1:]}",
            f"{len(found)} training steps on ragged packs of {smallest:,} to {largest:,} tokens, none of them a probe; "
            f"the largest probe had {probe:,} tokens, so the largest step is {largest / probe:.1f} times that. Each "
            "forecast was written before its forward began. Errors are in percent of the observed peak.",
            table(
                ["", "figure", "steps", "median |error|", "p95", "p99", "max", "worst under", "bound broken"],
                rows,
            ),
            f"Allocator retries: {max(event['allocator_retries'] for event in observed)}. "
            f"Out of memory: {max(event['out_of_memory'] for event in observed)}.",
        ]
    )


def _row(kind: str, figure: str, chosen: Sequence[Pair]) -> list[object]:
    signed = errors(chosen, figure)
    sizes = sorted(map(abs, signed))
    broken = sum(each.observed[figure] > each.bound[figure] for each in chosen)
    at = [sizes[min(len(sizes) - 1, int(share * len(sizes)))] for share in (0.95, 0.99)]
    under = max(0.0, -min(signed))
    shown = [statistics.median(sizes), *at, sizes[-1], under]
    return [kind, figure, len(chosen), *(f"{value:.4f} %" for value in shown), broken]
