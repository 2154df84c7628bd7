"""Plots of a run as SVG text: forecast against observed memory per step, and figures against their thresholds.

Everything drawn is read from recorded bytes; a value that cannot be read is left out of the plot and counted in its
caption, never drawn as zero.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from decimal import Decimal, InvalidOperation

import matplotlib as mpl
import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from qualification.figures import Unreadable, read_figure, read_object
from qualification.reporting.lines import CriterionLine

_MIB = 1 << 20
_SERIES = (
    ("forecast", "bound_{}", "bound", {"color": "#b0b7c3", "linestyle": "--"}),
    ("forecast", "peak_{}", "forecast", {"color": "#2f6fb0"}),
    ("observed", "peak_{}", "observed", {"color": "#c4581a", "marker": "o", "linestyle": "none", "markersize": 3}),
)


class Plot(msgspec.Struct, frozen=True):
    """An SVG element and its caption."""

    svg: str
    caption: str


def memory_plot(events: bytes) -> Plot | None:
    """Draw allocated and reserved peaks per step from a run's stamped events; None when no step can be read."""
    steps, unread = _steps(events)
    if not steps:
        return None
    with _style():
        figure = Figure(figsize=(8, 3), layout="constrained")
        for axes, figure_name in zip(figure.subplots(1, 2), ("allocated", "reserved"), strict=True):
            _draw_series(axes, steps, figure_name)
        svg = _svg(figure)
    missing = f"; {unread} values could not be read and are not drawn" if unread else ""
    return Plot(svg, f"Peak memory per step: forecast before the step, its bound, and what was observed{missing}.")


def thresholds_plot(criteria: Iterable[CriterionLine]) -> Plot | None:
    """Draw each measured figure as a share of its threshold; None when no figure has a threshold other than 0."""
    shares = [(one.name, share, one.verdict) for one in criteria if (share := _share(one)) is not None]
    if not shares:
        return None
    colours = {"PASSED": "#3b8f5a", "FAILED": "#b3362b"}
    with _style():
        figure = Figure(figsize=(8, 0.6 + 0.32 * len(shares)), layout="constrained")
        axes = figure.subplots()
        names, values, verdicts = zip(*reversed(shares), strict=True)
        axes.barh(names, values, color=[colours.get(verdict, "#c79a2b") for verdict in verdicts], height=0.6)
        axes.axvline(100, color="#333333", linewidth=1)
        axes.set_xlabel("measured, % of threshold")
        svg = _svg(figure)
    return Plot(svg, "Measured figures against their thresholds (the line); figures whose threshold is 0 are left out.")


def _style() -> AbstractContextManager[None]:
    return mpl.rc_context(
        {
            "font.size": 9,
            "svg.fonttype": "none",
            "svg.hashsalt": "qualify",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "text.parse_math": False,
        }
    )


def _share(criterion: CriterionLine) -> float | None:
    try:
        measured, threshold = Decimal(criterion.measured or ""), Decimal(criterion.threshold or "")
    except InvalidOperation:
        return None
    return float(100 * measured / threshold) if threshold else None


Steps = Mapping[int, Mapping[tuple[str, str], int]]


def _steps(events: bytes) -> tuple[Steps, int]:
    """Return, by step, the byte figures of its forecast and observation, and how many values were unreadable."""
    steps: dict[int, dict[tuple[str, str], int]] = {}
    unread = 0
    for line in events.splitlines():
        outer = read_object(line)
        said = outer.get("event") if isinstance(outer, dict) else None
        if not isinstance(said, dict) or said.get("event") not in ("forecast", "observed"):
            continue
        step = read_figure(said.get("step"))
        for name in ("peak_allocated", "peak_reserved", "bound_allocated", "bound_reserved"):
            value = read_figure(said.get(name)) if name in said else None
            if isinstance(value, int) and isinstance(step, int):
                steps.setdefault(step, {})[said["event"], name] = value
            elif isinstance(value, Unreadable | str):
                unread += 1
    return steps, unread


def _draw_series(axes: Axes, steps: Steps, name: str) -> None:
    for event, field, label, style in _SERIES:
        key = (event, field.format(name))
        points = [(step, values[key] / _MIB) for step, values in sorted(steps.items()) if key in values]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.set_title(f"peak {name}")
    axes.set_xlabel("step")
    axes.set_ylabel("MiB")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize=8)


def _svg(figure: Figure) -> str:
    """Return the figure as an SVG element that looks the same every time and names no time or program."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
