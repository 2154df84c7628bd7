"""A Prefect server for one run, in a session of its own: a terminal's Ctrl-C does not reach it, our death does."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from flows.temporary_app import SETTINGS
from qualification.errors import QualificationError
from qualification.execution.supervisor import TRUSTED

NEEDED_BYTES = 64 * 1024 * 1024
"""Free space that a run needs at least, for its raw data and evidence."""
_STARTUP_SECONDS = 120.0
"""A start takes two or three seconds of processor time, much longer on a busy machine."""
_ASK_SECONDS = 0.05
_PR_SET_PDEATHSIG = 1


class ServerError(QualificationError):
    """The temporary server cannot run here (exit 1)."""


def require_space(folder: Path) -> None:
    """Raise ServerError when the disk below ``folder`` is nearly full."""
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        raise ServerError(f"no space left: {free} B are free at {folder}, a run needs {NEEDED_BYTES} B; free some")


@dataclass(frozen=True)
class Server:
    """A server that was started and may not answer yet."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        """Return the URL of its API."""
        return f"http://127.0.0.1:{self.port}/api"

    def wait(self) -> None:
        """Wait until it answers. Raises ServerError when it ended or does not answer in time."""
        deadline = time.monotonic() + _STARTUP_SECONDS
        while time.monotonic() < deadline:
            if (code := self.process.poll()) is not None:
                raise ServerError(f"Prefect's temporary server ended with code {code}; its log is {self.log}")
            if _answers(self.port):
                return
            time.sleep(_ASK_SECONDS)
        raise ServerError(
            f"Prefect's temporary server did not answer within {_STARTUP_SECONDS:.0f} s; its log is {self.log}"
        )


@functools.cache
def start_server(folder: Path) -> Server:
    """Start this process's server, whose log is in ``folder``, unless it runs. It ends with the process."""
    folder.mkdir(parents=True, exist_ok=True)
    require_space(folder)
    port = _free_port()
    log_path = folder / "prefect-server.log"
    with log_path.open("wb") as log:
        process = _spawn(port, log.fileno())
    atexit.register(_stop, process)
    return Server(process, port, log_path)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _spawn(port: int, log: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "uvicorn", "--app-dir", str(TRUSTED), "--factory", "flows.temporary_app:create"),
            *("--host", "127.0.0.1", "--port", str(port), "--log-level", "error", "--lifespan", "on"),
        ],
        env={**os.environ, **SETTINGS},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        preexec_fn=_die_with_parent,  # noqa: PLW1509 - one call that takes no lock
    )


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _answers(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/api/health")
        return connection.getresponse().status == HTTPStatus.OK
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server at once: flows have told it everything by then, and it keeps nothing."""
    process.kill()
    process.wait()
