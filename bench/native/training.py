"""The page's sections on whole training steps: beside the same step by hand, on ever-new sizes, and repeated."""

from __future__ import annotations

import statistics
from typing import Any

from bench.native.tables import table
from qualification.figures import Unreadable
from qualification.statistics import Measurement, paired_ratio

_SLOW_S = 1.0
"""A step of these batches that takes longer builds or tunes kernels."""


def overhead(recording: dict[str, Any]) -> str:
    """Our step against the same step without TrainerRank."""
    return "\n\n".join(
        [
            "## A step under TrainerRank beside the same step by hand",
            f"{recording['card']}, torch {recording['torch']}; the same batch, model and optimizer, measured in pairs "
            "of alternating order. The interval holds the median of the pairs' ratios with 95 % confidence.",
            table(
                ["layers", "tokens", "pairs", "by hand", "TrainerRank", "ratio", "95 % interval"],
                [_pairs_row(run) for run in recording["runs"]],
            ),
        ]
    )


def _pairs_row(run: dict[str, Any]) -> list[object]:
    order, times = run["order"], run["nanoseconds"]
    found = paired_ratio([Measurement(arm=arm, value=time) for arm, time in zip(order, times, strict=True)])
    assert not isinstance(found, Unreadable), found.reason
    medians = [statistics.median(time for arm, time in zip(order, times, strict=True) if arm == one) for one in "AB"]
    return [
        run["layers"],
        f"{run['tokens']:,}",
        found.pairs,
        *(f"{median / 1e9:.4f} s" for median in medians),
        f"{float(found.median):.4f}",
        f"{float(found.low):.4f} to {float(found.high):.4f}",
    ]


def sizes(recording: dict[str, Any]) -> str:
    """Random ragged batches with and without the grid, with empty and with kept kernel caches."""
    rows = [
        [state, name.replace("-", " "), *_sizes_row(run)]
        for state, runs in recording["runs"].items()
        for name, run in runs.items()
    ]
    return "\n\n".join(
        [
            "## Ever-new packed sizes",
            f"{recording['steps']} random ragged batches of up to {recording['largest']:,} tokens, four layers, each "
            "row in a process of its own. With empty kernel caches both variants ran side by side on one card, so "
            "their steady steps are slower than alone; with kept caches one after the other. No step was begun later "
            f"than {recording['limit_s']:.0f} s after the first. A step of more than {_SLOW_S:.0f} s built or tuned.",
            *(_sizes_compared(state, runs) for state, runs in recording["runs"].items()),
            table(
                [
                    "kernel caches", "packed sizes", "steps done", "all of them", "first step",
                    "later slow steps", "in slow steps", "other steps", "process",
                ],
                rows,
            ),
        ]
    )  # fmt: skip


def _sizes_compared(state: str, runs: dict[str, dict[str, Any]]) -> str:
    """What the grid brought, in one sentence."""
    grid, other = (run["seconds"] for run in runs.values())
    if not grid or not other:
        return f"With {state} nothing can be compared."
    slow = [sum(each for each in seconds if each > _SLOW_S) for seconds in (grid, other)]
    quick = [[each for each in seconds if each <= _SLOW_S] for seconds in (grid, other)]
    text = f"With {state} slow steps took {slow[0]:.1f} s with the grid against {slow[1]:.1f} s"
    if not all(quick):
        return f"{text}; no run came to a steady step."
    medians = [statistics.median(each) for each in quick]
    return f"{text}, steady steps {100 * (medians[0] / medians[1] - 1):+.1f} % in the median."


def _sizes_row(run: dict[str, Any]) -> list[object]:
    seconds = run["seconds"]
    if not seconds:
        return [0, *["-"] * 5, f"ended with {run['exit']}"]
    slow = [each for each in seconds if each > _SLOW_S]
    quick = [each for each in seconds if each <= _SLOW_S]
    return [
        len(seconds),
        f"{sum(seconds):.1f} s",
        f"{seconds[0]:.1f} s",
        sum(each > _SLOW_S for each in seconds[1:]),
        f"{sum(slow):.1f} s",
        f"{statistics.median(quick):.3f} s" if quick else "none",
        f"{run['process_s']:.0f} s",
    ]


def repeats(recordings: list[dict[str, Any]]) -> str:
    """Whether equal passes give equal results, and whether a batch is memorised."""
    first = recordings[0]
    rows = [
        [_choice(each), case, each[case]["outputs"], _differing(each[case]), _worst(each[case])]
        for each in recordings
        for case in ("same model", "built again")
    ]
    losses = [
        f"{_choice(each)}: {each['losses'][0]:.3f} before the first update, {each['losses'][-1]:.3f} before the "
        f"last of {len(each['losses'])}"
        for each in recordings
    ]
    return "\n\n".join(
        [
            "## Repeated passes, and a memorised batch",
            f"{first['card']}, torch {first['torch']}, {first['layers']} layers, sequences of "
            f"{', '.join(map(str, first['lengths']))} tokens, the same seed. One forward and backward is repeated, in "
            "the same model and in one built again; gradients of adapters are compared bit for bit.",
            table(["Transformer Engine may choose", "repeated in", "outputs that differ", "gradients", "worst"], rows),
            f"Updates on one batch, mean negative log-probability. {'; '.join(losses)}.",
        ]
    )


def _choice(recording: dict[str, Any]) -> str:
    allowed = recording["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] != "0"
    return "any kernel" if allowed else "kernels that repeat"


def _differing(found: dict[str, Any]) -> str:
    nearest = next(iter(found["gradients"]), None)
    if nearest is None:
        return f"all {found['of']} equal"
    return f"{len(found['gradients'])} of {found['of']} differ, in backward order first `{nearest}`"


def _worst(found: dict[str, Any]) -> str:
    shares = found["gradients"].values()
    return f"{100 * max(shares):.4f} % of its norm" if shares else "-"
