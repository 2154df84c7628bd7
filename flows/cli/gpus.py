"""``qualify gpus``: every device of this host, what it reads, and who holds it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from qualification.execution.inventory import take_inventory
from qualification.execution.leases import Holding, Resource
from qualification.execution.probes.gpus import GpuReader, occupancy, reading_problem
from qualification.execution.probes.nvml import GpuReading

SCHEMA = "qualify.gpus/1"


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One device. A figure is None where it could not be read; ``problem`` then says why."""

    uuid: str
    name: str | None
    virtual: bool
    total_bytes: int | None
    used_bytes: int | None
    processes: tuple[int, ...] | None
    problem: str | None
    quarantine: str | None
    baseline_bytes: int | None
    holder: Holding | None


def command(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False) -> None:
    """Show which device is held by whom.

    \b
    Examples:
      qualify gpus
      qualify gpus --json | jq '.devices[] | select(.holder)'
    """
    with GpuReader() as reader:
        reader.start()
        resources, holdings = _leases()
        inventory = take_inventory(reader)
    listed = [*inventory.gpus, *(GpuReading(uuid=name, name="virtual device") for name in inventory.virtual)]
    known = {reading.uuid for reading in listed}
    unseen = [name for name in (*resources, *holdings) if name not in known]
    listed += [GpuReading(uuid=name, errors={"device": "not on this host"}) for name in dict.fromkeys(unseen)]
    devices = [_device(reading, resources.get(reading.uuid), holdings.get(reading.uuid)) for reading in listed]
    if as_json:
        document = {"schema": SCHEMA, "devices": devices, "unreadable": inventory.unreadable}
        typer.echo(msgspec.json.encode(document))
        return
    typer.echo("\n".join(_lines(devices)))
    if inventory.unreadable:
        typer.echo(f"no GPU can be read here: {inventory.unreadable}", err=True)


def _leases() -> tuple[dict[str, Resource], dict[str, Holding]]:
    """Return what the database knows; nothing when there is no database yet."""
    from db.engine import database_url, open_for_reading
    from db.leases import DatabaseLeaseStore

    url = database_url()
    if url.get_backend_name() == "sqlite" and not Path(str(url.database)).exists():
        return {}, {}
    store = DatabaseLeaseStore(open_for_reading(url))
    return (
        {resource.name: resource for resource in store.resources()},
        {holding.lease.resource: holding for holding in store.holdings()},
    )


def _device(reading: GpuReading, resource: Resource | None, holder: Holding | None) -> Device:
    virtual = reading.name == "virtual device"
    baseline = resource.baseline_bytes if resource else None
    problem = None if virtual else reading_problem(reading) or (None if holder else occupancy(reading, baseline))
    unread = problem is not None and reading_problem(reading) is not None
    return Device(
        uuid=reading.uuid,
        name=reading.name,
        virtual=virtual,
        total_bytes=None if unread else reading.total_bytes,
        used_bytes=None if unread else reading.used_bytes,
        processes=None if reading.processes is None else tuple(process.pid for process in reading.processes),
        problem=problem,
        quarantine=resource.quarantine if resource else None,
        baseline_bytes=baseline,
        holder=holder,
    )


def _lines(devices: Sequence[Device]) -> list[str]:
    return [f"{device.uuid:44} {device.name or '-':24} {_state(device)}" for device in devices]


def _state(device: Device) -> str:
    if device.holder is not None:
        state = "expired, not yet recovered" if device.holder.expired else f"until {device.holder.expires_at}"
        return f"held by {device.holder.run} attempt {device.holder.attempt}, {state}"
    if device.quarantine is not None:
        return f"in quarantine: {device.quarantine}"
    return device.problem or "free"
