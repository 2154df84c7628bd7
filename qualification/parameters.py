"""The parameters of every workload: names, defaults and bounds, as data that needs no workload, torch or subject.

A request is held against them before anything is leased or recorded, and the worker takes its values from them.
"""

from __future__ import annotations

from collections.abc import Mapping

from qualification.errors import ConfigurationError
from qualification.records import Figure, Record


class Parameter(Record, frozen=True):
    """A whole number from ``least`` to ``most``; ``default`` is taken where it is not given, and always accepted."""

    default: int
    most: int
    least: int = 1

    def accepts(self, value: object) -> bool:
        """Say whether a given value may be used."""
        return type(value) is int and (value == self.default or self.least <= value <= self.most)

    @property
    def range(self) -> str:
        """Return what is accepted in words."""
        inside = self.least <= self.default <= self.most
        return f"{self.least} to {self.most}{'' if inside else f', or {self.default}'}"


_SEED = Parameter(default=593015, most=2**53 - 1)
_SHORTEST = Parameter(default=24, most=8192)
_LONGEST = Parameter(default=160, most=8192)
_REQUESTS = Parameter(default=4, most=256)
_FROZEN = Parameter(default=0, least=0, most=1)
_BATCH = {"requests": _REQUESTS, "shortest": _SHORTEST, "longest": _LONGEST, "seed": _SEED, "frozen": _FROZEN}

LEAST_CAPACITY, MOST_CAPACITY = 1_400_000_000, 150_109_880_320
"""Bytes: the reference model beside what libraries hold from the first backward on, and the H200's own capacity."""
_ROOMY = Parameter(default=2_600_000_000, least=2_000_000_000, most=MOST_CAPACITY)
_PRESSURE = {
    "capacity": _ROOMY,
    "left_free": Parameter(default=34_734_080, most=268_435_456),
    "demand": Parameter(default=8_388_608, most=67_108_864),
    **_BATCH,
    "requests": Parameter(default=2, most=256),
    "shortest": Parameter(default=2200, most=8192),
    "longest": Parameter(default=2600, most=8192),
}

PARAMETERS: Mapping[str, Mapping[str, Parameter]] = {
    "full_step": {
        "updates": Parameter(default=3, most=1000),
        "batches": Parameter(default=6, most=1000),
        **_BATCH,
        "capacity": Parameter(default=0, least=LEAST_CAPACITY, most=MOST_CAPACITY),
        "rank": Parameter(default=1, least=0, most=256),
        "dropout": Parameter(default=0, least=0, most=900_000),
    },
    "resume": {
        "updates": Parameter(default=2, most=1000),
        "batches": Parameter(default=2, most=1000),
        "requests": _REQUESTS,
        "shortest": _SHORTEST,
        "longest": _LONGEST,
        "seed": _SEED,
        "layers": Parameter(default=0, most=40),
    },
    "throughput": {"steps": Parameter(default=2, most=1000), **_BATCH},
    "pressure": _PRESSURE,
    "release_vs_observe": _PRESSURE,
    "device_release": {
        "capacity": _ROOMY,
        "cached": Parameter(default=134_217_728, most=268_435_456),
        "seed": _SEED,
    },
    "oversized": {
        "capacity": Parameter(default=1_500_000_000, least=LEAST_CAPACITY, most=MOST_CAPACITY),
        "scale": Parameter(default=64, most=100_000),
        "left_free": Parameter(default=4_194_304, most=33_554_432),
        "seed": _SEED,
    },
    "context_parallel": {
        "scale": Parameter(default=64, most=100_000),
        "capacity": Parameter(default=2_200_000_000, least=2_120_000_000, most=MOST_CAPACITY),
        "seed": _SEED,
        "rank": Parameter(default=1, most=256),
        "layers": Parameter(default=0, most=40),
    },
    "ballast": {
        "scale": Parameter(default=16, most=100_000),
        "levels": Parameter(default=6, least=2, most=64),
        "most_free": Parameter(default=640_000_000, most=100_000_000_000),
        "least_free": Parameter(default=40_000_000, most=100_000_000_000),
        "seed": _SEED,
    },
}
"""By workload; units are those that the workload's own text gives."""

_ORDERED = (("shortest", "longest"), ("least_free", "most_free"))


def check_parameters(workload: str, given: Mapping[str, Figure]) -> None:
    """Hold the parameters given to a workload against what it declares.

    Raises:
        ConfigurationError: an unknown name, a value out of its range, or bounds the wrong way round.
    """
    known = PARAMETERS.get(workload, {})
    for name, value in given.items():
        if name not in known:
            names = ", ".join(known) or "none"
            raise ConfigurationError(f"parameter {name} is not known to workload {workload}; it takes {names}")
        if not known[name].accepts(value):
            accepted = known[name].range
            raise ConfigurationError(
                f"parameter {name} of workload {workload} is {value!r}; give a whole number of {accepted}"
            )
    for low, high in _ORDERED:
        if low in known and (small := parameter(workload, given, low)) > (large := parameter(workload, given, high)):
            raise ConfigurationError(f"parameter {low} of workload {workload} is {small}, above {high} {large}")


def parameter(workload: str, given: Mapping[str, Figure], name: str) -> int:
    """Return the value of a declared parameter: the one given, or its default."""
    declared = PARAMETERS[workload][name]
    value = given.get(name, declared.default)
    return value if isinstance(value, int) else declared.default
