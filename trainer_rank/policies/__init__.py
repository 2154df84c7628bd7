"""Named admission and release settings as small documents. A policy is its document: the digest says which one."""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files
from typing import Any, TypeVar

from trainer_rank.errors import InvalidInputError, UnsupportedError


class HandOff(StrEnum):
    """When the cache is released between a forward and the caller's backward."""

    NEVER = "never"
    ALWAYS = "always"
    BELOW_THREE_PERCENT = "below-three-percent"
    COVERAGE = "coverage"


class Scope(StrEnum):
    """Which caches a release empties: those of every device of the process, or of the rank's own device alone."""

    PROCESS = "process"
    DEVICE = "device"


Choice = TypeVar("Choice", bound=StrEnum)


@dataclass(frozen=True)
class Policy:
    """A policy document: its name, the SHA-256 of its bytes, and its settings (bytes, tokens, shares per million).

    ``forecasts``: admit by recorded tapes; otherwise one group at a time, whole and unseen. ``counts_cached``: what
    cached blocks will serve of a plan need not be free. ``host_per_million``: how much of the available host memory
    graphs may be held in. ``claims_libraries``: keep free what libraries will take. ``release_on_refusal``: release the
    cache when nothing fits, and plan again. ``release_per_million``: how much of the forward work releases may cost,
    None without limit.
    """

    name: str
    sha256: str
    forecasts: bool
    ladder: tuple[str, ...]
    counts_cached: bool
    reserve_bytes: int
    caller_bytes_per_token: int
    host_per_million: int
    claims_libraries: bool
    collective_claim_bytes: int
    hand_off: HandOff
    release_on_refusal: bool
    release_per_million: int | None
    release_scope: Scope
    probe_lengths: tuple[tuple[int, ...], ...]
    residual_per_million: int
    report_error_percent: int


def policy_names() -> tuple[str, ...]:
    """Names of the policies that can be run."""
    return tuple(sorted(entry.name[:-5] for entry in files(__name__).iterdir() if entry.name.endswith(".toml")))


def load_policy(name: str) -> Policy:
    """Read a shipped policy by name. Raises UnsupportedError for a name that is not built."""
    if name not in policy_names():
        raise UnsupportedError(f"policy {name!r} is not built; choose of {', '.join(policy_names())}")
    return parse_policy(files(__name__).joinpath(f"{name}.toml").read_bytes())


def parse_policy(document: bytes) -> Policy:
    """Read a policy document: every setting once, none unknown. Raises InvalidInputError naming the setting."""
    try:
        content = tomllib.loads(document.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"policy document is not TOML: {error}") from error
    settings = _Settings(content)
    settings.expect("version", 1)
    policy = Policy(
        name=settings.take("name", str),
        sha256=hashlib.sha256(document).hexdigest(),
        forecasts=settings.take("admission.forecasts", bool),
        ladder=tuple(str(rung) for rung in settings.take("admission.ladder", list)),
        counts_cached=settings.take("admission.counts_cached", bool),
        reserve_bytes=settings.count("admission.reserve_bytes"),
        caller_bytes_per_token=settings.count("admission.caller_bytes_per_token"),
        host_per_million=settings.count("admission.host_per_million"),
        claims_libraries=settings.take("admission.claims_libraries", bool),
        collective_claim_bytes=settings.count("admission.collective_claim_bytes"),
        hand_off=settings.choice("release.hand_off", HandOff),
        release_on_refusal=settings.take("release.on_refusal", bool),
        release_per_million=settings.count("release.per_million") if settings.has("release.per_million") else None,
        release_scope=settings.choice("release.scope", Scope),
        probe_lengths=tuple(_lengths(each) for each in settings.take("probing.lengths", list)),
        residual_per_million=settings.count("probing.residual_per_million"),
        report_error_percent=settings.count("reports.error_percent"),
    )
    settings.finish()
    if policy.forecasts and (not policy.ladder or len(policy.probe_lengths) < 3):
        raise InvalidInputError(f"policy {policy.name}: give at least one rung and three probes")
    return policy


class _Settings:
    """The settings of a document by dotted name, each taken once."""

    def __init__(self, content: dict[str, Any]) -> None:
        self._left: dict[str, Any] = {}
        for name, value in content.items():
            if isinstance(value, dict):
                self._left |= {f"{name}.{key}": each for key, each in value.items()}
            else:
                self._left[name] = value

    def has(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, kind: type) -> Any:  # noqa: ANN401 - the type is the argument
        if name not in self._left:
            raise InvalidInputError(f"policy setting {name} is missing")
        value = self._left.pop(name)
        if type(value) is not kind:
            raise InvalidInputError(f"policy setting {name} is {value!r}; give a {kind.__name__}")
        return value

    def count(self, name: str) -> int:
        value: int = self.take(name, int)
        if value < 0:
            raise InvalidInputError(f"policy setting {name} is {value}; give at least 0")
        return value

    def choice(self, name: str, kind: type[Choice]) -> Choice:
        value = self.take(name, str)
        if value not in [each.value for each in kind]:
            raise InvalidInputError(f"policy setting {name} is {value!r}; choose of {', '.join(kind)}")
        return kind(value)

    def expect(self, name: str, value: object) -> None:
        found = self._left.pop(name, None)
        if found != value:
            raise InvalidInputError(f"policy setting {name} is {found!r}; this version reads {value!r}")

    def finish(self) -> None:
        if self._left:
            raise InvalidInputError(f"policy setting {min(self._left)} is not known; remove it")


def _lengths(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or any(type(each) is not int or each < 1 for each in value):
        raise InvalidInputError(f"policy setting probing.lengths holds {value!r}; give lists of whole numbers from 1")
    return tuple(value)
