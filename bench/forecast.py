"""How exact forecasts are on unseen recordings of real cards; ``bench/decisions.py`` says how fast.

Each shipped recording is forecast by a tape fitted from the others, beside a straight line through the peaks of the
nearest two recordings of the same topology, which is what can be done without tapes.
"""

from __future__ import annotations

from trainer_rank.allocator.trace import Trace, load_trace
from trainer_rank.tapes import fit
from trainer_rank.tapes.check import compare
from trainer_rank.tapes.envelope import Envelope
from trainer_rank.tapes.paths import candidates, find_part
from trainer_rank.tapes.shipped import RECORDINGS, load_shipped, shipped_tapes
from trainer_rank.tapes.tape import Tape

TAPE = "qwen3_6-35b-a3b-4-layers-h200"
MEASURED = {(1, 262_144): "87.93", (2, 65_536): "18.33"}
"""Peaks in GiB of runs of the recorded stack whose traces are not shipped: (context ranks, tokens)."""


def main() -> None:
    """Print accuracy on unseen recordings, then beyond what is shipped."""
    traces = [load_trace(path) for path in sorted(RECORDINGS.glob("*.gz"))]
    _accuracy(traces)
    _adapters()
    _beyond(traces)


def _accuracy(traces: list[Trace]) -> None:
    print(f"{'unseen recording':26} {'allocated':>11} {'reserved':>11} {'a line':>11} {'bound':>6} {'slack':>16}")
    for unseen in traces:
        others = [trace for trace in traces if trace is not unseen]
        compared = compare(fit(others), unseen)
        slack = compared.forecast.slack
        assert slack is not None and compared.allocated_error is not None and compared.reserved_error is not None
        line = _line(others, unseen)
        print(
            f"{_name(unseen):26} {compared.allocated_error:+10.4f}% {compared.reserved_error:+10.4f}% "
            f"{'none' if line is None else f'{line:+.2f}%':>11} {'holds' if compared.bound_holds else 'FAILS':>6} "
            f"{slack.allocated / 2**30:6.2f} {slack.reserved / 2**30:6.2f} GiB"
        )


def _adapters() -> None:
    """Print unseen recordings with adapters, head and optimizer: other layer counts, then each shape left out."""
    print(f"\n{'with adapters, head and optimizer':38} {'from':>12} {'allocated':>11} {'reserved':>11} {'bound':>6}")
    for name, shipped in shipped_tapes().items():
        tape = load_shipped(name)
        for file in shipped.unseen:
            _row(load_trace(RECORDINGS / file), tape, "8 layers")
        if shipped.unseen:
            traces = [load_trace(RECORDINGS / file) for file in shipped.recordings]
            for unseen in traces:
                _row(unseen, fit([trace for trace in traces if trace is not unseen]), "other shapes")


def _row(unseen: Trace, tape: Tape, known: str) -> None:
    compared = compare(tape, unseen)
    assert compared.allocated_error is not None and compared.reserved_error is not None
    print(
        f"{_name(unseen).removeprefix('h200_megatron_'):38} {known:>12} {compared.allocated_error:+10.4f}% "
        f"{compared.reserved_error:+10.4f}% {'holds' if compared.bound_holds else 'FAILS':>6}"
    )


def _beyond(traces: list[Trace]) -> None:
    """Print peaks at sizes that are not shipped, from the envelope, on the line of what shipped passes start with."""
    tape = load_shipped(TAPE)
    print(f"\n{'peak allocated beyond the recordings, GiB':52} {'forecast':>8} {'measured':>8}")
    for (context, tokens), measured in MEASURED.items():
        features = {"packed_tokens": tokens // context, "tokens": tokens}
        part, _ = find_part(tape, context, 4)
        assert part is not None
        grown = Envelope(tape, candidates(part, features)[0]).growth(features)
        same = [trace for trace in traces if (trace.features or {})["context"] == context]
        (x, low), (y, high) = sorted((_tokens(trace), trace.before.allocated) for trace in same)[-2:]
        start = low + (high - low) * (tokens - x) // (y - x)
        assert grown is not None
        print(f"{f'{tokens:,} tokens on {context} ranks':52} {(start + grown.requested) / 2**30:8.2f} {measured:>8}")


def _line(others: list[Trace], unseen: Trace) -> float | None:
    """Return the error in percent of the line through the two nearest peaks; None without two of this topology."""
    points = [
        (abs(_tokens(other) - _tokens(unseen)), _tokens(other), other.peak_allocated or 0)
        for other in others
        if (other.features or {})["context"] == (unseen.features or {})["context"]
    ]
    if len(points) < 2:
        return None
    (_, x, low), (_, y, high) = sorted(points)[:2]
    peak = low + (high - low) * (_tokens(unseen) - x) / (y - x)
    return 100 * (peak / (unseen.peak_allocated or 1) - 1)


def _tokens(trace: Trace) -> int:
    return (trace.features or {})["tokens"]


def _name(trace: Trace) -> str:
    return trace.source.rpartition("/")[2].removesuffix(".json.gz")
