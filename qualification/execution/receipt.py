"""The cleanup receipt: what a run leased or started, looked at again on the host after the sweep."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from qualification.execution.launch import read_events
from qualification.execution.probes import host
from qualification.execution.probes.gpus import SOURCE as GPU_SOURCE
from qualification.execution.probes.gpus import GpuWatch, is_virtual
from qualification.execution.probes.trainer import closing
from qualification.execution.segments import remaining
from qualification.execution.supervision import Census, Ending, Outcome
from qualification.execution.supervisor import read_census
from qualification.records import Lease, Probe, ProbeStatus, Process, Receipt, ReceiptStatus

RECLAIM_SECONDS = 60.0
GPU_PROBES = ("gpu_memory", "gpu_processes", "gpu_health")
REQUIRED = ("processes", *GPU_PROBES, "containers", "shared_memory", "ports", "caches", "worktree", "lease", "trainer")
"""Every receipt holds each of these at least once; what the run neither leased nor started is ``not_applicable``."""


@dataclass(frozen=True)
class Footprint:
    """Everything that one attempt leased or started, as trusted code knows it.

    ``folders`` are those of its supervised commands, with their ``outcomes``; ``trainer`` says whether these were
    workers of a workload; ``worktree`` is the subject's checkout, which must be gone.
    """

    run: str
    attempt: int
    token: str
    folders: tuple[Path, ...]
    outcomes: tuple[Outcome, ...]
    leases: tuple[Lease, ...] = ()
    ports: tuple[int, ...] = ()
    worktree: Path | None = None
    trainer: bool = False
    provider: str = "process"


def take_receipt(
    footprint: Footprint,
    *,
    gpus: GpuWatch | None = None,
    containers: Callable[[], Sequence[Probe]] | None = None,
    check_leases: Callable[[], None] | None = None,
    reclaim_seconds: float = RECLAIM_SECONDS,
    recovered: bool = False,
) -> Receipt:
    """Probe everything in the footprint and return the receipt; retires the private compile caches on the way.

    ``gpus`` is the watch begun before the run, needed when a real GPU is leased; ``containers`` is the provider's
    probe; ``check_leases`` raises unless every lease is still in force. ``reclaim_seconds`` bounds the wait for GPU
    memory. Never raises for what it looks at: a probe that fails is ``unreadable``, which is not clean.
    """
    censuses = [census for folder in footprint.folders if (census := read_census(folder)) is not None]
    swept = tuple(process for outcome in footprint.outcomes for process in outcome.swept)
    seen = (*swept, *(process for outcome in footprint.outcomes for process in outcome.leftovers))
    container_probes = _containers(containers)  # first: what runs in containers is also in the process table
    left, process_probes = _processes(footprint, censuses, seen)
    probes = [
        *process_probes,
        *_gpus(footprint, gpus, reclaim_seconds),
        *container_probes,
        *_host(footprint),
        _lease(footprint, check_leases),
        _trainer(footprint, left),
    ]
    status, reason = fold(probes)
    return Receipt(
        run=footprint.run,
        attempt=footprint.attempt,
        status=status,
        swept=tuple(process for process in swept if process not in left),
        leftovers=left,
        probes=tuple(probes),
        leases=footprint.leases,
        exit_code=exit_code(footprint.outcomes),
        timed_out=any(
            o.ending in (Ending.TIMED_OUT, Ending.CLOSE_TIMED_OUT, Ending.SILENT) for o in footprint.outcomes
        ),
        taken_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        recovered=recovered,
        reason=reason,
        provider=footprint.provider,
    )


def fold(probes: Iterable[Probe]) -> tuple[ReceiptStatus, str | None]:
    """Return the status that the probes add up to, and why it is not CLEAN.

    DIRTY if anything read shows a leftover, even when another probe is unreadable; else UNVERIFIED if a required
    probe is unreadable or missing; else CLEAN.
    """
    given = list(probes)
    for status, answer in (
        (ProbeStatus.LEFTOVER, ReceiptStatus.DIRTY),
        (ProbeStatus.UNREADABLE, ReceiptStatus.UNVERIFIED),
    ):
        if found := [probe for probe in given if probe.status is status]:
            return answer, "; ".join(f"{probe.name}: {probe.reason or status.value}" for probe in found)
    if missing := [name for name in REQUIRED if name not in {probe.name for probe in given}]:
        return ReceiptStatus.UNVERIFIED, f"no probe of {', '.join(missing)}"
    return ReceiptStatus.CLEAN, None


def receipt_of_nothing(run: str, unreadable: Mapping[str, str]) -> Receipt:
    """Return the receipt of a run that was not started because these GPUs (UUID to reason) cannot be read."""
    empty = take_receipt(Footprint(run=run, attempt=1, token=run, folders=(), outcomes=()))
    status = ProbeStatus.UNREADABLE
    gpus = [
        Probe(
            name=name, source=GPU_SOURCE, status=status, duration_ms=0, values={"gpu": gpu}, reason=f"{gpu}: {reason}"
        )
        for gpu, reason in unreadable.items()
        for name in GPU_PROBES
    ]
    probes = (*gpus, *(probe for probe in empty.probes if probe.name not in GPU_PROBES))
    what = "; ".join(f"{gpu}: {reason}" for gpu, reason in unreadable.items())
    reason = f"nothing was started: {what}"
    return msgspec.structs.replace(empty, status=fold(probes)[0], probes=probes, reason=reason)


def status_of_lease(receipt: Receipt, lease: Lease) -> tuple[ReceiptStatus, str | None]:
    """Return the status with which one lease of a receipt ends: another card's trouble is not this card's."""
    return fold(probe for probe in receipt.probes if probe.values.get("gpu", lease.resource) == lease.resource)


def exit_code(outcomes: Iterable[Outcome]) -> int | None:
    """Return the first exit code that is not 0, else 0; None when a command has none or nothing was started."""
    codes = [outcome.exit_code for outcome in outcomes]
    return next((code for code in codes if code), None if None in codes or not codes else 0)


def _look(name: str, source: str, check: host.Check) -> Probe:
    """Run one check; what it raises makes the probe unreadable."""
    started = time.monotonic()
    values: host.Values = {}
    try:
        values, reason = check()
        status = ProbeStatus.LEFTOVER if reason else ProbeStatus.CLEAN
    except Exception as error:  # whatever goes wrong while looking, it was not seen to be clean
        status, reason = ProbeStatus.UNREADABLE, f"{type(error).__name__}: {error}"
    duration = round((time.monotonic() - started) * 1000)
    return Probe(name=name, source=source, status=status, duration_ms=duration, values=values, reason=reason)


def _not_applicable(name: str, source: str, reason: str, **values: str) -> Probe:
    status = ProbeStatus.NOT_APPLICABLE
    return Probe(name=name, source=source, status=status, duration_ms=0, values={**values}, reason=reason)


def _processes(
    footprint: Footprint, censuses: Sequence[Census], seen: Sequence[Process]
) -> tuple[tuple[Process, ...], list[Probe]]:
    left: list[Process] = []

    def check() -> tuple[host.Values, str | None]:
        if len(censuses) < len(footprint.folders):
            raise OSError("a supervisor left no census, so what it started is unknown")
        left.extend(host.leftover_processes(censuses, seen))
        groups = tuple(f"pid {entry.pid}" for entry in host.leftover_groups(seen) if not _known(entry.pid, left))
        if not left and not groups and _is_census_all(footprint, censuses):
            raise OSError("a supervisor was killed where no cgroup holds what it had started since its last census")
        names = tuple(host.describe(process) for process in left)
        gone = len([process for process in seen if process not in left])
        values: host.Values = {"swept": gone, "left": names, "left_in_sessions": groups}
        return values, f"still there: {', '.join((*names, *groups))}" if names or groups else None

    if not footprint.folders:
        return (), [_not_applicable("processes", "/proc", "nothing was started")]
    probe = _look("processes", "/proc", check)
    return tuple(left), [probe]


def _is_census_all(footprint: Footprint, censuses: Sequence[Census]) -> bool:
    """Whether the last census is all that is known of some command: its supervisor died and no scope contained it."""
    lost = any(outcome.ending is Ending.SUPERVISOR_LOST for outcome in footprint.outcomes)
    return lost and any(census.cgroup is None for census in censuses)


def _known(pid: int, processes: Iterable[Process]) -> bool:
    return any(process.pid == pid for process in processes)


def _containers(probe: Callable[[], Sequence[Probe]] | None) -> list[Probe]:
    found = list(probe()) if probe else []
    return found or [_not_applicable("containers", "Docker Engine", "no container was started")]


def _gpus(footprint: Footprint, watch: GpuWatch | None, seconds: float) -> list[Probe]:
    resources = [lease.resource for lease in footprint.leases]
    probes = [
        _not_applicable(name, GPU_SOURCE, "a virtual device leaves nothing on a GPU", gpu=resource)
        for resource in resources
        if is_virtual(resource)
        for name in GPU_PROBES
    ]
    real = [resource for resource in resources if not is_virtual(resource)]
    if not resources:
        return [_not_applicable(name, GPU_SOURCE, "no GPU was leased") for name in GPU_PROBES]
    if real and watch is not None:
        probes += watch.probes(seconds)
    return probes


def _host(footprint: Footprint) -> list[Probe]:
    def memory() -> tuple[host.Values, str | None]:
        known = [segment for outcome in footprint.outcomes for segment in outcome.segments]
        still = {segment.path for segment in remaining(known)} | set(host.shared_memory(footprint.token))
        sockets = host.sockets(footprint.token)
        removed = tuple(sorted({segment.path for segment in known} - still))
        left = (*sorted(still), *sockets)
        values: host.Values = {"removed": removed, "segments": tuple(sorted(still)), "sockets": sockets}
        return values, f"still there: {', '.join(left)}" if left else None

    def ports() -> tuple[host.Values, str | None]:
        left = host.listening(footprint.ports)
        return {"ports": tuple(map(str, footprint.ports))}, f"still listening: {', '.join(left)}" if left else None

    def caches() -> tuple[host.Values, str | None]:
        return {"retired": host.retire(footprint.folders)}, None

    def worktree() -> tuple[host.Values, str | None]:
        left = host.existing([footprint.worktree] if footprint.worktree else [])
        return {"worktree": str(footprint.worktree)}, f"still there: {', '.join(left)}" if left else None

    tables = ", ".join(map(str, host.TCP_TABLES))
    idle = "nothing was started"
    where = f"{host.SHARED_MEMORY}, {host.UNIX_SOCKETS}"
    return [
        _look_if(footprint.folders, "shared_memory", where, memory, idle),
        _look_if(footprint.ports, "ports", tables, ports, "no port was handed out"),
        _look_if(footprint.folders, "caches", "file system", caches, idle),
        _look_if(footprint.worktree, "worktree", "file system", worktree, "no worktree was made"),
    ]


def _look_if(used: object, name: str, source: str, check: host.Check, otherwise: str) -> Probe:
    return _look(name, source, check) if used else _not_applicable(name, source, otherwise)


def _lease(footprint: Footprint, check: Callable[[], None] | None) -> Probe:
    if not footprint.leases:
        return _not_applicable("lease", "lease store", "nothing was leased")

    def in_force() -> tuple[host.Values, str | None]:
        if check is None:
            raise OSError("nobody can say whether the lease is in force")
        check()
        return {"leases": tuple(f"{lease.resource} token {lease.token}" for lease in footprint.leases)}, None

    return _look("lease", "lease store", in_force)


def _trainer(footprint: Footprint, left: Sequence[Process]) -> Probe:
    source = "events.jsonl and /proc"
    if not footprint.trainer:
        return _not_applicable("trainer", source, "no trainer was started")
    return _look("trainer", source, lambda: closing([read_events(folder) for folder in footprint.folders], left))
