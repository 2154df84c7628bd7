"""What live memory consists of over a recorded pass, by the stage that allocated it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainer_rank.allocator.rules import round_size
from trainer_rank.errors import TapeError
from trainer_rank.tapes.passes import Action
from trainer_rank.tapes.paths import stage_of
from trainer_rank.tapes.tape import Path, Probe, Tape

PRESENT = "present at the start"
REMAINDERS = "block remainders too small to split off"

_NUMBERS = re.compile(r"/\d+")


@dataclass(frozen=True)
class Anatomy:
    """Live bytes by origin after each operation; ``curves[name][i]`` belongs to operation ``i - 1``, 0 to the start.

    Origins are ``PRESENT`` and stages with their instance numbers left out. ``peak`` is where the sum is highest.
    """

    stages: tuple[str, ...]
    curves: dict[str, list[int]]
    peak: int
    recorded_peak: int

    @property
    def composition(self) -> dict[str, int]:
        """Return the bytes of each origin at the peak; they sum to the recorded peak."""
        parts = {name: curve[self.peak] for name, curve in self.curves.items() if curve[self.peak]}
        rest = self.recorded_peak - sum(parts.values())
        return parts | ({REMAINDERS: rest} if rest else {})

    @property
    def stage(self) -> str:
        """Return the stage in which the peak falls."""
        return self.stages[self.peak - 1] if self.peak else "start"


def anatomy(tape: Tape, path: Path, probe: Probe) -> Anatomy:
    """Return what was live over the pass that ``probe`` recorded on ``path``.

    TapeError when the tape explains a size of that recording inexactly, so that no part of the peak would be true.
    """
    origins = [_origin(path, index) for index in range(len(path.operations))]
    born: dict[int, tuple[str, int]] = {}
    live = dict.fromkeys([PRESENT, *dict.fromkeys(origins)], 0)
    live[PRESENT] = probe.allocated
    history = [dict(live)]
    for index, (action, subject, _) in enumerate(path.operations):
        if action is Action.ALLOCATE:
            size = _block(tape, path.allocations[subject], probe)
            born[subject] = (origins[index], size)
            live[origins[index]] += size
        elif action in (Action.FREE, Action.REQUEST_FREE):
            if subject < 0:
                born[subject] = (PRESENT, _block(tape, path.ancestors[~subject], probe))
            name, size = born[subject]
            live[name] -= size
        history.append(dict(live))
    totals = [sum(each.values()) for each in history]
    peak = max(range(len(totals)), key=totals.__getitem__)
    return Anatomy(
        tuple(stage_of(path, index) for index in range(len(path.operations))),
        {name: [each[name] for each in history] for name in live},
        peak,
        probe.peak_allocated,
    )


def _origin(path: Path, index: int) -> str:
    return _NUMBERS.sub("", stage_of(path, index))


def _block(tape: Tape, explanation: int, probe: Probe) -> int:
    size = tape.size(explanation, probe.features)
    if size is None:
        raise TapeError(f"{probe.source}: an allocation has no size at its own features; fit the tape again")
    return round_size(size)
