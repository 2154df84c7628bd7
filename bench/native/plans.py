"""Plans of several subforwards, graphs held in host memory, and layer counts that no tape was fitted from.

Forecasts of recorded steps from tapes of single passes, without a GPU. Host-held passes have no shipped tape: theirs is
fitted from the recordings of single host-held passes beside them, of which each is forecast from the others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bench.native.batches import ragged
from bench.native.tables import table
from trainer_rank.admission.ladder import Plan, Retention
from trainer_rank.allocator.trace import Trace, load_trace
from trainer_rank.features import plan_features
from trainer_rank.forecasting import turns
from trainer_rank.geometry import Topology
from trainer_rank.models.megatron import QWEN_36_35B_A3B
from trainer_rank.models.megatron.layout import lay_out
from trainer_rank.packing import GroupKey, Subforward
from trainer_rank.planning.assumptions import adapter_parameters
from trainer_rank.planning.target import Target
from trainer_rank.requests import RequestShape
from trainer_rank.tapes import Forecast, Tape, fit
from trainer_rank.tapes.compose import PlannedPass, Turn
from trainer_rank.tapes.forecast import forecast_plan
from trainer_rank.tapes.shipped import load_shipped

FOLDER = Path(__file__).parent.parent / "recordings" / "plans"
SHAPES: dict[str, list[int]] = {
    "2x2048": [2048] * 2,
    "2x8192": [8192] * 2,
    "2x32768": [32768] * 2,
    "ragged4096": ragged(4_000, 1),
    "ragged8192": ragged(8_000, 2),
    "ragged16384": ragged(16_000, 3),
    "ragged65536": ragged(64_000, 4),
}
"""Packs by name; few sizes of the grid, so that kernels tune seldom; ragged packs leave a filler."""
SHIPPED = {Retention.DEVICE: "qwen3_6-35b-a3b-lora-h200", Retention.RERUN: "qwen3_6-35b-a3b-lora-rerun-h200"}
_NAME = re.compile(r"h200_megatron_cp(?P<ranks>\d+)_L(?P<layers>\d+)_(?P<shape>[^_]+)_(?P<retention>[a-z]+)\.json\.gz")


@dataclass(frozen=True)
class Recorded:
    """A recorded step: its file, layers, shape and retention as its name says, and what was seen."""

    file: Path
    layers: int
    shape: str
    retention: Retention
    trace: Trace

    @property
    def plan(self) -> Plan:
        """What was run."""
        return plan_of(self.shape, self.retention)


def plan_of(shape: str, retention: Retention) -> Plan:
    """The plan of a shape, whose subforwards are joined by ``+``, all in one slot."""
    key, subforwards, index = GroupKey("policy", True, False), [], 0
    for pack in shape.split("+"):
        lengths = SHAPES[pack]
        shapes = tuple(RequestShape(index + n, length, "policy", True) for n, length in enumerate(lengths))
        subforwards.append(Subforward(key, shapes))
        index += len(lengths)
    return Plan(shape, tuple(subforwards), retention)


def whole_step(plan: Plan) -> list[Turn]:
    """The phases of a step of one slot: the plan's, what follows its backwards, and the optimizer."""
    after = [Turn(number, "after") for number in range(len(plan.subforwards))]
    return [*turns(plan), *after, Turn(0, "optimizer")]


def recordings(folder: Path = FOLDER) -> list[Recorded]:
    """Every recording of the folder, by name."""
    found = []
    for path in sorted(folder.glob("*.json.gz")):
        parts = _NAME.fullmatch(path.name)
        assert parts, f"{path.name} is not named as bench.native.tapes names recordings"
        retention = Retention(parts["retention"])
        found.append(Recorded(path, int(parts["layers"]), parts["shape"], retention, load_trace(path)))
    return found


def features_of(each: Subforward, layers: int) -> dict[str, int]:
    """Features of a subforward of the Megatron model with adapters of rank 1, as its kernels see it on one rank."""
    target = Target(1, QWEN_36_35B_A3B.with_layers(layers))
    return plan_features(
        lay_out(each.lengths, 1, 0).lengths,
        target.geometry,
        Topology(),
        output_rows=each.packed_tokens,
        adapter_bytes=2 * adapter_parameters(target),
    )


def tape_for(one: Recorded, others: Sequence[Recorded]) -> tuple[Tape, str]:
    """The tape that forecasts a recording without having seen it, and where it comes from."""
    if one.retention in SHIPPED:
        return _shipped(SHIPPED[one.retention]), "shipped"
    seen = [
        each
        for each in others
        if each.file != one.file and each.retention is one.retention and len(each.plan.subforwards) == 1
    ]
    return fit([each.trace for each in seen]), f"{len(seen)} other passes"


@cache
def _shipped(name: str) -> Tape:
    return load_shipped(name)


def forecast(one: Recorded, tape: Tape) -> Forecast:
    """Forecast a recorded step from the state in which it began."""
    passes = [PlannedPass(tape, features_of(each, one.layers), 1, one.layers) for each in one.plan.subforwards]
    return forecast_plan(passes, whole_step(one.plan), one.trace.before)


def section(found: Sequence[Recorded]) -> str:
    """Every recorded step with its forecast from tapes that have not seen it."""
    rows = [_row(one, *tape_for(one, found)) for one in sorted(found, key=_by_kind)]
    full = sum(one.trace.before.reserved == one.trace.peak_reserved for one in found)
    return "\n\n".join(
        [
            "## Forecasts of whole plans",
            "Steps recorded with adapters, head and optimizer, each forecast by tapes of single passes that have not "
            "seen it: plans of several subforwards (`+`), graphs held in host memory, and layer counts beyond the "
            f"recorded ones, as far as they were recorded. Shipped tapes are of 8 layers. {full} of these {len(found)} "
            "steps began with a cache that already held all that they reserved at their peak: there a reserved peak "
            "without error says that none was forecast to grow, not how exact growth is. The bound is given as how far "
            "it lies above what was observed, allocated and reserved.",
            table(
                [
                    "layers", "subforwards", "graphs kept", "tape", "peak allocated", "error", "peak reserved", "error",
                    "bound", "",
                ],
                rows,
            ),
        ]
    )  # fmt: skip


def _by_kind(one: Recorded) -> tuple[int, str, int, str]:
    return one.layers, one.retention.value, len(one.plan.subforwards), one.shape


def _row(one: Recorded, tape: Tape, source: str) -> list[object]:
    made, trace = forecast(one, tape), one.trace
    assert trace.peak_allocated is not None and trace.peak_reserved is not None
    head = [one.layers, one.shape.replace("+", " + "), one.retention.value, source]
    if made.expected is None or made.bound is None:
        why = made.uncovered[0] if made.uncovered else "unknown"
        return [*head, f"{trace.peak_allocated:,} B", "-", f"{trace.peak_reserved:,} B", "-", why, "unknown"]
    above = made.bound.allocated - trace.peak_allocated, made.bound.reserved - trace.peak_reserved
    return [
        *head,
        f"{trace.peak_allocated:,} B",
        f"{100 * (made.expected.allocated / trace.peak_allocated - 1):+.4f} %",
        f"{trace.peak_reserved:,} B",
        f"{100 * (made.expected.reserved / trace.peak_reserved - 1):+.4f} %",
        " / ".join(f"{each / (1 << 20):+,.1f} MiB" for each in above),
        "holds" if min(above) >= 0 else "broken",
    ]
