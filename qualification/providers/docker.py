"""Commands in containers of a Docker Engine, each kept by a process under the supervisor (``providers.docker_keeper``).

The keeper creates, follows and removes its container, so that limits, logs, events and the sweep are those of every
other command. What a killed keeper leaves is found here by id and by label, and removed. The container sees neither the
engine's socket nor more of the host than its :class:`Place`; only the leased GPUs are requested, by UUID.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker.errors
import docker.types
import msgspec
import requests.exceptions

import docker
from qualification.errors import ConfigurationError
from qualification.execution.files import write_durably
from qualification.execution.supervision import Command
from qualification.execution.supervisor import TRUSTED
from qualification.providers.protocol import Place
from qualification.records import Count, Figure, Probe, ProbeStatus, Record

CALL_SECONDS = 10
TOKEN_LABEL = "qualify.token"  # noqa: S105 - a label's name
RUN_LABEL = "qualify.run"
KEEP_SUFFIX = ".container.json"
STATE_SUFFIX = ".state.json"
SOURCE = "Docker Engine"
UNREACHABLE = (docker.errors.DockerException, requests.exceptions.RequestException, OSError)
USER = 10001


class Keep(Record, frozen=True, kw_only=True):
    """What a keeper is asked to run: the command inside its container, and the bounds of that container."""

    image: str
    command: Command
    place: Place
    memory_bytes: Count
    processes: Count
    shared_memory_bytes: Count
    state_file: str


class Kept(Record, frozen=True, kw_only=True):
    """The last that a keeper knew of its container. ``removed`` says that the engine no longer knows it."""

    id: str
    status: str
    exit_code: int | None = None
    oom_killed: bool = False
    paused: bool = False
    error: str = ""
    removed: bool = False


@dataclass(frozen=True)
class DockerProvider:
    """Runs commands from one image, by digest (``name@sha256:...`` or ``sha256:...``), never by a tag that moves."""

    image: str
    memory_bytes: int = 64 << 30
    processes: int = 4096
    shared_memory_bytes: int = 1 << 30
    name: str = "docker"

    def __post_init__(self) -> None:
        digest = self.image.rpartition("sha256:")[2]
        if "sha256:" not in self.image or len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise ConfigurationError(f"image {self.image!r} is not given by digest; use NAME@sha256:... or sha256:...")

    def command(self, command: Command, place: Place) -> Command:
        """Return the keeper of a container that runs ``command``; writes what it shall do into the command's folder."""
        folder = Path(place.folder)
        keep = Keep(
            image=self.image,
            command=command,
            place=place,
            memory_bytes=self.memory_bytes,
            processes=self.processes,
            shared_memory_bytes=self.shared_memory_bytes,
            state_file=str(folder / f"{place.name}{STATE_SUFFIX}"),
        )
        path = folder / f"{place.name}{KEEP_SUFFIX}"
        write_durably(path, msgspec.json.encode(keep))
        return Command(
            words=(sys.executable, "-P", "-m", "qualification.providers.docker_keeper", str(path)),
            environment={
                **_engine_environment(),
                "PYTHONPATH": str(TRUSTED),
                "PATH": command.environment.get("PATH", ""),
            },
        )

    def failure(self, folder: Path) -> str | None:
        """Return why a container has no exit code of its own: never created, never started, or lost by the engine."""
        kept = read_states(folder)
        if kept and all(state.exit_code is not None for state in kept):
            return None
        logs = [folder / path.name.replace(KEEP_SUFFIX, ".stderr.log") for path in folder.glob(f"*{KEEP_SUFFIX}")]
        said = [line for log in logs for line in log.read_text(errors="replace").strip().splitlines()]
        return said[-1] if said else "the container has no exit code: its keeper was killed, or the engine lost it"

    def probe(self, token: str, folders: Sequence[Path]) -> list[Probe]:
        """Remove every container of the run and prove that none is left; see :func:`probe_containers`."""
        return probe_containers(token, folders)


