"""Keep one container: create it, pass on its output and events, follow its state, remove it. ``docker_keeper
KEEP.json``.

Runs below the supervisor like any other command: TERM from there ends the container, and the container's end is this
process's own exit code. An engine that is silent or restarted meanwhile is asked again until the supervisor has had
enough.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import docker.types
import msgspec

import docker
from qualification.execution.files import write_durably
from qualification.execution.streams import EVENTS_VARIABLE
from qualification.execution.supervision import Command
from qualification.execution.sweep import TOKEN_VARIABLE
from qualification.providers.docker import (
    RUN_LABEL,
    TOKEN_LABEL,
    UNREACHABLE,
    USER,
    Keep,
    Kept,
    engine,
    remove,
    state_of,
)

POLL_SECONDS = 0.3
STOP_SECONDS = 5.0
"""Between TERM and KILL inside the container; shorter than the supervisor's own wait, so that the keeper removes it."""
DRAIN_SECONDS = 2.0
NOT_STARTED, ENGINE_LOST = 125, 124
INSIDE_EVENTS = 9
_HOST_ONLY = frozenset({"PATH", "HOME", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "TMPDIR", "SHELL"})
OPEN_EVENTS = 'exec {fd}>"$QUALIFY_EVENTS_PIPE"; export QUALIFY_EVENTS_FD={fd}; exec "$@"'


class Keeper:
    """One container from creation to removal."""

    def __init__(self, keep: Keep, client: docker.DockerClient) -> None:
        self.keep, self.client = keep, client
        self.stop = threading.Event()
        self.ended = threading.Event()
        self.asked = False
        self.state: Kept | None = None
        self.events = Path(keep.place.folder) / f"{keep.place.name}.events"

    def run(self) -> int:
        """Run the container to its end and return the exit code that speaks for it."""
        signal.signal(signal.SIGTERM, lambda *_: self.stop.set())
        try:
            created = self.client.api.create_container(**self.settings())
        except UNREACHABLE as error:
            sys.stderr.write(f"docker: the container was not created: {error}\n")
            return NOT_STARTED
        self.note(Kept(id=created["Id"], status="created"))
        events = threading.Thread(target=self.pass_events, daemon=True)
        events.start()
        try:
            stream = self.client.api.attach(
                created["Id"], stream=True, demux=True
            )  # before the start: nothing is missed
            self.client.api.start(created["Id"])
        except UNREACHABLE as error:
            sys.stderr.write(f"docker: the container was not started: {error}\n")
            return self.end(NOT_STARTED)
        follower = threading.Thread(target=self.pass_output, args=(stream,), daemon=True)
        follower.start()
        code = self.end(self.follow())
        follower.join(DRAIN_SECONDS)
        self.ended.set()
        events.join(DRAIN_SECONDS)
        return code

    def follow(self) -> int:
        """Watch the container until it has ended or is to end."""
        stop_at: float | None = None
        while True:
            try:
                item = self.look()
            except docker.errors.NotFound:
                return ENGINE_LOST
            if item is not None and (state := state_of(item)).exit_code is not None:
                return 137 if state.oom_killed else state.exit_code or 0
            if self.stop.is_set():
                stop_at = stop_at or time.monotonic() + STOP_SECONDS
                self.ask_to_stop()
                if time.monotonic() >= stop_at:
                    return 128 + signal.SIGTERM
            time.sleep(POLL_SECONDS)

    def look(self) -> dict[str, Any] | None:
        """Return the engine's view of the container now, None while it is silent; notes every change of state.

        Raises NotFound when the engine knows it no more.
        """
        assert self.state is not None
        try:
            item: dict[str, Any] = self.client.api.inspect_container(self.state.id)
        except docker.errors.NotFound:
            raise
        except UNREACHABLE:
            return None
        state = state_of(item)
        state = msgspec.structs.replace(state, paused=state.paused or self.state.paused)
        if state != self.state:
            self.note(state)
        return item

    def ask_to_stop(self) -> None:
        """Pass TERM on, once; a paused container has to be woken to hear it."""
        assert self.state is not None
        if self.asked:
            return
        self.asked = True
        try:
            if self.state.status == "paused":
                self.client.api.unpause(self.state.id)
            self.client.api.kill(self.state.id, signal=signal.SIGTERM)
        except UNREACHABLE as error:
            sys.stderr.write(f"docker: TERM was not passed on: {error}\n")

    def end(self, code: int) -> int:
        """Remove the container; its last state is on the disk before that."""
        assert self.state is not None
        try:
            remove(self.client, self.client.api.inspect_container(self.state.id))
        except docker.errors.NotFound:
            sys.stderr.write("docker: the container is gone: somebody else removed it\n")
            return code
        except UNREACHABLE as error:
            sys.stderr.write(f"docker: the container was not removed: {error}\n")
            return ENGINE_LOST
        self.note(msgspec.structs.replace(self.state, removed=True))
        return code

    def note(self, state: Kept) -> None:
        """Keep the newest state, durably."""
        self.state = state
        write_durably(Path(self.keep.state_file), msgspec.json.encode(state))

    def pass_output(self, stream: Iterable[tuple[bytes | None, bytes | None]]) -> None:
        """Copy the container's output to this process's own, until it ends or the engine goes away."""
        try:
            for output, error in stream:
                for descriptor, content in ((1, output), (2, error)):
                    if content:
                        os.write(descriptor, content)
        except UNREACHABLE as error:
            sys.stderr.write(f"docker: output is cut off: {error}\n")

    def pass_events(self) -> None:
        """Copy what the container writes into its event pipe to the supervisor's."""
        target = int(os.environ[EVENTS_VARIABLE]) if EVENTS_VARIABLE in os.environ else None
        source = os.open(self.events, os.O_RDWR | os.O_NONBLOCK)  # a writer of our own: the pipe never ends
        while select.select([source], [], [], POLL_SECONDS)[0] or not self.ended.is_set():
            try:
                content = os.read(source, 1 << 16)
            except BlockingIOError:
                continue
            if target is not None:
                os.write(target, content)

    def settings(self) -> dict[str, Any]:
        """Return what the engine is asked for: no privilege, no network, no socket, a read-only root, bounds."""
        place, command = self.keep.place, self.keep.command
        os.mkfifo(self.events, 0o622)
        self.events.chmod(0o622)
        writes = [*place.writes, str(self.events)]
        for path in writes:
            _give(Path(path))
        host = self.client.api.create_host_config(
            binds=[
                *(f"{path}:{path}:ro" for path in dict.fromkeys(place.reads)),
                *(f"{path}:{path}:rw" for path in writes),
            ],
            network_mode="none",
            read_only=True,
            tmpfs={"/tmp": "rw,size=1g"},  # noqa: S108 - inside the container
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            pids_limit=self.keep.processes,
            mem_limit=self.keep.memory_bytes,
            memswap_limit=self.keep.memory_bytes,
            shm_size=self.keep.shared_memory_bytes,
            log_config=docker.types.LogConfig(type="json-file", config={"max-size": "64m", "max-file": "1"}),
            device_requests=_devices(place.gpus),
        )
        return {
            "image": self.keep.image,
            "command": _inside(command),
            "environment": _environment(command, place.token, self.events),
            "labels": {TOKEN_LABEL: place.token, RUN_LABEL: place.run},
            "name": f"qualify-{place.token}-{place.name}",
            "user": f"{_user()}:{_user()}",
            "working_dir": "/tmp",  # noqa: S108
            "host_config": host,
        }


