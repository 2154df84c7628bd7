"""What a plan will run, stage by stage, and which of these stages a tape covers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer_rank.features import ADAPTER_BYTES, LONGEST_SEQUENCE, OUTPUT_ROWS, SEQUENCES, TOKENS
from trainer_rank.models.megatron.geometry import QWEN_36_35B_A3B, HybridGeometry
from trainer_rank.tapes.paths import find_part
from trainer_rank.tapes.tape import Part, Probe, Tape

EXPERT_LORA, HEAD, OPTIMIZER, RAGGED = "expert-lora", "head", "optimizer", "ragged"


@dataclass(frozen=True)
class Target:
    """The model that is trained: geometry, adapter rank, and context-parallel ranks; frozen base in BF16."""

    context: int
    geometry: HybridGeometry = QWEN_36_35B_A3B
    adapter_rank: int = 1

    @property
    def layers_stage(self) -> str:
        """The name under which the number of layers is covered or not."""
        return f"{self.geometry.layers}-layers"

    @property
    def context_stage(self) -> str:
        """The name under which the number of context-parallel ranks is covered or not."""
        return f"{self.context}-context-ranks"


def recorded_part(tape: Tape, target: Target) -> Part | None:
    """Return the part recorded on as many ranks with the same layers, or else with the most."""
    exact = tape.part(target.context, target.geometry.layers)
    if exact is not None:
        return exact
    same_ranks = [part for part in tape.parts if part.context == target.context]
    return max(same_ranks, key=lambda part: part.layers or 0, default=None)


def covers_layers(tape: Tape, target: Target) -> bool:
    """Tell whether the target's layers were recorded, or recorded layers repeat so that more can be counted."""
    return find_part(tape, target.context, target.geometry.layers)[0] is not None


def uncovered_stages(tape: Tape, target: Target, lengths: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """Return the stages that no recording of ``tape`` covers; ``lengths`` are those of each subforward."""
    part = recorded_part(tape, target)
    if part is None:
        return (target.context_stage, *_all_stages(target))
    return tuple(_missing(tape, part, target, lengths))


def _all_stages(target: Target) -> tuple[str, ...]:
    return EXPERT_LORA, HEAD, OPTIMIZER, target.layers_stage, RAGGED


def _missing(tape: Tape, part: Part, target: Target, lengths: Sequence[Sequence[int]]) -> Iterator[str]:
    probes = [probe for path in part.paths for probe in path.probes]
    if not any(probe.features.get(ADAPTER_BYTES) for probe in probes):
        yield EXPERT_LORA
    if not any(probe.features.get(OUTPUT_ROWS) for probe in probes):
        yield HEAD
    if OPTIMIZER not in tape.covers:
        yield OPTIMIZER
    if not covers_layers(tape, target):
        yield target.layers_stage
    if any(len(set(each)) > 1 for each in lengths) and not any(_ragged(probe) for probe in probes):
        yield RAGGED


def _ragged(probe: Probe) -> bool:
    known = probe.features
    if not {SEQUENCES, LONGEST_SEQUENCE, TOKENS} <= known.keys():
        return False
    return known[SEQUENCES] * known[LONGEST_SEQUENCE] != known[TOKENS]
