"""``qualify doctor``: what this machine has, what is missing, and what to do about it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from flows.cli.exits import ExitCode
from flows.orchestrator import describe
from flows.temporary_server import NEEDED_BYTES
from qualification.environment import installed_version
from qualification.errors import ConfigurationError, QualificationError
from qualification.home import home, trust

SCHEMA = "qualify.doctor/1"
_ENOUGH_BYTES = 5 << 30
_ENGINE_SECONDS = 5.0


class Health(StrEnum):
    """How a finding stands: fine, absent but not always needed, or in the way of every run."""

    FINE = "fine"
    ABSENT = "absent"
    PROBLEM = "problem"


class Finding(msgspec.Struct, frozen=True):
    """One thing looked at: what it is, how it stands, what was read, and what to do about it."""

    name: str
    health: Health
    value: str
    advice: str | None = None


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> int:
    """Say what this machine has, and what is missing.

    \b
    Exit code 0, or 2 when something is in the way of every run.

    \b
    Examples:
      qualify doctor
      PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True qualify doctor
    """
    findings = [finding for look in LOOKS for finding in look()]
    if as_json:
        typer.echo(msgspec.json.encode({"schema": SCHEMA, "findings": findings}))
    else:
        for finding in findings:
            advice = f"\n{'':38}{finding.advice}" if finding.advice else ""
            typer.echo(f"{finding.name:<28}{finding.health:<10}{finding.value}{advice}")
    return ExitCode.USAGE if any(finding.health is Health.PROBLEM for finding in findings) else ExitCode.PASSED


def _versions() -> Iterator[Finding]:
    yield Finding("python", Health.FINE, f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for package in ("trainer-rank-qualification", "torch", "prefect", "sqlalchemy", "docker"):
        found = installed_version(package)
        advice = None if found else f"pip install {package}"
        yield Finding(package, Health.FINE if found else Health.PROBLEM, found or "not installed", advice)


def _folders() -> Iterator[Finding]:
    for variable, folder in (("QUALIFY_HOME", home), ("QUALIFY_TRUST", trust)):
        path = folder()
        writable = os.access(path, os.W_OK | os.X_OK)
        advice = None if writable else f"set {variable} to a folder that you may write"
        yield Finding(variable, Health.FINE if writable else Health.PROBLEM, str(path), advice)
    free = shutil.disk_usage(home()).free
    roomy = free >= _ENOUGH_BYTES
    advice = None if roomy else f"free some space: a run keeps its raw data, keep {_ENOUGH_BYTES >> 30} GiB"
    health = Health.FINE if roomy else Health.ABSENT if free >= NEEDED_BYTES else Health.PROBLEM
    yield Finding("disk", health, f"{free / 2**30:.1f} GiB free", advice)


def _subject() -> Iterator[Finding]:
    from qualification.subject import installed_checkout, is_dirty

    try:
        root = installed_checkout()
    except ConfigurationError as error:
        yield Finding("checkout", Health.ABSENT, str(error), "give qualify run --repo and --head")
        return
    yield Finding("checkout", Health.FINE, f"{root}{' (uncommitted changes)' if is_dirty(root) else ''}")


def _git() -> Iterator[Finding]:
    found = shutil.which("git")
    if found is None:
        yield Finding("git", Health.PROBLEM, "not found", "install git: a subject is named by its commit")
        return
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout.strip()
    yield Finding("git", Health.FINE, said.removeprefix("git version "))


def _database() -> Iterator[Finding]:
    from db.engine import database_url, open_for_reading, stored_revision

    try:
        url = database_url()
        place = url.render_as_string(hide_password=True)
        if url.get_backend_name() == "sqlite" and not Path(str(url.database)).exists():
            yield Finding("database", Health.FINE, f"{place} (created by the first run)")
            return
        revision = stored_revision(open_for_reading(url))
    except QualificationError as error:
        yield Finding("database", Health.PROBLEM, str(error))
        return
    yield Finding("database", Health.FINE, f"{place}, schema {revision}")


def _gpus() -> Iterator[Finding]:
    from qualification.execution.probes.gpus import GpuReader, occupancy

    with GpuReader() as reader:
        answer = reader.ask("list")
    if answer.error:
        yield Finding("gpus", Health.ABSENT, f"unreadable: {answer.error}", "runs on the virtual device need no GPU")
    for gpu in answer.gpus:
        busy = occupancy(gpu, None)
        size = "unreadable" if gpu.total_bytes is None or gpu.mig else f"{gpu.total_bytes} B"
        yield Finding(
            "gpu", Health.ABSENT if busy else Health.FINE, f"{gpu.uuid} {gpu.name or 'unnamed'}, {size}", busy
        )


def _allocator() -> Iterator[Finding]:
    from trainer_rank.allocator.settings import unsupported_settings

    settings = unsupported_settings(os.environ)
    if not settings:
        yield Finding("allocator settings", Health.FINE, "covered by the allocator model")
    for setting in settings:
        yield Finding("allocator setting", Health.PROBLEM, setting, "unset it: the allocator model does not cover it")


def _engine() -> Iterator[Finding]:
    found = shutil.which("docker")
    said = ""
    if found:
        asked = [found, "version", "--format", "{{.Server.Version}}"]
        try:
            done = subprocess.run(asked, capture_output=True, text=True, timeout=_ENGINE_SECONDS, check=False)
            said = done.stdout.strip() if done.returncode == 0 else ""
        except subprocess.TimeoutExpired:
            said = ""
    advice = None if said else "only runs with the provider docker need it"
    yield Finding("docker engine", Health.FINE if said else Health.ABSENT, said or "not reachable", advice)


def _prefect() -> Iterator[Finding]:
    yield Finding("prefect mode", Health.FINE, describe())


LOOKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    *(_versions, _folders, _subject, _git, _database, _gpus, _allocator, _engine, _prefect),
)
