"""GPUs before, during and after a run: baseline, memory, processes, health. Leased ones by UUID, one result each.

Readings come from ``probes.nvml`` in a process of its own, each with a time limit; a reader that hangs is given up.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import msgspec

import qualification
from qualification.execution.identity import read_entry
from qualification.execution.probes.nvml import Answer, GpuReading
from qualification.records import Figure, Probe, ProbeStatus

SOURCE = "NVML"
CALL_SECONDS = 5.0
SLACK_BYTES = 64 << 20
IDLE_BYTES = 2 << 30
"""More than this used on a card that was never seen idle, with no process listed, is somebody's memory: the driver of
an idle H200 holds 0.65 GB."""
POLL_SECONDS = 0.25
UNREADABLE_SECONDS = 5.0
VIRTUAL_PREFIX = "virtual:"
TRUSTED = Path(qualification.__file__).parents[1]


class GpuReader:
    """Questions to NVML and answers. A failure is an :class:`Answer` with ``error``, never an exception."""

    def __init__(self, call_seconds: float = CALL_SECONDS) -> None:
        self._call_seconds = call_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._pending = b""

    def ask(self, question: str) -> Answer:
        """Return the answer to one question, or an error within the time limit."""
        process = self.start()
        assert process.stdin is not None
        try:
            process.stdin.write(question.encode() + b"\n")
            process.stdin.flush()
            line = self._line(process)
            return msgspec.json.decode(line, type=Answer)
        except (OSError, EOFError, TimeoutError, msgspec.MsgspecError) as error:
            self.close()
            return Answer(error=f"NVML reader: {error}")

    def read(self, uuid: str) -> GpuReading:
        """Return a reading of one GPU; what could not be read is in its ``errors``."""
        answer = self.ask(f"read {uuid}")
        return answer.gpus[0] if answer.gpus else GpuReading(uuid=uuid, errors={"device": answer.error or "no answer"})

    def start(self) -> subprocess.Popen[bytes]:
        """Start the session unless it runs; a caller with other work first saves the time that NVML takes."""
        if self._process is not None:
            return self._process
        self._pending = b""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "qualification.execution.probes.nvml"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(TRUSTED)},
            start_new_session=True,
        )
        return self._process

    def _line(self, process: subprocess.Popen[bytes]) -> bytes:
        assert process.stdout is not None
        deadline = time.monotonic() + self._call_seconds
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"no answer within {self._call_seconds:g} s")
                content = os.read(process.stdout.fileno(), 1 << 16)
                if not content:
                    raise EOFError("ended without an answer")
                self._pending += content
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def close(self) -> None:
        """End the session; a reader stuck in its driver is left behind after half a second, not waited for."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.5)

    def __enter__(self) -> GpuReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def is_virtual(resource: str) -> bool:
    """Whether a leased device is a virtual one, which leaves nothing on any card."""
    return resource.startswith(VIRTUAL_PREFIX)


def reading_problem(reading: GpuReading) -> str | None:
    """Return why a GPU can be neither leased nor judged, or None when everything needed was read."""
    if reading.mig:
        refused = f" ({_errors(reading)})" if reading.errors else ""
        return f"it is a MIG device, which is not supported: use a whole GPU by its UUID{refused}"
    if reading.errors or reading.used_bytes is None or reading.processes is None:
        return f"unreadable ({_errors(reading)})"
    return None


def unreadable(reader: GpuReader, names: Sequence[str]) -> dict[str, str]:
    """Return which of the named real GPUs cannot be read now, and why."""
    readings = [reader.read(name) for name in names if not is_virtual(name)]
    return {reading.uuid: problem for reading in readings if (problem := reading_problem(reading)) is not None}


def occupancy(reading: GpuReading, baseline: int | None) -> str | None:
    """Return why a GPU cannot be leased now, or None when it reads idle. ``baseline``: its last idle reading, bytes."""
    if problem := reading_problem(reading):
        return problem
    if reading.processes:
        return f"in use by {', '.join(_name(process.pid) for process in reading.processes)}"
    bound = IDLE_BYTES if baseline is None else baseline + SLACK_BYTES
    if reading.used_bytes is None or reading.used_bytes > bound:
        held = "with no process listed" if baseline is None else f"against a baseline of {baseline} B"
        return f"{reading.used_bytes} B used {held}"
    return None


@dataclass
class GpuWatch:
    """The leased GPUs of one run: read idle before, watched meanwhile, read again after the sweep."""

    reader: GpuReader
    baselines: dict[str, GpuReading]
    watched: bool = True
    unwatched: str | None = None

    @classmethod
    def begin(cls, reader: GpuReader, uuids: Sequence[str]) -> GpuWatch:
        """Take the baselines of the leased GPUs, virtual ones excluded, and watch for XID events from now on."""
        real = [uuid for uuid in uuids if not is_virtual(uuid)]
        watch = cls(reader, {uuid: reader.read(uuid) for uuid in real})
        errors = [error for uuid in real if (error := reader.ask(f"watch {uuid}").error)]
        watch.unwatched = errors[0] if errors else None
        return watch

    @classmethod
    def resume(cls, reader: GpuReader, baselines: Sequence[GpuReading]) -> GpuWatch:
        """Take up the watch of a run that was killed, from the baselines it saved; its XID events are lost."""
        return cls(reader, {reading.uuid: reading for reading in baselines}, unwatched="nobody watched to the end")

    def probes(self, seconds: float) -> list[Probe]:
        """Probe each leased GPU after the sweep: memory and processes within ``seconds``, then health."""
        xids = self.reader.ask("xids") if self.baselines else Answer()
        probes: list[Probe] = []
        started = time.monotonic()
        for settled in _settle(self.reader, self.baselines, seconds):
            duration = round((time.monotonic() - started) * 1000)
            probes += [
                settled.memory(duration),
                settled.listed(duration),
                self._health(settled.reading, xids, duration),
            ]
        return probes

    def _health(self, reading: GpuReading, xids: Answer, duration: int) -> Probe:
        before = self.baselines[reading.uuid]
        mine = tuple(str(number) for uuid, number in xids.xids if uuid == reading.uuid)
        values: dict[str, Figure | bool | tuple[str, ...]] = {
            "gpu": reading.uuid,
            "ecc_errors_before": before.ecc_errors,
            "ecc_errors_after": reading.ecc_errors,
            "xids": mine,
        }
        errors = {**before.errors, **reading.errors}
        unread = self.unwatched or xids.error or errors.get("device") or errors.get("ecc")
        if mine or (reading.ecc_errors or 0) > (before.ecc_errors or 0):
            return _probe(
                "gpu_health", ProbeStatus.LEFTOVER, duration, values, "the GPU reported errors during the run"
            )
        if unread:
            return _probe("gpu_health", ProbeStatus.UNREADABLE, duration, values, f"{reading.uuid}: {unread}")
        return _probe("gpu_health", ProbeStatus.CLEAN, duration, values)


