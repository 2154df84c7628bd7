"""The page's section on adapters: products and whole steps by rank."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bench.native.tables import spread, table


def section(recording: dict[str, Any]) -> str:
    """What adapters cost by rank, as far as it was recorded."""
    parts = ["## Adapters by rank", f"{recording['card']}, torch {recording['torch']}, {recording['tokens']:,} tokens."]
    if "steps" in recording:
        parts += _steps(recording["steps"])
    if "products" in recording:
        parts += _products(recording["products"])
    return "\n\n".join(parts)


def _steps(times: dict[str, list[float]]) -> list[str]:
    base = times["frozen base"]
    rows = [
        [name, f"{statistics.median(taken):.4f} s", spread(_ratios(taken, base))]
        for name, taken in sorted(times.items(), key=lambda pair: pair[0] != "frozen base")
    ]
    ratio = spread(_ratios(times["rank 1"], times["rank 16"]))
    return [
        f"Whole steps of four layers, forward and backward; the three take turns {len(base)} times. Ratios are of "
        "steps of one turn: the median, and the quartiles.",
        table(["variant", "step", "against the frozen base"], rows),
        f"Rank 1 against rank 16: {ratio}.",
    ]


def _ratios(times: Sequence[float], base: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(times, base, strict=True)]


def _products(found: Sequence[dict[str, Any]]) -> list[str]:
    ranks = sorted({each["rank"] for each in found})
    taken = {(each["product"], each["formula"], each["rank"]): each["median_us"] for each in found}
    names = dict.fromkeys((product, formula) for product, formula, _ in taken)
    rows = [
        [
            product,
            formula,
            *(_time(taken.get((product, formula, rank))) for rank in ranks),
            _ratio(taken.get((product, formula, ranks[0])), taken.get((product, formula, ranks[-1]))),
        ]
        for product, formula in names
    ]
    return [
        "Forward and backward of one adapted product, medians, every rank and formula in turn; the last column is the "
        f"lowest rank against the highest. Expert products have {8 * 16_384:,} routed rows over 256 experts:",
        table(["product", "formula", *(f"rank {rank}" for rank in ranks), "ratio"], rows),
        _formulas(taken, ranks[0]),
    ]


def _time(taken: float | None) -> str:
    return "-" if taken is None else f"{taken:,.0f} us"


def _ratio(one: float | None, other: float | None) -> str:
    return "-" if one is None or other is None else f"{one / other:.3f}"


def _formulas(taken: dict[tuple[str, str, int], float], lowest: int) -> str:
    """What the formulas are, and what padding dense products brings at the lowest rank."""
    text = (
        "`weights padded` pads both grouped weights to a multiple of eight ranks and scales the small rows instead of "
        "a weight, as was done before commit 089158b; the down side is copied into the layout that it had then. At "
        "ranks 8 and 16 nothing is padded and it takes as much longer: that is not padding's cost."
    )
    dense = [product for product, formula, rank in taken if formula == "not padded" and rank == lowest]
    if not dense:
        return text
    shipped, bare = (sum(taken[each, formula, lowest] for each in dense) for formula in ("as shipped", "not padded"))
    return (
        f"{text} Dense products are shipped padded to a multiple of eight ranks: at rank {lowest} these "
        f"{len(dense)} take {shipped:,.0f} us together, and {bare:,.0f} us not padded."
    )
