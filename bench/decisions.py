"""How long one admission decision takes, and how that grows with layers, requests, subforwards and ranks.

A decision is everything between requests and a chosen plan, once memory was sampled: slot groups, features, paths,
sizes, limits or replays, budget. Every batch is ragged and new, its sizes were never asked before, and every sample of
the allocator is a new one, except where it says that they are not. Tapes are loaded. Times are processor time of this
process, in milliseconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median, quantiles
from time import process_time

from trainer_rank.admission.budget import Budget
from trainer_rank.admission.ladder import LADDER, Retention, Rung
from trainer_rank.admission.planner import Choice, choose
from trainer_rank.allocator.rules import MIB
from trainer_rank.allocator.snapshot import INACTIVE, Snapshot
from trainer_rank.allocator.trace import load_trace
from trainer_rank.devices.protocol import MemoryInfo
from trainer_rank.features import plan_features
from trainer_rank.forecasting import Library, PassKey, PlanForecaster, Recorded, Sample
from trainer_rank.geometry import Topology
from trainer_rank.models.megatron import QWEN_36_35B_A3B
from trainer_rank.models.megatron.layout import lay_out
from trainer_rank.packing import Subforward, Work
from trainer_rank.policies import load_policy
from trainer_rank.requests import RequestShape
from trainer_rank.tapes.envelope import Envelope
from trainer_rank.tapes.forecast import prepare
from trainer_rank.tapes.paths import candidates, find_part
from trainer_rank.tapes.shipped import RECORDINGS, load_shipped
from trainer_rank.tapes.tape import Tape

RECORDED = "qwen3_6-35b-a3b-lora-h200"
START = "lora/h200_megatron_cp1_L8_ragged8192_device.json.gz"
CARD = 150_109_880_320
MEMORY = MemoryInfo(CARD // 2, CARD)
POLICY = load_policy("forecast")
WARM, STEPS, HARD_STEPS = 30, 400, 40


def main() -> None:
    """Print decisions by how clear they are, then how they grow."""
    start = _without_cache(load_trace(RECORDINGS / START).before)
    _envelope()
    print(f"\n{'one decision on a new ragged batch, ms of processor time':64} {'p50':>8} {'p99':>8}")
    for layers in (4, 40):
        bench = _Bench(layers, start)
        _row(f"{layers} layers, clearly fits: not replayed", bench.times(STEPS, lambda _: 10 * CARD))
        _row(f"{layers} layers, clearly too much: not replayed", bench.times(STEPS, lambda _: MIB))
        _row(f"{layers} layers, clearly fits: replayed for its figures", bench.times(HARD_STEPS, None))
        _row(f"{layers} layers, near the limit: replayed to decide", bench.times(HARD_STEPS, bench.near))
        _row(f"{layers} layers, asked before on equal blocks: from memory", bench.again(STEPS))
    _growth(start)


def _envelope() -> None:
    tape = load_shipped(RECORDED)
    part, _ = find_part(tape, 1, 40)
    assert part is not None
    features = part.paths[0].probes[0].features
    envelope = Envelope(tape, candidates(part, features)[0])
    envelope.growth(features)
    many = _once(lambda: [envelope.growth(features) for _ in range(1000)])
    print(f"{'allocated alone, 40 layers, from the envelope':64} {many / 1000:8.4f}")


class _Bench:
    """A rank's tapes of one layer count, and batches that it has never seen."""

    def __init__(self, layers: int, start: Snapshot, rungs: Sequence[Rung] = LADDER[:1], context: int = 1) -> None:
        tape = load_shipped(RECORDED)
        part, _ = find_part(tape, 1, layers)
        assert part is not None
        tape = Tape(tape.explanations, (part,), tape.provenance)
        prepare(tape)
        self._key = PassKey(part.paths[0].probes[0].features["adapter_bytes"], True, False, Retention.DEVICE)
        recorded = {self._key: Recorded(tape, 1, 1)}
        self._library = Library(recorded, lambda *_: self._key, self._features)
        self._topology = Topology(context=context)
        self.rungs = rungs
        self._start = start
        self._totals = start.allocated, start.reserved
        self._draw = random.Random(layers)
        self._samples = 0

    def times(self, steps: int, available: Callable[[list[RequestShape]], int] | None) -> list[float]:
        """Decide on so many batches and return each one's time; None: fits by far, and is replayed for its figures."""
        found = []
        for step in range(WARM + steps):
            batch = self.batch()
            room = 10 * CARD if available is None else available(batch)
            taken = _once(partial(self.decide, batch, room, figures=available is None))
            found += [taken] if step >= WARM else []
        return found

    def again(self, steps: int) -> list[float]:
        """Decide so often on one batch, for its figures, each time from a new sample of equal blocks."""
        batch = self.batch()
        return [_once(partial(self.decide, batch, 10 * CARD, figures=True)) for _ in range(WARM + steps)][WARM:]

    def batch(self, tokens: int | None = None, requests: int | None = None) -> list[RequestShape]:
        """Return requests of random lengths, ``tokens`` or a few less; by default as many and as long as probes had."""
        count, tokens = requests or self._draw.randrange(2, 11), tokens or self._draw.randrange(4096, 16_000)
        tokens -= self._draw.randrange(64)
        weights = [self._draw.random() + 0.1 for _ in range(count)]
        lengths = [max(1, int(tokens * weight / sum(weights))) for weight in weights]
        return [RequestShape(index, length, group="batch") for index, length in enumerate(lengths)]

    def decide(self, batch: list[RequestShape], available: int, *, figures: bool = False) -> Choice:
        """Decide on one batch from a new sample of the device."""
        self._samples += 1
        sample = Sample(self._samples, MEMORY, *self._totals, lambda: Snapshot(self._start.segments))
        budget = Budget(self._samples, available, 10 * CARD)
        forecaster = PlanForecaster(self._library, POLICY, sample, available, figures=figures)
        return choose([tuple(batch)], self.rungs, forecaster, budget, explain=False)

    def near(self, batch: list[RequestShape]) -> int:
        """Return a budget at which nothing but a replay tells: what one finds, and a little more or less."""
        plan = self.decide(batch, 10 * CARD).plan
        assert plan is not None
        sample = Sample.of(0, MEMORY, self._start)
        required = PlanForecaster(self._library, POLICY, sample).demand(plan).required
        assert required is not None
        return max(1, required + self._draw.randrange(-required // 4 - 1, 64 << 20))

    def _features(self, subforward: Subforward) -> dict[str, int]:
        lengths, outputs = lay_out(subforward.lengths, self._topology.context, 0).lengths, subforward.packed_tokens
        topology, adapters = self._topology, self._key.adapter_bytes
        return plan_features(lengths, QWEN_36_35B_A3B, topology, output_rows=outputs, adapter_bytes=adapters)


def _without_cache(snapshot: Snapshot) -> Snapshot:
    used = (each for each in snapshot.segments if any(block.state != INACTIVE for block in each.blocks))
    return Snapshot(tuple(used))


def _growth(start: Snapshot) -> None:
    """Print what one more of each costs, the median of several: by limits, and replayed for exact figures."""
    print(f"\n{'growth, ms of processor time':48} {'limits':>15} {'replayed':>8}")
    for layers in (4, 8, 20, 40):
        bench = _Bench(layers, start)
        _grown(f"{layers} layers", bench, bench.batch)
    bench = _Bench(4, start)
    for requests in (10, 100, 1_000, 10_000):
        _grown(f"{requests:,} requests of a group", bench, partial(bench.batch, 64 * requests, requests))
    for parts in (1, 2, 4, 8):
        _grown(f"{parts} subforwards", bench, partial(bench.batch, 4096 * parts, parts), parts)
    for ranks in (1, 2, 8):
        bench = _Bench(4, start, context=ranks)
        _grown(f"one of {ranks} ranks (each for itself, at once)", bench, partial(bench.batch, 8192 * ranks, 8))


def _grown(name: str, bench: _Bench, batch: Callable[[], list[RequestShape]], parts: int = 1) -> None:
    bench.rungs = (_Cut(parts),)
    limits, replayed = (
        median(_once(partial(bench.decide, batch(), 10 * CARD, figures=figures)) for _ in range(6))
        for figures in (False, True)
    )
    print(f"{name:48} {limits:15.3f} {replayed:8.2f}")


class _Cut:
    """A rung that cuts its only group into so many subforwards: one, or one for each request."""

    name = "cut"
    retention = Retention.DEVICE

    def __init__(self, parts: int) -> None:
        self._parts = parts

    def places(self, work: Work) -> range:
        return range(len(work))[-1:] if self._parts > 1 else range(1)


def _row(name: str, times: list[float]) -> None:
    cuts = quantiles(times, n=100, method="inclusive")
    print(f"{name:64} {cuts[49]:8.3f} {cuts[98]:8.3f}", flush=True)


def _once(work: Callable[[], object]) -> float:
    begun = process_time()
    work()
    return 1000 * (process_time() - begun)