def probe_containers(token: str, folders: Sequence[Path]) -> list[Probe]:
    """Remove every container of the run, by id and by label, and prove that the engine knows none any more."""
    started = time.monotonic()
    kept = [state for folder in folders for state in read_states(folder)]
    values: dict[str, Figure | bool | tuple[str, ...]] = {"containers": tuple(describe(state) for state in kept)}
    status, reason = ProbeStatus.CLEAN, None
    try:
        with engine() as client:
            ids = {state.id for state in kept}
            values["removed"] = tuple(remove(client, item) for item in find(client, token, ids))
            if left := [item["Id"][:12] for item in find(client, token, ids)]:
                status, reason = ProbeStatus.LEFTOVER, f"containers still there: {', '.join(left)}"
    except UNREACHABLE as error:
        status, reason = ProbeStatus.UNREADABLE, f"the engine did not answer: {_line(error)}"
    duration = round((time.monotonic() - started) * 1000)
    return [Probe(name="containers", source=SOURCE, status=status, duration_ms=duration, values=values, reason=reason)]


def engine() -> Any:  # noqa: ANN401 - the SDK has no usable types
    """Return a client of the engine that DOCKER_HOST names; every call is bounded. Raises DockerException."""
    return _Closing(docker.from_env(timeout=CALL_SECONDS))


class _Closing:
    def __init__(self, client: docker.DockerClient) -> None:
        self._client = client

    def __enter__(self) -> docker.DockerClient:
        return self._client

    def __exit__(self, *_: object) -> None:
        self._client.close()


def find(client: docker.DockerClient, token: str, ids: set[str]) -> list[dict[str, Any]]:
    """Return what the engine knows of the run's containers, by label and by id, whatever they are called now."""
    listed = client.api.containers(all=True, filters={"label": f"{TOKEN_LABEL}={token}"})
    found = {item["Id"] for item in listed} | ids
    states = []
    for identity in sorted(found):
        try:
            states.append(client.api.inspect_container(identity))
        except docker.errors.NotFound:
            continue
    return states


def remove(client: docker.DockerClient, item: dict[str, Any]) -> str:
    """Note a container's state, then end and remove it. Raises DockerException when the engine refuses."""
    state = state_of(item)
    if state.status == "paused":
        _try(client.api.unpause, state.id)
    _try(client.api.kill, state.id)
    _try(lambda identity: client.api.remove_container(identity, force=True, v=True), state.id)
    return describe(state)


def _try(call: Callable[[str], Any], identity: str) -> None:
    try:
        call(identity)
    except (docker.errors.NotFound, docker.errors.APIError) as error:
        if error.status_code not in (404, 409):  # gone already, or not in the state for it: the next look decides
            raise


def state_of(item: dict[str, Any]) -> Kept:
    """Return the engine's own words about a container from its inspection."""
    state = item["State"]
    ended = state["Status"] in ("exited", "dead")
    return Kept(
        id=item["Id"],
        status=state["Status"],
        exit_code=state["ExitCode"] if ended else None,
        oom_killed=bool(state.get("OOMKilled")),
        paused=bool(state.get("Paused")),
        error=state.get("Error", ""),
    )


def describe(state: Kept) -> str:
    """Return one line about a container."""
    words = [state.id[:12], state.status]
    words += [f"exit code {state.exit_code}"] if state.exit_code is not None else []
    words += [word for word, holds in (("OOM-killed", state.oom_killed), ("was paused", state.paused)) if holds]
    return " ".join([*words, *([state.error] if state.error else [])])


def read_states(folder: Path) -> list[Kept]:
    """Return what the keepers of a folder last knew."""
    return [msgspec.json.decode(path.read_bytes(), type=Kept) for path in sorted(folder.glob(f"*{STATE_SUFFIX}"))]


def _engine_environment() -> dict[str, str]:
    names = ("DOCKER_HOST", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH")
    return {name: os.environ[name] for name in names if name in os.environ}


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
