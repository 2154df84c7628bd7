"""Answer questions about GPUs from NVML, one JSON line each, in a process of its own.

NVML is C code that can hang with its driver and take its process with it, so the caller (``probes.gpus``) asks this
one and stops waiting. Questions: ``list``, ``read UUID``, ``watch UUID`` (XID events from now on), ``xids``. Absent
and unreadable are told apart: what NVML refuses is in ``errors`` by field, with NVML's own words.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pynvml

XID_BATCH = 64


class GpuProcess(msgspec.Struct, frozen=True):
    """A process that NVML lists on a GPU. ``used_bytes`` is None where NVML does not say."""

    pid: int
    used_bytes: int | None


class GpuReading(msgspec.Struct, frozen=True, kw_only=True):
    """What NVML said of one GPU at one moment. A field is None when it is not supported, or named in ``errors``."""

    uuid: str
    name: str | None = None
    total_bytes: int | None = None
    used_bytes: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    mig: bool | None = None
    ecc_errors: int | None = None
    errors: dict[str, str] = {}


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of answer; ``error`` when the question could not be answered at all."""

    gpus: tuple[GpuReading, ...] = ()
    xids: tuple[tuple[str, int], ...] = ()
    error: str | None = None


class _Fields:
    """Calls NVML field by field, so that one refusal does not hide the others."""

    def __init__(self) -> None:
        self.errors: dict[str, str] = {}

    def ask(self, field: str, call: Callable[[], Any]) -> Any:  # noqa: ANN401 - whatever the NVML call returns
        try:
            return call()
        except pynvml.NVMLError_NotSupported:
            return None
        except pynvml.NVMLError as error:
            self.errors[field] = str(error)
            return None


def read(uuid: str) -> GpuReading:
    """Read one GPU by UUID. Raises NVMLError when there is no such device."""
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    fields = _Fields()
    mode = fields.ask("mig", lambda: pynvml.nvmlDeviceGetMigMode(handle))
    memory = fields.ask("memory", lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    return GpuReading(
        uuid=uuid,
        name=fields.ask("name", lambda: _text(pynvml.nvmlDeviceGetName(handle))),
        total_bytes=memory and int(memory.total),
        used_bytes=memory and int(memory.used),
        processes=fields.ask("processes", lambda: tuple(_processes(handle))),
        mig=uuid.startswith("MIG-") or bool(mode and mode[0]),
        ecc_errors=fields.ask(
            "ecc",
            lambda: pynvml.nvmlDeviceGetTotalEccErrors(
                handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
            ),
        ),
        errors=fields.errors,
    )


def _processes(handle: Any) -> Iterator[GpuProcess]:  # noqa: ANN401 - an opaque NVML handle
    seen: dict[int, int | None] = {}
    for call in (
        pynvml.nvmlDeviceGetComputeRunningProcesses,
        pynvml.nvmlDeviceGetGraphicsRunningProcesses,
        pynvml.nvmlDeviceGetMPSComputeRunningProcesses,
    ):
        for process in call(handle):
            seen[process.pid] = process.usedGpuMemory
    for pid, used in sorted(seen.items()):
        yield GpuProcess(pid, used)


class Reader:
    """Answers questions until its input ends."""

    def __init__(self) -> None:
        self.events: Any = None
        self.watched: list[tuple[Any, str]] = []

    def answer(self, question: str) -> Answer:
        """Answer one question; NVML's refusals become ``error``."""
        word, _, rest = question.partition(" ")
        try:
            if word == "list":
                return Answer(gpus=tuple(read(uuid) for uuid in self._uuids()))
            if word == "read":
                return Answer(gpus=(read(rest),))
            if word == "watch":
                self._watch(rest)
                return Answer()
            return Answer(xids=tuple(self._xids()))
        except pynvml.NVMLError as error:
            return Answer(error=str(error))

    def _uuids(self) -> list[str]:
        count = pynvml.nvmlDeviceGetCount()
        return [_text(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index))) for index in range(count)]

    def _watch(self, uuid: str) -> None:
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        if self.events is None:
            self.events = pynvml.nvmlEventSetCreate()
        pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self.events)
        self.watched.append((handle, uuid))

    def _xids(self) -> Iterator[tuple[str, int]]:
        if self.events is None:
            return
        for _ in range(XID_BATCH):
            try:
                event = pynvml.nvmlEventSetWait_v2(self.events, 0)
            except pynvml.NVMLError_Timeout:
                return
            yield _text(pynvml.nvmlDeviceGetUUID(event.device)), int(event.eventData)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def main() -> None:
    """Answer each line of standard input with one line on standard output."""
    try:
        pynvml.nvmlInit()
        failure = None
    except pynvml.NVMLError as error:
        failure = Answer(error=str(error))
    reader = Reader()
    for line in sys.stdin:
        answer = failure or reader.answer(line.strip())
        sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
