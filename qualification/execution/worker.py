"""Run one workload against the subject's trainer_rank, in a process of its own: ``worker JOB.json``.

Trusted code, in an untrusted process: whatever it says is a claim. It reports JSON lines on the file descriptor named
by QUALIFY_EVENTS_FD, which the launcher stamps, and leaves raw data in the job's output directory.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from qualification.errors import ConfigurationError, QualificationError
from qualification.parameters import check_parameters, parameter
from qualification.records import Figure, Ground

CONTRACT_VERSION = 1
"""The version of trainer_rank's contract that the workloads are written for."""

UNUSABLE = 2
"""The exit code of a worker whose job, or subject, could not be used as given."""


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one attempt shall do. ``subject`` is the folder that holds the subject's ``trainer_rank`` package.

    ``process``: which of the workload's processes this is, and ``earlier``: what the one before it left, to be read.
    """

    run: str
    attempt: int
    workload: str
    ground: Ground
    policy: str
    subject: str
    output: str
    parameters: dict[str, Figure] = {}
    process: str = ""
    earlier: str | None = None


@dataclass(frozen=True)
class Context:
    """What a workload may use: its job, the subject's contract module, its output directory and its event channel."""

    job: Job
    contract: Any
    output: Path
    events: int

    def emit(self, event: str, **values: object) -> None:
        """Send one event line to the launcher. Values are integers, strings, and lists and objects of them."""
        _send(self.events, event, **values)

    def emit_event(self, event: Mapping[str, object]) -> None:
        """Send an event of the subject's own; its name is the entry ``event``."""
        self.emit(str(event.get("event")), **{key: value for key, value in event.items() if key != "event"})

    def close(self, trainer: Any, **values: object) -> None:  # noqa: ANN401 - the subject's object
        """Close a trainer of the subject's; the supervisor bounds the time between the two events."""
        self.emit("closing", **values)
        self.emit("close", report=self.contract.close(trainer), **values)

    def parameter(self, name: str) -> int:
        """Return a parameter that the workload declares: as the job gives it, or its default."""
        return parameter(self.job.workload, self.job.parameters, name)


def _send(events: int, event: str, **values: object) -> None:
    line = json.dumps({"event": event, **values}, separators=(",", ":")) + "\n"
    rest = line.encode()
    while rest:
        rest = rest[os.write(events, rest) :]


def load_subject(folder: Path) -> Any:  # noqa: ANN401 - the subject's module is typed by its version alone
    """Import the subject's contract from ``folder``, and nothing of trainer_rank from anywhere else.

    Raises ConfigurationError when it is not there, comes from elsewhere, or speaks another contract version.
    """
    root = folder.resolve()
    sys.path.insert(0, str(root))
    try:
        contract = importlib.import_module("trainer_rank.contract")
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"the subject in {folder} cannot be loaded: no module {error.name}") from error
    found = Path(contract.__file__ or "").resolve()
    if not found.is_relative_to(root):
        raise ConfigurationError(
            f"the subject in {folder} has no trainer_rank/contract.py; {found} would be used instead"
        )
    version = getattr(contract, "CONTRACT_VERSION", None)
    if version != CONTRACT_VERSION:
        raise ConfigurationError(
            f"the subject speaks contract version {version}; this pipeline speaks {CONTRACT_VERSION}"
        )
    return contract


def run_job(job: Job, events: int) -> None:
    """Run the job's workload to its end; every failure is said as an event, and raised."""
    try:
        _run(job, events)
    except BaseException as error:
        _send(events, "failure", type=type(error).__name__, text=str(error)[:2000])
        raise


def _run(job: Job, events: int) -> None:
    if not job.workload.isidentifier():
        raise ConfigurationError(f"workload {job.workload!r} does not exist")
    name = f"qualification.workloads.{job.workload}"
    contract = load_subject(Path(job.subject))
    try:
        workload = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ConfigurationError(f"workload {job.workload!r} does not exist") from error
    check_parameters(job.workload, job.parameters)
    output = Path(job.output)
    output.mkdir(parents=True, exist_ok=True)
    context = Context(job, contract, output, events)
    context.emit(
        "start", run=job.run, attempt=job.attempt, workload=job.workload, contract=CONTRACT_VERSION, pid=os.getpid()
    )
    workload.run(context)
    context.emit("end")


def main(arguments: list[str]) -> int:
    """Run the job named on the command line: exit code 0, 2 for what cannot be used as given, 1 for other failures."""
    if len(arguments) != 1:
        sys.stderr.write("usage: worker JOB.json\n")
        return 2
    try:
        job = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=Job)
        events = int(os.environ["QUALIFY_EVENTS_FD"])
    except (OSError, msgspec.MsgspecError, KeyError, ValueError) as error:
        sys.stderr.write(f"worker: job {arguments[0]} cannot be used: {error!r}\n")
        return 2
    try:
        run_job(job, events)
    except QualificationError as error:
        sys.stderr.write(f"worker: {error}\n")
        return UNUSABLE if isinstance(error, ConfigurationError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