def _inside(command: Command) -> list[str]:
    words = ["python3" if word == sys.executable else word for word in command.words]
    return ["/bin/sh", "-c", OPEN_EVENTS.format(fd=INSIDE_EVENTS), "sh", *words]


def _environment(command: Command, token: str, events: Path) -> dict[str, str]:
    """Return the command's environment inside: the image's own PATH and home, everything else as on the host."""
    passed = {name: value for name, value in command.environment.items() if name not in _HOST_ONLY}
    return {**passed, "HOME": "/tmp", TOKEN_VARIABLE: token, "QUALIFY_EVENTS_PIPE": str(events)}  # noqa: S108


def _devices(gpus: tuple[str, ...]) -> list[docker.types.DeviceRequest]:
    return [docker.types.DeviceRequest(device_ids=list(gpus), capabilities=[["gpu"]])] if gpus else []


def _user() -> int:
    return os.geteuid() or USER


def _give(path: Path) -> None:
    """Let the container's user write what it may write."""
    if os.geteuid() == 0:
        for item in (path, *path.rglob("*")):
            os.chown(item, USER, USER)


def main() -> None:
    """Keep the container that the file on the command line describes."""
    keep = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Keep)
    try:
        with engine() as client:
            code = Keeper(keep, client).run()
    except UNREACHABLE as error:
        sys.stderr.write(f"docker: the engine does not answer: {error}\n")
        code = NOT_STARTED
    sys.stdout.flush()
    os._exit(code)  # the event thread waits in the pipe


if __name__ == "__main__":
    main()
