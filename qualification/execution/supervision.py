"""What is asked of a supervisor, and what it answers. Times are seconds as integers or milliseconds where named so."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from qualification.execution.segments import Segment
from qualification.records import Count, Process, Record


class Limits(Record, frozen=True, kw_only=True):
    """Bounds of one supervised command.

    ``wall_seconds`` and ``silence_seconds`` (no byte on any output or event stream) end it; None is no limit.
    ``terminate_seconds`` is the wait between TERM and KILL; ``kill_seconds`` bounds the sweep after KILL.
    ``log_bytes`` and ``event_bytes`` bound each stream's file; what exceeds them is counted, not kept.
    """

    wall_seconds: Count | None = None
    silence_seconds: Count | None = None
    terminate_seconds: Count = 30
    kill_seconds: Count = 10
    close_seconds: Count = 60
    log_bytes: Count = 64 << 20
    event_bytes: Count = 64 << 20
    event_line_bytes: Count = 1 << 20


class Command(Record, frozen=True, kw_only=True):
    """The one process that a supervisor starts itself."""

    words: tuple[str, ...]
    environment: dict[str, str] = msgspec.field(default_factory=dict)


class Ending(StrEnum):
    """Why a supervised command ended."""

    EXITED = "exited"
    START_FAILED = "start_failed"
    TIMED_OUT = "timed_out"
    SILENT = "silent"
    CLOSE_TIMED_OUT = "close_timed_out"
    LEASE_LOST = "lease_lost"
    CANCELLED = "cancelled"
    CALLER_GONE = "caller_gone"
    SUPERVISOR_LOST = "supervisor_lost"
    PROVIDER_FAILED = "provider_failed"


class Specification(Record, frozen=True, kw_only=True):
    """Everything the supervisor's process needs; written to its folder before it starts.

    With several ``ranks`` the command is torchrun, and each rank reports through named pipes of its own (``streams``).
    ``authority_seconds`` is how long a renewal of the lease carries; None when nothing is leased.
    """

    run: str
    token: str
    folder: str
    command: Command
    limits: Limits
    working_folder: str
    ranks: Count = 1
    events: bool = False
    echo: bool = False
    authority_seconds: Count | None = None

    @property
    def log_name(self) -> str:
        """Return the name of the command's own logs."""
        return command_name(self.ranks)


def command_name(ranks: int) -> str:
    """Return what the one command is called: a single rank is started as it is, several by torchrun."""
    return "rank-0" if ranks == 1 else "torchrun"


class Outcome(Record, frozen=True, kw_only=True):
    """What happened to a supervised command. A negative exit code is the number of the signal that ended it.

    Of several ranks, the exit code is that of the rank which failed first; torchrun ends the others then.
    ``swept`` existed after the command ended, or when a limit ended it, and are gone; ``leftovers`` are not.
    ``segments`` are the shared memory segments that it left, removed by now if they could be.
    """

    ending: Ending
    exit_code: int | None
    swept: tuple[Process, ...]
    leftovers: tuple[Process, ...]
    duration_ms: Count
    sweep_ms: Count
    kill_ms: Count | None
    containment: str
    segments: tuple[Segment, ...] = ()
    dropped_bytes: dict[str, Count] = msgspec.field(default_factory=dict)
    reason: str | None = None

    @property
    def succeeded(self) -> bool:
        """Whether the command, and every rank of it, exited 0 by itself."""
        return self.ending is Ending.EXITED and self.exit_code == 0


SPECIFICATION_FILE = "specification.json"
OUTCOME_FILE = "outcome.json"
CENSUS_FILE = "census.json"
EVENTS_FILE = "events.jsonl"


class Census(Record, frozen=True, kw_only=True):
    """Who a supervisor is and which processes it has seen alive: what recovery starts from when it was killed."""

    token: str
    supervisor: Process
    processes: tuple[Process, ...] = ()
    cgroup: str | None = None
    segments: tuple[Segment, ...] = ()


def encode(value: msgspec.Struct) -> bytes:
    """Return the JSON bytes of a record of this module."""
    return msgspec.json.encode(value)
