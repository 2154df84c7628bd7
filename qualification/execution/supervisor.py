"""Ask for a command to be supervised, and wait for what happened. The work is done by a process of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

import qualification
from qualification.errors import UnknownError
from qualification.execution.files import write_durably
from qualification.execution.segments import remaining, remove
from qualification.execution.supervision import (
    CENSUS_FILE,
    OUTCOME_FILE,
    SPECIFICATION_FILE,
    Census,
    Ending,
    Outcome,
    Specification,
    encode,
)
from qualification.execution.sweep import carriers, sweep, sweep_census

RENEW_SECONDS = 10
RETRY_SECONDS = 1
WAIT_SECONDS = 0.25
OVERRUN_SECONDS = 30
LOG = logging.getLogger(__name__)
TRUSTED = Path(qualification.__file__).parents[1]


class LeaseLost(UnknownError):  # noqa: N818 - what happened, in the field's words
    """The right to the device is no longer ours; what was started under it must end."""


class Authority(Protocol):
    """The right under which a command runs; renewed while both the caller and the supervisor are alive."""

    seconds: int
    """How long one renewal carries."""

    def renew(self) -> None:
        """Extend the right by ``seconds``. Raises LeaseLost when it is over; any other error is tried again."""


def supervise(
    specification: Specification,
    *,
    authority: Authority | None = None,
    progress: Callable[[], None] | None = None,
    cancelled: Callable[[], str | None] | None = None,
) -> Outcome:
    """Run a specification's command under a supervisor of its own and return what happened once all is swept.

    ``progress`` is called about four times a second, ``cancelled`` too: its text, if any, ends the run. An exception
    in the caller (KeyboardInterrupt too) ends the run and is raised again after the sweep: nothing stays behind. The
    outcome is also in the folder's ``outcome.json``. The wait is bounded even if the supervisor is killed or stopped.
    """
    folder = Path(specification.folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_durably(folder / SPECIFICATION_FILE, encode(specification))
    watch = _Watch(specification, authority)
    try:
        watch.wait(progress or (lambda: None), cancelled or (lambda: None))
    finally:
        watch.end()
        outcome = read_outcome(folder) or recover_outcome(folder, "the supervisor was killed before it could report")
        outcome = _end_strays(specification, outcome)
    return outcome


def read_outcome(folder: Path) -> Outcome | None:
    """Return the outcome that a supervisor wrote, or None when it did not get that far."""
    with contextlib.suppress(FileNotFoundError):
        return msgspec.json.decode((folder / OUTCOME_FILE).read_bytes(), type=Outcome)
    return None


def read_census(folder: Path) -> Census | None:
    """Return whom a supervisor last saw, or None when it never got to write it."""
    with contextlib.suppress(FileNotFoundError):
        return msgspec.json.decode((folder / CENSUS_FILE).read_bytes(), type=Census)
    return None


class _Watch:
    """The caller's side of one supervisor: its pulse, the renewals, the bound."""

    def __init__(self, specification: Specification, authority: Authority | None) -> None:
        self.specification, self.authority = specification, authority
        self.started = self.pulse_at = self.renewed_at = self.tried_at = time.monotonic()
        self.told = False
        control_reader, self.control = os.pipe()
        self.status, status_writer = os.pipe()
        echo = (os.dup(1), os.dup(2)) if specification.echo else ()
        passed = (control_reader, status_writer, *echo)
        module = "qualification.execution.supervisor_process"
        try:
            with (Path(specification.folder) / "supervisor.log").open("wb") as log:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-m", module, specification.folder, *map(str, passed)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=passed,
                    env={"PYTHONPATH": str(TRUSTED), "PATH": os.environ.get("PATH", os.defpath)},
                    start_new_session=True,
                )
        finally:
            for descriptor in passed:
                os.close(descriptor)

    def wait(self, progress: Callable[[], None], cancelled: Callable[[], str | None]) -> None:
        """Wait for the supervisor, renewing the lease as long as it shows a pulse."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.status, selectors.EVENT_READ)
            while True:
                if selector.select(WAIT_SECONDS):
                    if not os.read(self.status, 4096):
                        return
                    self.pulse_at = time.monotonic()
                progress()
                if (reason := cancelled()) is not None:
                    self._tell(f"cancel {reason}")
                self._renew()
                if self._overrun():
                    return

    def end(self) -> None:
        """Take the mandate away and wait, within the ladder's bounds, until the supervisor has swept and is gone."""
        os.close(self.control)
        limits = self.specification.limits
        try:
            self.process.wait(limits.terminate_seconds + limits.kill_seconds + OVERRUN_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(limits.kill_seconds)
        finally:
            os.close(self.status)

    def _renew(self) -> None:
        now = time.monotonic()
        due = self.renewed_at + RENEW_SECONDS
        stale = self.pulse_at < due - 1  # a stopped supervisor must let its lease run out
        if self.authority is None or self.told or now < due or stale or now < self.tried_at + RETRY_SECONDS:
            return
        self.tried_at = now
        asked_at = time.clock_gettime(time.CLOCK_BOOTTIME)
        try:
            self.authority.renew()
        except LeaseLost as error:
            self._tell(f"lost {error}")
        except Exception as error:  # a database that is locked or away: the supervisor's own deadline decides
            LOG.warning("lease not renewed, trying again: %s", error)
        else:
            self.renewed_at = now
            self._send(f"renewed {asked_at}")

    def _tell(self, message: str) -> None:
        if not self.told:
            self.told = True
            self._send(message)

    def _send(self, message: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self.control, f"{' '.join(message.split())}\n".encode())

    def _overrun(self) -> bool:
        """Whether the supervisor should have ended long ago: it is stopped, or its host is stuck."""
        limits = self.specification.limits
        if limits.wall_seconds is None:
            return False
        bound = limits.wall_seconds + limits.terminate_seconds + limits.kill_seconds + OVERRUN_SECONDS
        return time.monotonic() - self.started > bound


def _end_strays(specification: Specification, outcome: Outcome) -> Outcome:
    """Kill what carries the run's token outside the supervisor's tree (below another daemon), and say so."""
    if not carriers(specification.token):
        return outcome
    seconds = specification.limits.kill_seconds
    strays = sweep(lambda: carriers(specification.token), terminate_seconds=0, kill_seconds=seconds)
    complete = msgspec.structs.replace(
        outcome,
        swept=(*outcome.swept, *strays.swept),
        leftovers=(*outcome.leftovers, *strays.leftovers),
        sweep_ms=outcome.sweep_ms + strays.duration_ms,
    )
    write_durably(Path(specification.folder) / OUTCOME_FILE, encode(complete))
    return complete


def recover_outcome(folder: Path, reason: str) -> Outcome:
    """Sweep what a dead supervisor left, write the outcome in its place and return it.

    Raises UnknownError when it never wrote a census, so that nothing was started either.
    """
    census = read_census(folder)
    limits = msgspec.json.decode((folder / SPECIFICATION_FILE).read_bytes(), type=Specification).limits
    if census is None:
        raise UnknownError(f"the supervisor of {folder} never started: see {folder / 'supervisor.log'}")
    swept = sweep_census(census, terminate_seconds=limits.terminate_seconds, kill_seconds=limits.kill_seconds)
    segments = remaining(census.segments)
    remove(segments)
    outcome = Outcome(
        ending=Ending.SUPERVISOR_LOST,
        exit_code=None,
        swept=swept.swept,
        leftovers=swept.leftovers,
        duration_ms=0,
        sweep_ms=swept.duration_ms,
        kill_ms=swept.kill_ms,
        segments=segments,
        containment="recorded identities" + (f" and cgroup v2 scope {census.cgroup}" if census.cgroup else ""),
        reason=reason,
    )
    write_durably(folder / OUTCOME_FILE, encode(outcome))
    return outcome
