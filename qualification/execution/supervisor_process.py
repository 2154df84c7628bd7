"""The supervisor: a process of its own, the only parent of everything that a run starts.

Started by :func:`qualification.execution.supervisor.supervise` as
``python -P -m qualification.execution.supervisor_process FOLDER CONTROL STATUS [OUTPUT ERROR]``. It is a subreaper, so
whatever its descendants do (new session, double fork, another name, an empty environment) they stay its descendants.
The caller's end of the control pipe is its mandate: without renewal in time, or at its end, everything is swept.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from qualification.execution.capture import EventFile, Events, Log
from qualification.execution.cgroup import Scope, create_scope
from qualification.execution.environment import lock_files
from qualification.execution.files import write_durably
from qualification.execution.identity import Entry, myself, record
from qualification.execution.probes.trainer import CLOSED, CLOSING
from qualification.execution.segments import Segment, mapped_segments, open_segments, present, remaining, remove
from qualification.execution.streams import EVENTS_VARIABLE, open_streams
from qualification.execution.supervision import (
    CENSUS_FILE,
    EVENTS_FILE,
    OUTCOME_FILE,
    SPECIFICATION_FILE,
    Census,
    Ending,
    Outcome,
    Specification,
    encode,
)
from qualification.execution.sweep import TOKEN_VARIABLE, Swept, descendants, members, sweep
from qualification.records import Process

PR_SET_CHILD_SUBREAPER = 36
TICK_SECONDS = 1.0


class _Named(msgspec.Struct):
    event: str


def boottime() -> float:
    """Return seconds since boot, sleep included: a stopped or suspended supervisor finds its mandate over."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Supervisor:
    """One supervised command from start to outcome."""

    def __init__(self, specification: Specification, control: int, status: int, echo: tuple[int, int] | None) -> None:
        self.specification = specification
        self.folder = Path(specification.folder)
        self.control, self.status, self.echo = control, status, echo
        self.selector = selectors.DefaultSelector()
        self.logs: list[Log] = []
        self.events = EventFile(self.folder / EVENTS_FILE, specification.limits.event_bytes)
        self.scope: Scope | None = None
        self.containment = ""
        self.pid: int | None = None
        self.exit_code: int | None = None
        self.ending: Ending | None = None
        self.reason: str | None = None
        self.closing: dict[int, float] = {}
        self.started = self.heard_at = time.monotonic()
        self.mandate_until = self._mandate(boottime())
        self.census_written: tuple[tuple[Process, ...], int] | None = None
        self.segments: set[Segment] = set()
        self.earlier_segments = present()
        self.next_tick = 0.0
        self._control_pending = b""

    # --- start

    def start(self) -> None:
        """Become subreaper, make the scope, start the command. Raises OSError when it cannot be started."""
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "this kernel refuses to make the supervisor a subreaper")
        self.scope, self.containment = create_scope(self.specification.token)
        self._write_census(())
        self._listen(self.control, self._hear_control)
        self._listen(_signals(), self._hear_signals)
        if self.specification.ranks > 1:
            for index, readers in enumerate(open_streams(self.folder, self.specification.ranks)):
                self._capture(f"rank-{index}", index, readers)
        self._start_command()

    def _start_command(self) -> None:
        command = self.specification.command
        environment = {**command.environment, TOKEN_VARIABLE: self.specification.token}
        pipes = [os.pipe(), os.pipe()]
        if self.specification.events and self.specification.ranks == 1:
            pipes.append(os.pipe())
            environment[EVENTS_VARIABLE] = str(pipes[2][1])
        writers = [writer for _, writer in pipes]
        try:
            process = subprocess.Popen(
                command.words,
                stdin=subprocess.DEVNULL,
                stdout=writers[0],
                stderr=writers[1],
                pass_fds=writers[2:],
                env=environment,
                cwd=self.specification.working_folder,
                start_new_session=True,
                preexec_fn=self.scope.enter if self.scope else None,  # noqa: PLW1509 - this process has one thread
            )
        finally:
            for writer in writers:
                os.close(writer)
            self._capture(self.specification.log_name, 0, [reader for reader, _ in pipes])
        self.pid = process.pid
        process.returncode = 0  # reaped below with every other descendant, never through this object

    def _capture(self, log_name: str, rank: int, readers: list[int]) -> None:
        limits = self.specification.limits
        for position, name in enumerate(("stdout", "stderr")):
            echo = self.echo[position] if self.echo else None
            log = Log(readers[position], self.folder / f"{log_name}.{name}.log", limits.log_bytes, echo)
            self.logs.append(log)
            self._listen(log.source, functools.partial(self._drain, log))
        if len(readers) > 2:
            hear = functools.partial(self._hear_event, rank)
            events = Events(readers[2], rank, self.events, limits.event_line_bytes, hear)
            self._listen(events.source, functools.partial(self._drain, events))

    def _listen(self, descriptor: int, hear: Callable[[], None]) -> None:
        self.selector.register(descriptor, selectors.EVENT_READ, hear)

    # --- hear

    def _drain(self, stream: Log | Events) -> None:
        self.heard_at = time.monotonic()
        if not stream.read():
            self.selector.unregister(stream.source)
            stream.close()

    def _hear_event(self, rank: int, line: bytes) -> None:
        """Note when a trainer began to close, and when it had closed."""
        if b'"clos' not in line:
            return
        with contextlib.suppress(msgspec.MsgspecError):
            name = msgspec.json.decode(line, type=_Named).event
            if name == CLOSING:
                self.closing[rank] = time.monotonic()
            elif name == CLOSED:
                self.closing.pop(rank, None)

    def _hear_control(self) -> None:
        content = os.read(self.control, 4096)
        if not content:
            self.selector.unregister(self.control)
            self.end(Ending.CALLER_GONE, "the process that asked for this run is gone")
            return
        *lines, self._control_pending = (self._control_pending + content).split(b"\n")
        for line in lines:
            word, _, rest = line.decode().partition(" ")
            if word == "renewed":
                self.mandate_until = self._mandate(float(rest))
            elif word == "lost":
                self.end(Ending.LEASE_LOST, rest)
            elif word == "cancel":
                self.end(Ending.CANCELLED, rest)

    def _hear_signals(self) -> None:
        for number in os.read(_signals(), 512):
            if number != signal.SIGCHLD:
                self.end(Ending.CANCELLED, f"the supervisor received {signal.Signals(number).name}")

    def end(self, ending: Ending, reason: str | None = None) -> None:
        """Decide why this run ends; the first reason stays."""
        if self.ending is None:
            self.ending, self.reason = ending, reason

    # --- run

    def run(self) -> Outcome:
        """Supervise until something ends the run, sweep, and return what happened."""
        try:
            self.start()
        except (OSError, subprocess.SubprocessError) as error:
            self.end(Ending.START_FAILED, str(error))
        while self.ending is None:
            self.turn(TICK_SECONDS)
            self.check()
        ended = time.monotonic()
        self._take_census()
        swept = sweep(
            self.look,
            terminate_seconds=self.specification.limits.terminate_seconds,
            kill_seconds=self.specification.limits.kill_seconds,
            pause=self.turn,
            scope=self.scope,
        )
        self.finish()
        left = remaining(self.segments)
        remove(left)
        return self.outcome(ended, swept, left)

    def turn(self, seconds: float) -> None:
        """Serve pipes, reap and pulse for up to ``seconds``."""
        until = time.monotonic() + seconds
        for key, _ in self.selector.select(max(0.0, min(seconds, self._next_deadline() - time.monotonic()))):
            key.data()
        self.reap()
        if time.monotonic() >= self.next_tick:
            self.next_tick = time.monotonic() + TICK_SECONDS
            self._pulse()
            self._take_census()
        if self.ending is not None and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.01))

    def check(self) -> None:
        """End the run when its command is done or a limit is passed."""
        limits, now = self.specification.limits, time.monotonic()
        if self.exit_code is not None:
            self.end(Ending.EXITED)
        elif boottime() > self.mandate_until:
            self.end(Ending.LEASE_LOST, f"the lease was not renewed for {self.specification.authority_seconds} s")
        elif limits.wall_seconds is not None and now - self.started >= limits.wall_seconds:
            self.end(Ending.TIMED_OUT, f"still running after {limits.wall_seconds} s")
        elif self.closing and now - min(self.closing.values()) >= limits.close_seconds:
            self.end(Ending.CLOSE_TIMED_OUT, f"close() did not return within {limits.close_seconds} s")
        elif limits.silence_seconds is not None and now - self.heard_at >= limits.silence_seconds:
            self.end(Ending.SILENT, f"silent for {limits.silence_seconds} s{self._waits_on()}")

    def look(self) -> list[Entry]:
        """Reap, then return every process below this one or in its scope."""
        self.reap()
        found = {entry.key: entry for entry in [*descendants([os.getpid()]), *members(self.scope)]}
        return list(found.values())

    def reap(self) -> None:
        """Collect every dead child, adopted orphans included, and keep the exit code of the command."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.pid:
                    self.exit_code = os.waitstatus_to_exitcode(status)

    def finish(self) -> None:
        """Read what is left in the pipes and close every file."""
        for key in list(self.selector.get_map().values()):
            stream = getattr(key.data, "args", (None,))[0]
            if stream is not None:
                self._read_rest(stream)
                stream.close()
        self.selector.close()
        self.events.close()
        if self.scope is not None:
            self.scope.remove()

    def _read_rest(self, stream: Log | Events) -> None:
        for _ in range(64):  # at most 4 MiB: a pipe holds 64 KiB unless somebody still writes
            if not stream.read():
                return

    def outcome(self, ended: float, swept: Swept, segments: tuple[Segment, ...]) -> Outcome:
        """Return the record of the whole run."""
        dropped = {log.path.name: log.dropped for log in self.logs if log.dropped}
        if self.events.dropped:
            dropped[EVENTS_FILE] = self.events.dropped
        return Outcome(
            ending=self.ending or Ending.EXITED,
            exit_code=self.exit_code,
            swept=swept.swept,
            leftovers=swept.leftovers,
            duration_ms=round((ended - self.started) * 1000),
            sweep_ms=swept.duration_ms,
            kill_ms=swept.kill_ms,
            containment=self.containment,
            segments=segments,
            dropped_bytes=dropped,
            reason=self.reason,
        )

    # --- helpers

    def _mandate(self, renewed_at: float) -> float:
        seconds = self.specification.authority_seconds
        return float("inf") if seconds is None else renewed_at + seconds

    def _next_deadline(self) -> float:
        limits = self.specification.limits
        deadlines = [self.next_tick]
        if limits.wall_seconds is not None:
            deadlines.append(self.started + limits.wall_seconds)
        return min(deadlines)

    def _pulse(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self.status, b".")

    def _take_census(self) -> None:
        entries = self.look()
        pids = [entry.pid for entry in entries]
        self.segments |= open_segments(pids) - self.earlier_segments
        if new := present() - self.earlier_segments - self.segments:  # perhaps mapped: costs more to see
            self.segments |= mapped_segments(pids) & new
        self._write_census(tuple(record(entry) for entry in entries))

    def _write_census(self, processes: tuple[Process, ...]) -> None:
        if (processes, len(self.segments)) == self.census_written:
            return
        self.census_written = (processes, len(self.segments))
        census = Census(
            token=self.specification.token,
            supervisor=myself(),
            processes=processes,
            cgroup=str(self.scope.folder) if self.scope else None,
            segments=tuple(self.segments),
        )
        write_durably(self.folder / CENSUS_FILE, encode(census), sync=False)

    def _waits_on(self) -> str:
        """Return which lock files lie in the run's caches: what a silent first-use build usually waits on."""
        locks = lock_files(self.folder)
        return f", and waits on {', '.join(locks)}" if locks else ""


@functools.cache
def _signals() -> int:
    reader, writer = os.pipe()
    for descriptor in (reader, writer):
        os.set_blocking(descriptor, False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    return reader


def main(arguments: list[str]) -> None:
    """Supervise what the folder's specification asks for and write the outcome beside it."""
    folder = Path(arguments[0])
    control, status, *output = (int(text) for text in arguments[1:])
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    specification = msgspec.json.decode((folder / SPECIFICATION_FILE).read_bytes(), type=Specification)
    echo = (output[0], output[1]) if specification.echo else None
    outcome = Supervisor(specification, control, status, echo).run()
    write_durably(folder / OUTCOME_FILE, encode(outcome))


if __name__ == "__main__":
    main(sys.argv[1:])
