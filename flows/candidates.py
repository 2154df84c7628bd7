"""Which devices a run may be given; whoever cannot be given any is refused before it stands in a queue."""

from __future__ import annotations

from qualification.errors import RefusedError
from qualification.execution.inventory import Inventory, requested, require_known, take_inventory
from qualification.execution.probes.gpus import GpuReader, reading_problem
from qualification.execution.probes.nvml import GpuReading
from qualification.records import Ground


def candidates(ground: Ground, reader: GpuReader, count: int) -> tuple[str, ...]:
    """Return the devices of this host among which ``count`` can be leased.

    Raises RefusedError when there are not that many, and ConfigurationError for a named one that is not here.
    """
    inventory = take_inventory(reader)
    if ground is Ground.REHEARSAL:
        return inventory.virtual
    named = requested(())
    require_known(named, inventory)
    gpus = named or tuple(gpu.uuid for gpu in inventory.gpus)
    if not gpus:
        raise RefusedError(
            f"no GPU for ground native: {inventory.unreadable or 'NVML lists none'}; nothing was started"
        )
    partitioned = _partitioned(gpus, inventory, reader)
    whole = tuple(uuid for uuid in gpus if uuid not in partitioned)
    if partitioned and (named or len(whole) < count):
        said = "; ".join(f"{uuid}: {problem}" for uuid, problem in partitioned.items())
        raise RefusedError(f"{said}; nothing was started")
    if len(whole) < count:
        raise RefusedError(f"{count} GPUs are needed at once and there are {len(whole)}; nothing was started")
    return whole


def _partitioned(gpus: tuple[str, ...], inventory: Inventory, reader: GpuReader) -> dict[str, str]:
    """Return the MIG devices among ``gpus``, and what is said of each."""
    known: dict[str, GpuReading] = {reading.uuid: reading for reading in inventory.gpus}
    readings = [known.get(uuid) or reader.read(uuid) for uuid in gpus]
    return {reading.uuid: reading_problem(reading) or "" for reading in readings if reading.mig}
