"""Gate rules: what a run must show before its policy may be adopted. A TOML document, strictly read, known by digest.

Thresholds are applied again by the gate to the recorded figures, so that a result cannot bring its own. Numbers with a
fraction are written as quoted decimals ("0.97"): rules hold no floats, so that their meaning has one form.
"""

from __future__ import annotations

import hashlib
import pkgutil
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable
from decimal import Decimal
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from qualification.errors import ConfigurationError
from qualification.figures import Unreadable, number
from qualification.parameters import check_parameters
from qualification.records import Ground, Record, Verdict
from qualification.verdict import Threshold

DEFAULT = "standard"
_Name = Annotated[str, msgspec.Meta(pattern="^[a-z][a-z0-9_-]*$", max_length=64)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]


class RulesError(ConfigurationError):
    """A rules document cannot be used; the text names the document, the place and the reason."""


class RequiredWorkload(Record, frozen=True):
    """A workload that must have PASSED on ``ground``, and the figures that it must have shown.

    ``parameters`` are those that it must have been given; none means that it ran with its own defaults.
    """

    name: _Name
    ground: Ground
    parameters: dict[str, int | str] = msgspec.field(default_factory=dict)
    criteria: tuple[Threshold, ...] = ()

    @property
    def label(self) -> str:
        """Return the name people use, for example ``full_step on native``."""
        return f"{self.name} on {self.ground.value}"


class Freshness(Record, frozen=True):
    """How old, in days, the start of a required workload may be when the gate decides."""

    days: _Positive


class ApprovalRules(Record, frozen=True):
    """How many distinct permitted people must approve, and for how many days at most an approval may be given."""

    people: _Positive
    valid_days: _Positive


class Rules(Record, frozen=True):
    """Everything the gate requires. ``probes`` lists, per provider, the cleanup probes that must have read CLEAN."""

    format: Literal[1]
    name: _Name
    description: str
    freshness: Freshness
    approvals: ApprovalRules
    workloads: tuple[RequiredWorkload, ...]
    probes: dict[_Name, tuple[_Name, ...]]


class RulesDocument(Record, frozen=True):
    """Rules with the bytes they were read from and the SHA-256 of those bytes, which approvals are bound to."""

    rules: Rules
    text: bytes
    sha256: str


def judged_workloads() -> frozenset[str]:
    """Return the workloads that this installation can both run and judge, from its modules; none is imported."""
    return frozenset(name for name in _modules("workloads") & _modules("criteria") if not name.startswith("_"))


def _modules(folder: str) -> set[str]:
    return {module.name for module in pkgutil.iter_modules([str(files("qualification") / folder)])}


def shipped_rules() -> tuple[str, ...]:
    """Return the names of the rules that come with this installation."""
    folder = files("qualification") / "rules"
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")))


def load_rules(name_or_path: str | Path = DEFAULT) -> RulesDocument:
    """Read shipped rules by name, or a document by path (anything that ends in ``.toml``).

    Raises:
        RulesError: unknown name, unreadable file, wrong key, type, unit or workload name.
    """
    text, origin = _read(str(name_or_path))
    return parse_rules(text, origin, judged_workloads())


def _read(name_or_path: str) -> tuple[bytes, str]:
    if name_or_path.endswith(".toml"):
        try:
            return Path(name_or_path).read_bytes(), name_or_path
        except OSError as error:
            raise RulesError(f"rules {name_or_path} cannot be read: {error.strerror}") from error
    if name_or_path not in shipped_rules():
        known = ", ".join(shipped_rules())
        raise RulesError(f"no gate rules are named {name_or_path!r}; known: {known}, or give the path of a .toml file")
    return (files("qualification") / "rules" / f"{name_or_path}.toml").read_bytes(), f"{name_or_path} (shipped)"


def parse_rules(text: bytes, origin: str, known_workloads: Collection[str] | None) -> RulesDocument:
    """Read a rules document strictly: no unknown key, no unknown workload, nothing listed twice, no float.

    An empty list of workloads is read, and can never adopt: the gate holds it. ``known_workloads`` None is for rules
    that were checked when a run was made: this installation may know other workloads by now.
    """
    try:
        rules = msgspec.convert(tomllib.loads(text.decode()), Rules)
        _check(rules, known_workloads)
    except (ValueError, msgspec.ValidationError, ConfigurationError) as error:
        raise RulesError(f"rules {origin}: {error}") from error
    return RulesDocument(rules=rules, text=text, sha256=hashlib.sha256(text).hexdigest())


def _check(rules: Rules, known_workloads: Collection[str] | None) -> None:
    for workload in rules.workloads:
        if known_workloads is not None and workload.name not in known_workloads:
            known = ", ".join(sorted(known_workloads)) or "none"
            raise ValueError(f"workload {workload.name!r} is not known; known: {known}")
        if known_workloads is not None:
            check_parameters(workload.name, workload.parameters)
        _refuse_twice(f"criteria of {workload.label}", (threshold.name for threshold in workload.criteria))
        for threshold in workload.criteria:
            _check_threshold(workload, threshold)
    _refuse_twice("workloads", (workload.label for workload in rules.workloads))
    for provider, probes in rules.probes.items():
        _refuse_twice(f"probes of {provider}", probes)


def _check_threshold(workload: RequiredWorkload, threshold: Threshold) -> None:
    where = f"{threshold.name} of {workload.label}"
    if threshold.shortfall is Verdict.PASSED:
        raise ValueError(f"the shortfall of {where} may not be PASSED")
    for field in ("value", "plausible_from", "plausible_to"):
        given = getattr(threshold, field)
        if given is not None and isinstance(read := number(given), Unreadable):
            raise ValueError(f"{field} of {where} {read.reason}")
    if not threshold.plausible(Decimal(threshold.value)):
        raise ValueError(f"the threshold of {where} lies outside its own plausible range")


def _refuse_twice(what: str, names: Iterable[str]) -> None:
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise ValueError(f"{what}: {twice[0]!r} is listed twice")
