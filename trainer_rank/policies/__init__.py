"""Named admission settings as small documents. A policy is its document: the digest says which one was in force."""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from trainer_rank.errors import InvalidInputError, UnsupportedError


@dataclass(frozen=True)
class Policy:
    """A policy document: its name, the SHA-256 of its bytes, and its settings (bytes, tokens, shares per million)."""

    name: str
    sha256: str
    ladder: tuple[str, ...]
    reserve_bytes: int
    caller_bytes_per_token: int
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
    """Read a policy document. Raises InvalidInputError naming what is wrong in it."""
    try:
        content = tomllib.loads(document.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"policy document is not TOML: {error}") from error
    if content.pop("version", None) != 1:
        raise InvalidInputError("policy document is not of version 1; convert it")
    admission, probing, reports = (_table(content, name) for name in ("admission", "probing", "reports"))
    policy = Policy(
        name=_text(content, "name"),
        sha256=hashlib.sha256(document).hexdigest(),
        ladder=tuple(str(rung) for rung in admission.pop("ladder", ())),
        reserve_bytes=_count(admission, "reserve_bytes"),
        caller_bytes_per_token=_count(admission, "caller_bytes_per_token"),
        probe_lengths=tuple(_lengths(each) for each in probing.pop("lengths", ())),
        residual_per_million=_count(probing, "residual_per_million"),
        report_error_percent=_count(reports, "error_percent"),
    )
    left = [*content, *admission, *probing, *reports]
    if left:
        raise InvalidInputError(f"policy {policy.name}: unknown setting {left[0]}; remove it")
    if not policy.ladder or len(policy.probe_lengths) < 3:
        raise InvalidInputError(f"policy {policy.name}: give at least one rung and three probes")
    return policy


def _table(content: dict[str, Any], name: str) -> dict[str, Any]:
    table = content.pop(name, None)
    if not isinstance(table, dict):
        raise InvalidInputError(f"policy document has no table [{name}]")
    return dict(table)


def _text(content: dict[str, Any], name: str) -> str:
    value = content.pop(name, None)
    if not isinstance(value, str):
        raise InvalidInputError(f"policy setting {name} is missing or no text")
    return value


def _count(table: dict[str, Any], name: str) -> int:
    value = table.pop(name, None)
    if type(value) is not int or value < 0:
        raise InvalidInputError(f"policy setting {name} is {value!r}; give a whole number of at least 0")
    return value


def _lengths(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or any(type(each) is not int or each < 1 for each in value):
        raise InvalidInputError(f"policy setting lengths holds {value!r}; give lists of whole numbers of at least 1")
    return tuple(value)
