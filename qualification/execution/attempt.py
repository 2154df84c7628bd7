"""One attempt on this host, from its leases to its receipt: what `qualify run` and `qualify exec` share."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from qualification.execution.capture import Stamped
from qualification.execution.environment import cache_folder, child_environment
from qualification.execution.files import write_durably
from qualification.execution.holding import HeldLeases
from qualification.execution.identity import myself
from qualification.execution.launch import Launched, launch
from qualification.execution.probes.gpus import GpuReader, GpuWatch, is_virtual
from qualification.execution.probes.nvml import GpuReading
from qualification.execution.receipt import RECLAIM_SECONDS, Footprint, take_receipt
from qualification.execution.streams import FOLDER
from qualification.execution.supervision import (
    OUTCOME_FILE,
    Command,
    Ending,
    Limits,
    Outcome,
    Specification,
    command_name,
    encode,
)
from qualification.execution.supervisor import TRUSTED, read_outcome, supervise
from qualification.execution.worker import Job
from qualification.providers.protocol import Place, ProcessProvider, Provider
from qualification.records import Count, Process, Receipt, Record

MANIFEST_FILE = "attempt.json"
RECEIPT_FILE = "receipt.json"


class Manifest(Record, frozen=True, kw_only=True):
    """What recovery must know of an attempt, on the disk before anything is started."""

    run: str
    attempt: Count
    token: str
    trainer: bool
    provider: str
    host: str
    holder: Process
    worktree: str | None
    baselines: tuple[GpuReading, ...]
    recorded: bool
    """Whether its receipt belongs into the ledger (a qualification run), or only into its folder (``qualify exec``)."""


@dataclass
class Attempt:
    """Leases held, GPUs watched, commands supervised under one run token, and at the end the receipt."""

    run: str
    attempt: int
    folder: Path
    held: HeldLeases | None = None
    trainer: bool = False
    worktree: Path | None = None
    recorded: bool = True
    provider: Provider = field(default_factory=ProcessProvider)
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    reader: GpuReader = field(default_factory=GpuReader)
    watch: GpuWatch | None = None
    folders: list[Path] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)

    def begin(self) -> None:
        """Take the baselines and write them down. Raises LeaseLost when the leases are no longer in force."""
        self.watch = GpuWatch.begin(self.reader, self.resources)
        self.announce()
        if self.held is not None:
            self.held.check()

    def announce(self) -> None:
        """Write down who runs this attempt and what is known of it by now, for recovery."""
        self.folder.mkdir(parents=True, exist_ok=True)
        manifest = Manifest(
            run=self.run,
            attempt=self.attempt,
            token=self.token,
            trainer=self.trainer,
            provider=self.provider.name,
            host=host(),
            holder=myself(),
            worktree=str(self.worktree) if self.worktree else None,
            baselines=tuple(self.watch.baselines.values()) if self.watch else (),
            recorded=self.recorded,
        )
        write_durably(self.folder / MANIFEST_FILE, msgspec.json.encode(manifest))

    def withdraw(self) -> None:
        """Take back the announcement of an attempt that was refused."""
        (self.folder / MANIFEST_FILE).unlink(missing_ok=True)

    @property
    def card(self) -> str | None:
        """Return the leased devices' name: NVML's of GPUs, ``virtual``; None when nothing is leased or named."""
        if self.resources and all(is_virtual(resource) for resource in self.resources):
            return "virtual"
        names = {reading.name for reading in self.watch.baselines.values()} if self.watch else set()
        return ", ".join(sorted(name or "unknown" for name in names)) or None

    @property
    def resources(self) -> tuple[str, ...]:
        """Return the leased devices."""
        return tuple(lease.resource for lease in self.held.leases) if self.held else ()

    @property
    def gpus(self) -> tuple[str, ...]:
        """Return the UUIDs of the leased real GPUs."""
        return tuple(name for name in self.resources if not is_virtual(name))

    def launch(
        self,
        job: Path,
        name: str,
        *,
        limits: Limits | None = None,
        ranks: int = 1,
        environment: Mapping[str, str] | None = None,
        on_event: Callable[[Stamped], None] | None = None,
        cancelled: Callable[[], str | None] | None = None,
    ) -> Launched:
        """Run a worker on ``job`` in the sub-folder ``name`` and return what happened; see :func:`launch.launch`."""
        folder = self._open(name)
        task = msgspec.json.decode(job.read_bytes(), type=Job)
        reads = [job, Path(task.subject), *([Path(task.earlier)] if task.earlier else [])]
        writes = [Path(task.output), *([folder / FOLDER] if ranks > 1 else [])]
        launched = launch(
            job,
            run=self.run,
            token=self.token,
            folder=folder,
            limits=limits,
            ranks=ranks,
            gpus=self.gpus,
            place=lambda started: self._place(started, command_name(ranks), folder, reads, writes),
            environment=environment,
            authority=self.held,
            on_event=on_event,
            cancelled=cancelled,
        )
        self.ports += launched.ports
        return replace(launched, outcome=self._attribute(folder, launched.outcome))

    def execute(
        self, command: Sequence[str], name: str, *, limits: Limits | None = None, echo: bool = False
    ) -> Outcome:
        """Run any command in the sub-folder ``name``; with ``echo`` its output is also this process's."""
        folder = self._open(name)
        folder.mkdir(parents=True, exist_ok=True)
        asked = Command(words=tuple(command), environment=child_environment(folder, self.gpus))
        outcome = supervise(
            Specification(
                run=self.run,
                token=self.token,
                folder=str(folder),
                command=self._place(asked, command_name(1), folder, [], []),
                limits=limits or Limits(),
                working_folder=str(Path.cwd()),
                echo=echo,
                authority_seconds=self.held.seconds if self.held else None,
            ),
            authority=self.held,
        )
        return self._attribute(folder, outcome)

    def take_receipt(self, *, reclaim_seconds: float = RECLAIM_SECONDS) -> Receipt:
        """Look at everything again and return the receipt. Call it after every supervised command has ended."""
        return take_receipt(
            self.footprint(),
            gpus=self.watch,
            containers=lambda: self.provider.probe(self.token, self.folders),
            check_leases=self.held.check if self.held else None,
            reclaim_seconds=reclaim_seconds,
        )

    def footprint(self) -> Footprint:
        """Return all that was leased or started so far."""
        return Footprint(
            run=self.run,
            attempt=self.attempt,
            token=self.token,
            folders=tuple(self.folders),
            outcomes=tuple(outcome for folder in self.folders if (outcome := read_outcome(folder)) is not None),
            leases=self.held.leases if self.held else (),
            ports=tuple(self.ports),
            worktree=self.worktree,
            trainer=self.trainer,
            provider=self.provider.name,
        )

    def close(self, receipt: Receipt) -> None:
        """Keep the receipt and close the leases by it; call it once the receipt is recorded. Raises LeaseLost."""
        self.reader.close()
        write_durably(self.folder / RECEIPT_FILE, msgspec.json.encode(receipt))
        if self.held is not None:
            self.held.close(receipt)

    def _attribute(self, folder: Path, outcome: Outcome) -> Outcome:
        """Tell an end that was the provider's from one that was the command's own."""
        failure = self.provider.failure(folder) if outcome.ending is Ending.EXITED else None
        if failure is None:
            return outcome
        attributed = msgspec.structs.replace(outcome, ending=Ending.PROVIDER_FAILED, reason=failure)
        write_durably(folder / OUTCOME_FILE, encode(attributed))
        return attributed

    def _place(
        self, command: Command, name: str, folder: Path, reads: Sequence[Path], writes: Sequence[Path]
    ) -> Command:
        place = Place(
            run=self.run,
            token=self.token,
            folder=str(folder),
            name=name,
            gpus=self.gpus,
            reads=tuple(map(str, (TRUSTED, *reads))),
            writes=tuple(map(str, (cache_folder(folder), *writes))),
        )
        return self.provider.command(command, place)

    def _open(self, name: str) -> Path:
        if self.held is not None:
            self.held.check()
        folder = self.folder / name
        self.folders.append(folder)
        return folder


def host() -> str:
    """Return the name by which leases call this host."""
    return socket.gethostname()
