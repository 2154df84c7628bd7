"""Draw what live memory consists of over a recorded pass. Imports matplotlib, so import it only to draw."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase

from trainer_rank.errors import TapeError
from trainer_rank.tapes.anatomy import PRESENT, Anatomy

GIB = 1 << 30
LARGEST_ORIGINS = 9
"""Origins drawn on their own; the others are drawn together."""


def draw(anatomy: Anatomy, title: str, file: Path) -> None:
    """Draw live bytes over the operations of the pass, by origin, with the peak and its composition.

    TapeError when the file cannot be written, or is of a kind that matplotlib does not draw.
    """
    kinds = FigureCanvasBase.get_supported_filetypes()
    if file.suffix.removeprefix(".") not in kinds:
        raise TapeError(f"{file}: no kind of picture; end its name in .{', .'.join(sorted(kinds))}")
    figure, axes = pyplot.subplots(figsize=(12, 6.5))
    names, curves = _layers(anatomy)
    span = range(len(curves[0]))
    axes.stackplot(span, [[value / GIB for value in curve] for curve in curves], labels=names, step="post", linewidth=0)
    total = sum(anatomy.composition.values())
    axes.axvline(anatomy.peak, color="black", linewidth=0.8)
    axes.annotate(
        f"peak {total / GIB:.3f} GiB in {anatomy.stage}",
        (anatomy.peak, total / GIB),
        textcoords="offset points",
        xytext=(6, 4) if anatomy.peak < len(span) / 2 else (-6, 4),
        horizontalalignment="left" if anatomy.peak < len(span) / 2 else "right",
    )
    axes.set_ylim(0, 1.25 * total / GIB or 1)  # the legend's room
    _phases(anatomy, axes)
    axes.set(xlabel="operation of the pass", ylabel="allocated, GiB", title=title, xlim=(0, len(span) - 1))
    axes.legend(loc="upper left", fontsize="small", title="live bytes by the stage that allocated them")
    figure.tight_layout()
    try:
        figure.savefig(file, dpi=120, metadata={"Software": None} if file.suffix == ".png" else None)
    except OSError as error:
        raise TapeError(f"{file}: cannot be written ({error.strerror or error})") from None
    finally:
        pyplot.close(figure)


def _layers(anatomy: Anatomy) -> tuple[list[str], list[list[int]]]:
    """Return names with their bytes at the peak, and curves; small origins are summed into one."""
    order = sorted(anatomy.curves, key=lambda name: (name != PRESENT, -max(anatomy.curves[name])))
    drawn, rest = order[:LARGEST_ORIGINS], order[LARGEST_ORIGINS:]
    curves = [anatomy.curves[name] for name in drawn]
    if rest:
        drawn.append(f"{len(rest)} others")
        curves.append([sum(values) for values in zip(*(anatomy.curves[name] for name in rest), strict=True)])
    return [f"{name}: {curve[anatomy.peak]:,} B at the peak" for name, curve in zip(drawn, curves, strict=True)], curves


def _phases(anatomy: Anatomy, axes: Axes) -> None:
    phases = groupby(enumerate(anatomy.stages, start=1), key=lambda item: item[1].partition("/")[0])
    for name, items in phases:
        first = next(items)[0]
        axes.axvline(first, color="grey", linewidth=0.4, linestyle=":")
        axes.text(first, axes.get_ylim()[1], f" {name}", fontsize="x-small", verticalalignment="top", color="grey")
