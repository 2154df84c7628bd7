"""How exact and how fast forecasts are: unseen recordings of real cards, and growth with layers, requests and ranks.

Accuracy: each shipped recording is forecast by a tape fitted from the others, beside a straight line through the peaks
of the nearest two recordings of the same topology, which is what can be done without tapes.
Time: every figure is of this machine, the fastest of several runs in processor time of this process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import quantiles
from time import process_time

from trainer_rank.allocator.trace import Trace, load_trace
from trainer_rank.features import plan_features, recorded_features
from trainer_rank.geometry import ModelGeometry, Topology
from trainer_rank.tapes import fit
from trainer_rank.tapes.check import compare
from trainer_rank.tapes.compose import PlannedPass, sequential
from trainer_rank.tapes.envelope import Envelope
from trainer_rank.tapes.forecast import forecast_plan
from trainer_rank.tapes.paths import candidates, find_part
from trainer_rank.tapes.shipped import RECORDINGS, load_shipped, shipped_tapes
from trainer_rank.tapes.tape import Tape

TAPE = "qwen3_6-35b-a3b-4-layers-h200"
MEASURED = {(1, 262_144): "87.93", (2, 65_536): "18.33"}
"""Peaks in GiB of runs of the recorded stack whose traces are not shipped: (context ranks, tokens)."""
GEOMETRY = ModelGeometry("qwen3.6-35b-a3b", 40, 2048, 248_320, 16, 2, 256, 256, 8, 512, 512)


def main() -> None:
    """Print accuracy on unseen recordings, then times and how they grow."""
    traces = [load_trace(path) for path in sorted(RECORDINGS.glob("*.gz"))]
    _accuracy(traces)
    _adapters()
    _beyond(traces)
    _decisions(traces)
    _growth(traces)


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


def _decisions(traces: list[Trace]) -> None:
    tape, trace = load_shipped(TAPE), next(trace for trace in traces if "cp1_L4_T65536" in trace.source)
    print(f"\n{'one decision, ms of processor time':52} {'p50':>8} {'p99':>8}")
    for name, passes in (("4 layers (2,095 operations)", 1), ("as many operations as 40 layers (20,950)", 10)):
        cold = [_once(partial(_ask, tape, trace, passes, 65_536 + 64 * step)) for step in range(25)]
        warm = [_once(partial(_ask, tape, trace, passes, 65_536)) for _ in range(400)]
        print(f"{name + ', new sizes':52} {_spread(cold)}")
        print(f"{name + ', asked before':52} {_spread(warm)}")
    features = recorded_features(trace.features or {})
    part, _ = find_part(tape, 1, 4)
    assert part is not None
    envelope = Envelope(tape, candidates(part, features)[0])
    first = _once(lambda: envelope.growth(features))
    many = _once(lambda: [envelope.growth(features) for _ in range(1000)])
    print(f"{'allocated from the envelope: first, then each':52} {first:8.3f} {many / 1000:8.4f}")
    grown = envelope.growth(features)
    assert grown is not None and trace.peak_allocated is not None
    error = 100 * ((trace.before.allocated + grown.requested) / trace.peak_allocated - 1)
    print(f"{'its error against the recorded peak':52} {error:+8.4f}%")


def _growth(traces: list[Trace]) -> None:
    tape = load_shipped(TAPE)
    print(f"\n{'growth, ms of processor time':52} {'cold':>8}")
    one, two = (next(trace for trace in traces if name in trace.source) for name in ("cp1_L4_T65536", "cp2_L4_T262"))
    for passes in (1, 2, 5, 10, 20):
        cost = min(_once(partial(_ask, tape, one, passes, 65_600 + 64 * (n + 10 * passes))) for n in range(5))
        print(f"{f'{4 * passes} layers':52} {cost:8.2f}")
    for requests in (10, 100, 1_000, 10_000):
        lengths = [64 + index % 7 for index in range(requests)]
        cost = min(_once(partial(plan_features, lengths, GEOMETRY, Topology())) for _ in range(5))
        print(f"{f'features of {requests:,} requests':52} {cost:8.2f}")
    for trace, ranks in ((one, 1), (two, 2)):
        cost = min(_once(partial(_ask, tape, trace, 1, 70_016 + 64 * n)) for n in range(5))
        print(f"{f'one rank of {ranks} (each decides for itself, at once)':52} {cost:8.2f}")


def _ask(tape: Tape, trace: Trace, passes: int, rows: int) -> object:
    context = (trace.features or {})["context"]
    features = {"packed_tokens": rows, "tokens": rows * context}
    planned = [PlannedPass(tape, features, context, 4)] * passes
    return forecast_plan(planned, sequential(passes), trace.before)


def _once(work: Callable[[], object]) -> float:
    begun = process_time()
    work()
    return 1000 * (process_time() - begun)


def _spread(times: list[float]) -> str:
    cuts = quantiles(times, n=100, method="inclusive")
    return f"{cuts[49]:8.3f} {cuts[98]:8.3f}"


def _tokens(trace: Trace) -> int:
    return (trace.features or {})["tokens"]


def _name(trace: Trace) -> str:
    return trace.source.rpartition("/")[2].removesuffix(".json.gz")