@dataclass
class _Settled:
    """The last readings of one GPU after the sweep."""

    baseline: GpuReading
    reading: GpuReading
    readings: int = 0
    equal: bool = False

    @property
    def bound(self) -> int | None:
        used = self.baseline.used_bytes
        return None if used is None else used + SLACK_BYTES

    @property
    def clean(self) -> bool:
        used = self.reading.used_bytes
        return self.equal and used is not None and self.bound is not None and used <= self.bound and not self.extra()

    def extra(self) -> tuple[int, ...]:
        before = {process.pid for process in self.baseline.processes or ()}
        return tuple(process.pid for process in self.reading.processes or () if process.pid not in before)

    def unreadable(self) -> str | None:
        for reading, when in ((self.baseline, "before the run"), (self.reading, "after the sweep")):
            if reading.used_bytes is None or reading.processes is None:
                return f"{reading.uuid} was unreadable {when}: {_errors(reading)}"
        return None

    def memory(self, duration: int) -> Probe:
        used, bound = self.reading.used_bytes, self.bound
        values: dict[str, Figure | bool | tuple[str, ...]] = {
            "gpu": self.reading.uuid,
            "baseline_bytes": self.baseline.used_bytes,
            "used_bytes": used,
            "bound_bytes": bound,
            "readings": self.readings,
        }
        if used is None or bound is None:
            return _probe("gpu_memory", ProbeStatus.UNREADABLE, duration, values, self.unreadable())
        if used > bound:
            reason = f"{self.reading.uuid} reads {used} B used against a baseline of {self.baseline.used_bytes} B"
            return _probe("gpu_memory", ProbeStatus.LEFTOVER, duration, values, reason)
        if not self.equal:
            reason = f"{self.reading.uuid} did not give two equal readings in time"
            return _probe("gpu_memory", ProbeStatus.UNREADABLE, duration, values, reason)
        return _probe("gpu_memory", ProbeStatus.CLEAN, duration, values)

    def listed(self, duration: int) -> Probe:
        names = tuple(_name(pid) for pid in self.extra())
        listed = None if self.reading.processes is None else names
        values: dict[str, Figure | bool | tuple[str, ...]] = {"gpu": self.reading.uuid, "processes": listed}
        if names:
            reason = f"{self.reading.uuid} still lists {', '.join(names)}"
            return _probe("gpu_processes", ProbeStatus.LEFTOVER, duration, values, reason)
        if self.reading.processes is None or self.baseline.processes is None:
            return _probe("gpu_processes", ProbeStatus.UNREADABLE, duration, values, self.unreadable())
        return _probe("gpu_processes", ProbeStatus.CLEAN, duration, values)


def _settle(reader: GpuReader, baselines: dict[str, GpuReading], seconds: float) -> list[_Settled]:
    """Read all GPUs until each is clean twice in a row, stays unreadable, or the time is over."""
    cards = {uuid: _Settled(baseline, reader.read(uuid), 1) for uuid, baseline in baselines.items()}
    started = time.monotonic()
    readable_at = dict.fromkeys(cards, started)
    open_cards = set(cards)
    while True:
        now = time.monotonic()
        for uuid in list(open_cards):
            card = cards[uuid]
            if card.unreadable() is None:
                readable_at[uuid] = now
            gave_up = now - readable_at[uuid] >= UNREADABLE_SECONDS or card.baseline.used_bytes is None
            if card.clean or gave_up:
                open_cards.discard(uuid)
        if not open_cards or now - started >= seconds:
            return list(cards.values())
        time.sleep(POLL_SECONDS)
        for uuid in open_cards:
            card, reading = cards[uuid], reader.read(uuid)
            equal = reading.used_bytes == card.reading.used_bytes
            cards[uuid] = _Settled(card.baseline, reading, card.readings + 1, equal)


def _name(pid: int) -> str:
    entry = read_entry(pid)
    return f"pid {pid} ({entry.command})" if entry else f"pid {pid}, which this system does not know"


def _errors(reading: GpuReading) -> str:
    return "; ".join(f"{field}: {text}" for field, text in reading.errors.items()) or "not supported by this GPU"


def _probe(
    name: str,
    status: ProbeStatus,
    duration: int,
    values: dict[str, Figure | bool | tuple[str, ...]],
    reason: str | None = None,
) -> Probe:
    return Probe(name=name, source=SOURCE, status=status, duration_ms=duration, values=values, reason=reason)
