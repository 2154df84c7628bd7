"""Close what a killed run left behind: sweep its processes, take its receipt marked recovered, close its leases."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from qualification.execution.attempt import MANIFEST_FILE, RECEIPT_FILE, Manifest, host
from qualification.execution.files import write_durably
from qualification.execution.holding import HeldLeases, census_folders, look
from qualification.execution.identity import boot_id, find, myself, send
from qualification.execution.leases import Holding, LeaseStore
from qualification.execution.probes.gpus import GpuReader, GpuWatch, is_virtual
from qualification.execution.probes.nvml import GpuReading
from qualification.execution.receipt import Footprint, fold, take_receipt
from qualification.execution.supervision import Census, Outcome
from qualification.execution.supervisor import read_census, read_outcome, recover_outcome
from qualification.records import Lease, Probe, ProbeStatus, Receipt, ReceiptStatus

PATIENCE_SECONDS = 60
"""How long after its lease expired an orphaned supervisor may still be sweeping before it is killed."""

RECLAIM_SECONDS = 10.0
"""The memory of a run that died 30 s ago or more has had its time to come back."""

Recorder = Callable[[Manifest, Receipt], None]
"""Puts a recovered receipt where it belongs, durably, before the leases are closed."""


class NotYet(Exception):  # noqa: N818 - not an error: there is nothing to recover yet
    """Why an attempt cannot be recovered now."""


@dataclass(frozen=True)
class Recovered:
    """What a sweep did with one attempt: the receipt it took, or why it left it alone."""

    folder: Path
    receipt: Receipt | None
    reason: str | None = None


@dataclass
class Recovery:
    """Recovers attempts with one lease store, one NVML session and one recorder."""

    store: LeaseStore
    reader: GpuReader
    record: Recorder

    def holding(self, holding: Holding) -> str | None:
        """Recover the attempt behind an expired lease; None when its leases are closed now, else why not yet."""
        try:
            self.attempt(Path(holding.folder))
        except NotYet as reason:
            return str(reason)
        return None

    def sweep(self, runs: Path) -> list[Recovered]:
        """Recover every attempt that ended without a CLEAN receipt, then look at every device in quarantine."""
        found = {path.parent for path in runs.glob(f"*/*/{MANIFEST_FILE}") if not _is_clean(path.parent)}
        found |= {Path(holding.folder) for holding in self.store.holdings() if is_here(holding)}
        done: list[Recovered] = []
        for folder in sorted(found):
            try:
                if (receipt := self.attempt(folder)) is not None:
                    done.append(Recovered(folder, receipt))
            except NotYet as still:
                done.append(Recovered(folder, None, str(still)))
        for resource in self.store.resources():
            if resource.quarantine is not None:
                reason, baseline = look(resource, self.reader)
                if reason is None:
                    self.store.lift(resource.name, baseline)
        return done

    def attempt(self, folder: Path) -> Receipt | None:
        """Recover one attempt and return its new receipt, None when there is nothing new to say. Raises NotYet."""
        mine = [holding for holding in self.store.holdings() if Path(holding.folder) == folder]
        manifest = _read_manifest(folder)
        before = read_receipt(folder)
        _require_dead(mine, manifest, folder)
        if not mine and before is not None and not self._untouched(before.leases):
            return None  # somebody else had its devices since, after a CLEAN look: they say nothing about it any more
        held = HeldLeases(self.store, tuple(self.store.adopt(holding.lease, myself(), host()) for holding in mine))
        known = manifest or _unknown(mine[0])
        receipt = self._look(known, folder, held, before.leases if before and not mine else held.leases)
        if manifest is None:
            receipt = _unseen(receipt, folder)
        if before is not None and before.status is receipt.status and not mine:
            return None
        self.record(known, receipt)
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(folder / RECEIPT_FILE, msgspec.json.encode(receipt))
        held.close(receipt)
        return receipt

    def _look(self, manifest: Manifest, folder: Path, held: HeldLeases, leases: tuple[Lease, ...]) -> Receipt:
        def check() -> None:
            held.check()
            if not held.leases and not self._untouched(leases):
                raise NotYet("its devices were leased again meanwhile")

        outcomes = [_outcome(path) for path in census_folders([folder])]
        if manifest.worktree is not None:
            shutil.rmtree(
                manifest.worktree, ignore_errors=True
            )  # nothing uses it any more; the receipt says if it is gone
        return take_receipt(
            _footprint(manifest, folder, outcomes, leases),
            gpus=GpuWatch.resume(self.reader, self._baselines(manifest, leases)),
            containers=_containers(manifest, folder),
            check_leases=check,
            reclaim_seconds=RECLAIM_SECONDS,
            recovered=True,
        )

    def _untouched(self, leases: Sequence[Lease]) -> bool:
        """Whether nobody was granted any of these devices since: what they show now is still this attempt's."""
        tokens = {resource.name: resource.token for resource in self.store.resources()} if leases else {}
        return all(tokens.get(lease.resource) == lease.token for lease in leases)

    def _baselines(self, manifest: Manifest, leases: Sequence[Lease]) -> Sequence[GpuReading]:
        names = [lease.resource for lease in leases if not is_virtual(lease.resource)]
        if not names:
            return []
        saved = {reading.uuid: reading for reading in manifest.baselines}
        known = {resource.name: resource.baseline_bytes for resource in self.store.resources()}
        return [saved.get(name, GpuReading(uuid=name, used_bytes=known.get(name), processes=())) for name in names]


