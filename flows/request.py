"""What is asked of a qualification run, validated before anything is leased, provisioned or recorded."""

from __future__ import annotations

import getpass
import secrets
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Annotated

import msgspec

from qualification.errors import ConfigurationError
from qualification.git import require_commit, require_reference, require_repository
from qualification.parameters import check_parameters
from qualification.providers.choose import provider_for
from qualification.records import Figure, Ground
from qualification.rules import DEFAULT, RulesDocument, judged_workloads, load_rules

DEFAULT_TIMEOUT_SECONDS = 3600
DEFAULT_GRACE_SECONDS = 30
_DIGITS = 18


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One qualification: which source, which policy, what to run, on which ground, under which gate rules.

    ``head`` and ``repository`` absent mean the checkout that trainer_rank is imported from. ``workloads`` empty means
    those that the rules require. ``parameters`` go to every workload, and must be its own; ``timeout_seconds`` bounds
    each, and ``grace_seconds`` is the wait between TERM and KILL at the end. ``reference`` without a head means the
    commit that the reference names when the run starts. ``run`` names the run; absent, it gets a new name.
    ``image``, by digest, runs the workers in containers. ``once_a_day``: a run of the same commit, policy and rules
    in the last 20 hours is answered with that run.
    """

    head: str | None = None
    repository: str | None = None
    reference: str | None = None
    policy: str = "forecast"
    ground: Ground = Ground.REHEARSAL
    workloads: tuple[str, ...] = ()
    rules: str = DEFAULT
    parameters: dict[str, Figure] = {}
    requested_by: str | None = None
    timeout_seconds: Annotated[int, msgspec.Meta(ge=1)] = DEFAULT_TIMEOUT_SECONDS
    grace_seconds: Annotated[int, msgspec.Meta(ge=0)] = DEFAULT_GRACE_SECONDS
    run: Annotated[str, msgspec.Meta(pattern="^[0-9a-z][0-9a-z-]{7,63}$")] | None = None
    once_a_day: bool = False
    image: str | None = None


def read_request(given: Mapping[str, object]) -> Request:
    """Return a request from untyped parameters, strictly. Raises ConfigurationError naming field, value and rule."""
    try:
        return msgspec.convert(given, type=Request)
    except msgspec.ValidationError as error:
        rule, _, path = str(error).partition(" - at `$")
        name = path.removeprefix(".").rstrip("`").partition("[")[0].partition(".")[0]
        value = f" {given[name]!r}" if name in given else ""
        raise ConfigurationError(f"parameter {name or 'list'}{value}: {rule}") from None


def validate(request: Request) -> tuple[Request, RulesDocument]:
    """Return the request with every default filled in, and the gate rules it names.

    Raises ConfigurationError naming field, value and what is accepted.
    """
    rules = load_rules(request.rules)
    if request.head is not None:
        require_commit(request.head)
    if request.reference is not None:
        require_reference(request.reference)
    if request.repository is not None:
        if request.head is None and request.reference is None:
            raise ConfigurationError(f"repository {request.repository!r} is given without a head: give --head SHA too")
        require_repository(request.repository)
    provider_for(request.image)  # raises for an image that is not given by digest
    known = judged_workloads()
    workloads = request.workloads or tuple(dict.fromkeys(required.name for required in rules.rules.workloads))
    for name in workloads:
        if name not in known:
            raise ConfigurationError(f"workload {name!r} is not known: use one of {', '.join(sorted(known))}")
        check_parameters(name, request.parameters)
    if len(set(workloads)) < len(workloads):
        raise ConfigurationError(f"workloads {', '.join(workloads)}: one is named twice")
    filled = msgspec.structs.replace(
        request, workloads=workloads, requested_by=request.requested_by or getpass.getuser()
    )
    return filled, rules


def new_run() -> str:
    """Return the name of a new run: its start to the second, and chance against collisions."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(4)}"


def parse_parameters(pairs: Iterable[str]) -> dict[str, Figure]:
    """Return workload parameters given as ``NAME=VALUE``; whole numbers become integers, anything else stays text."""
    parameters: dict[str, Figure] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name.isidentifier() or not value or name in parameters:
            raise ConfigurationError(f"parameter {pair!r} is not NAME=VALUE with a name of its own")
        digits = value.removeprefix("-")
        short = len(digits) <= _DIGITS and digits.isascii() and digits.isdecimal()
        parameters[name] = int(value) if short else value
    return parameters
