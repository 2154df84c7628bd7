"""Workloads: what is executed to qualify a policy, one module each; only the worker imports those modules."""

from __future__ import annotations

from collections.abc import Iterable

_DEVICES = {"device_release": 2, "context_parallel": 2}
_RANKS = {"context_parallel": 2}
_PROCESSES = {"resume": ("publish", "continue")}


def devices_needed(workloads: Iterable[str]) -> int:
    """Return how many devices must be leased at once to run these workloads one after another."""
    return max((_DEVICES.get(name, 1) for name in workloads), default=1)


def ranks_needed(workload: str) -> int:
    """Return how many ranks a workload has; each drives one of the leased devices, by its local rank."""
    return _RANKS.get(workload, 1)


def processes_of(workload: str) -> tuple[str, ...]:
    """Return the names of the fresh processes that run a workload one after another; most need one, without a name."""
    return _PROCESSES.get(workload, ("",))