def is_here(held: Holding | Manifest) -> bool:
    """Whether a holder runs, or ran, on this machine: under its name, or in its present boot under another."""
    return held.host == host() or held.holder.boot_id == boot_id()


def read_receipt(folder: Path) -> Receipt | None:
    """Return the last receipt taken of an attempt, or None."""
    path = folder / RECEIPT_FILE
    return msgspec.json.decode(path.read_bytes(), type=Receipt) if path.exists() else None


def _is_clean(folder: Path) -> bool:
    receipt = read_receipt(folder)
    return receipt is not None and receipt.status is ReceiptStatus.CLEAN


def _read_manifest(folder: Path) -> Manifest | None:
    path = folder / MANIFEST_FILE
    return msgspec.json.decode(path.read_bytes(), type=Manifest) if path.exists() else None


def _unknown(holding: Holding) -> Manifest:
    """Return what stands for the manifest of an attempt whose folder is not here; each begins with writing it."""
    return Manifest(
        run=holding.run,
        attempt=holding.attempt,
        token="none",  # noqa: S106 - it is not known which one its processes carry
        trainer=False,
        provider="process",
        host=holding.host,
        holder=holding.holder,
        worktree=None,
        baselines=(),
        recorded=False,
    )


def _unseen(receipt: Receipt, folder: Path) -> Receipt:
    """Return the receipt of an attempt of which nothing is written here: what it started cannot be looked for."""
    reason = f"{folder} is not here, so what was started is unknown"
    blind = Probe(
        name="processes", source="/proc", status=ProbeStatus.UNREADABLE, duration_ms=0, values={}, reason=reason
    )
    probes = (blind, *(probe for probe in receipt.probes if probe.name != blind.name))
    status, said = fold(probes)
    return msgspec.structs.replace(receipt, probes=probes, status=status, reason=said)


def _require_dead(mine: Sequence[Holding], manifest: Manifest | None, folder: Path) -> None:
    """Raise NotYet while the attempt's own processes may still close it; end a supervisor that hangs on."""
    known: list[Holding | Manifest] = [*mine, *([manifest] if manifest else [])]
    for one in known:
        if not is_here(one):
            raise NotYet(f"run {one.run} is on host {one.host}; only a sweep there can see its processes")
    for holding in mine:
        if not holding.expired:
            raise NotYet(f"the lease of run {holding.run} is in force until {holding.expires_at}")
    if not mine and read_receipt(folder) is not None:
        return  # its holder has closed it; whatever that process does now is something else
    holder = manifest.holder if manifest else mine[0].holder if mine else None
    if holder is not None and (entry := find(holder)) is not None and entry.state != "zombie":
        raise NotYet(f"pid {holder.pid}, which holds the run in {folder}, is still alive")
    for path in census_folders([folder]):
        census = read_census(path)
        if census is not None:
            _end_orphaned(census, mine)


def _end_orphaned(census: Census, mine: Sequence[Holding]) -> None:
    entry = find(census.supervisor)
    if entry is None or entry.state == "zombie":
        return
    late = max((_seconds_since(holding.expires_at) for holding in mine), default=PATIENCE_SECONDS)
    if late < PATIENCE_SECONDS and entry.state != "stopped":
        raise NotYet(f"its supervisor, pid {entry.pid}, is still sweeping")
    send(entry, signal.SIGKILL)


def _containers(manifest: Manifest, folder: Path) -> Callable[[], Sequence[Probe]] | None:
    if manifest.provider != "docker":
        return None
    from qualification.providers.docker import probe_containers  # heavy, and rarely needed

    return lambda: probe_containers(manifest.token, census_folders([folder]))


def _outcome(folder: Path) -> Outcome:
    return read_outcome(folder) or recover_outcome(folder, "the run was killed; what it left was swept afterwards")


def _footprint(manifest: Manifest, folder: Path, outcomes: Sequence[Outcome], leases: tuple[Lease, ...]) -> Footprint:
    return Footprint(
        run=manifest.run,
        attempt=manifest.attempt,
        token=manifest.token,
        folders=tuple(census_folders([folder])),
        outcomes=tuple(outcomes),
        leases=leases,
        worktree=Path(manifest.worktree) if manifest.worktree else None,
        trainer=manifest.trainer,
        provider=manifest.provider,
    )


def _seconds_since(stamp: str) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(stamp)).total_seconds()
