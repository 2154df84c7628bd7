"""Start a workload's worker under a supervisor, follow its events, and return what happened.

Several ranks are started by torchrun, on this host alone and once; each has its own logs and its own event stream
(``streams``). When one fails, torchrun ends the others: TERM, and KILL after 30 s.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from qualification.execution.capture import Stamped
from qualification.execution.environment import child_environment
from qualification.execution.streams import FOLDER
from qualification.execution.supervision import EVENTS_FILE, Command, Limits, Outcome, Specification
from qualification.execution.supervisor import TRUSTED, Authority, supervise

WORKER = "qualification.execution.worker"
PYTHON = (sys.executable, "-P", "-m")
TORCHRUN = "qualification.execution.torchrun"
STREAMS = "qualification.execution.streams"
HERE = "127.0.0.1"


@dataclass(frozen=True)
class Launched:
    """What a launch did: the outcome, the ports it handed out, and where its files are."""

    outcome: Outcome
    ports: tuple[int, ...]
    folder: Path

    def events(self) -> list[Stamped]:
        """Return all stamped events in the order in which trusted code read them."""
        return read_events(self.folder)


def launch(
    job: Path,
    *,
    run: str,
    token: str,
    folder: Path,
    limits: Limits | None = None,
    ranks: int = 1,
    gpus: Sequence[str] = (),
    place: Callable[[Command], Command] | None = None,
    environment: Mapping[str, str] | None = None,
    authority: Authority | None = None,
    on_event: Callable[[Stamped], None] | None = None,
    cancelled: Callable[[], str | None] | None = None,
) -> Launched:
    """Run ``python -m qualification.execution.worker JOB`` as ``ranks`` processes under a supervisor.

    ``folder`` (private to this attempt of this workload) gets ``rank-N.stdout.log``, ``rank-N.stderr.log``,
    ``events.jsonl`` and ``outcome.json``; of several ranks also torchrun's own logs. ``gpus`` are the leased UUIDs;
    only they are visible. ``place`` turns the command into what a provider starts for it. ``on_event`` is called in
    this process for each event soon after it was stamped. Raises what :func:`supervise` raises.
    """
    folder.mkdir(parents=True, exist_ok=True)
    base = child_environment(folder, gpus, {"PYTHONPATH": str(TRUSTED), "PYTHONUNBUFFERED": "1", **(environment or {})})
    worker = (*PYTHON, WORKER, str(job))
    command = Command(words=worker, environment=base)
    ports: tuple[int, ...] = ()
    if ranks > 1:
        ports = (free_port(),)
        command = Command(words=torchrun(worker, ranks, folder, ports[0]), environment=base)
    follower = EventFollower(folder, on_event or (lambda _: None))
    outcome = supervise(
        Specification(
            run=run,
            token=token,
            folder=str(folder),
            command=place(command) if place else command,
            limits=limits or Limits(),
            working_folder=str(folder),
            ranks=ranks,
            events=True,
            authority_seconds=authority.seconds if authority else None,
        ),
        authority=authority,
        progress=follower.follow,
        cancelled=cancelled,
    )
    follower.follow()
    return Launched(outcome, ports, folder)


def torchrun(worker: Sequence[str], ranks: int, folder: Path, port: int) -> tuple[str, ...]:
    """Return the command that runs ``worker`` as several ranks which meet at ``port`` of this host."""
    streams = str(folder / FOLDER)
    return (
        *(*PYTHON, TORCHRUN, "--nproc-per-node", str(ranks), "--max-restarts", "0", "--log-dir", streams),
        *("--nnodes", "1", "--master-addr", HERE, "--master-port", str(port)),
        *("--no-python", *PYTHON, STREAMS, streams, *worker),
    )


def free_port() -> int:
    """Return a TCP port on the loopback address that is free now."""
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        return int(probe.getsockname()[1])


class EventFollower:
    """Reads ``events.jsonl`` as it grows and hands on each whole line once."""

    def __init__(self, folder: Path, on_event: Callable[[Stamped], None]) -> None:
        self._path = folder / EVENTS_FILE
        self._on_event = on_event
        self._offset = 0

    def follow(self) -> None:
        """Hand on what was written since the last call."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                self._on_event(msgspec.json.decode(line, type=Stamped))


def read_events(folder: Path) -> list[Stamped]:
    """Return every stamped event of a folder; none when the worker never wrote one."""
    events: list[Stamped] = []
    EventFollower(folder, events.append).follow()
    return events
