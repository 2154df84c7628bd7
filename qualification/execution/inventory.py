"""Which devices this host has: GPUs by UUID, from NVML, and virtual ones. Absent and unreadable are told apart."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from qualification.errors import ConfigurationError
from qualification.execution.probes.gpus import VIRTUAL_PREFIX, GpuReader, is_virtual
from qualification.execution.probes.nvml import GpuReading
from qualification.records import Record

VIRTUAL_DEVICES = 2
VISIBLE = "CUDA_VISIBLE_DEVICES"


class Inventory(Record, frozen=True, kw_only=True):
    """What there is. ``unreadable`` says why no GPU could be listed; None when NVML answered."""

    gpus: tuple[GpuReading, ...]
    virtual: tuple[str, ...]
    unreadable: str | None


def take_inventory(reader: GpuReader) -> Inventory:
    """Return every device of this host."""
    answer = reader.ask("list")
    return Inventory(gpus=answer.gpus, virtual=virtual_devices(), unreadable=answer.error)


def virtual_devices(host: str | None = None) -> tuple[str, ...]:
    """Return the names of this host's virtual devices."""
    name = host or socket.gethostname()
    return tuple(f"{VIRTUAL_PREFIX}{name}:{index}" for index in range(VIRTUAL_DEVICES))


def requested(gpus: tuple[str, ...], environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the devices that a command asks for by UUID: the options', else those that CUDA_VISIBLE_DEVICES names.

    An index in the variable names no device for certain and gives none. Raises ConfigurationError for a device named
    twice.
    """
    named = gpus or tuple(
        item for item in environment.get(VISIBLE, "").split(",") if item.startswith(("GPU-", "MIG-", VIRTUAL_PREFIX))
    )
    if len(set(named)) < len(named):
        raise ConfigurationError(f"{', '.join(named)}: a device is named twice; name each once")
    return named


def require_known(names: tuple[str, ...], inventory: Inventory) -> None:
    """Raise ConfigurationError for a device that this host certainly does not have."""
    for name in names:
        known = inventory.virtual if is_virtual(name) else tuple(gpu.uuid for gpu in inventory.gpus)
        certain = is_virtual(name) or inventory.unreadable is None
        if certain and name not in known:
            here = ", ".join((*(gpu.uuid for gpu in inventory.gpus), *inventory.virtual))
            raise ConfigurationError(f"there is no device {name} here; name one of {here}")
