"""The trainer's own report that it closed, beside what the process table says of its actors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from qualification.execution.capture import Stamped
from qualification.execution.probes.host import Values, describe
from qualification.records import Process

CLOSING, CLOSED = "closing", "close"
"""The events around ``close()``: the first starts the time limit, the second carries the trainer's report."""


def closing(streams: Iterable[Sequence[Stamped]], left: Sequence[Process]) -> tuple[Values, str | None]:
    """Return what the trainers claimed about closing, and why an actor is not absent, if one is not.

    A trainer that was killed before it could report is absent all the same once none of its processes is left; then
    ``closed`` is False. A claim never outweighs a process that is there.
    """
    asked = closed = trainers = 0
    for stream in streams:
        names = [_name(stamped) for stamped in stream]
        trainers += 1
        asked += CLOSING in names
        closed += CLOSED in names
    alive = tuple(describe(process) for process in left)
    values: Values = {"trainers": trainers, "asked_to_close": asked, "closed": closed, "alive": alive}
    return values, f"an actor is still alive: {', '.join(alive)}" if alive else None


def _name(stamped: Stamped) -> str | None:
    if stamped.event is msgspec.UNSET:
        return None
    return str(msgspec.json.decode(stamped.event, type=dict[str, object]).get("event"))
