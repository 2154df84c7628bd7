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
from pathlib import Path

from qualification.errors import QualificationError

NEEDED_BYTES = 64 * 1024 * 1024
"""Free space that a run needs at least: the server's own database, and the run's raw data."""
_STARTUP_SECONDS = 120.0
"""The first start creates Prefect's own database, which takes tens of seconds on a slow disk."""
_STOP_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1


class ServerError(QualificationError):
    """The temporary server cannot run here (exit 1)."""


def require_space(folder: Path) -> None:
    """Raise ServerError when the disk below ``folder`` is nearly full."""
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        raise ServerError(f"no space left: {free} B are free at {folder}, a run needs {NEEDED_BYTES} B; free some")


@functools.cache
def temporary_server(folder: Path) -> str:
    """Start this process's server, whose log is in ``folder``, unless it runs; returns the URL of its API.

    It ends with the process, after Prefect has told it everything.
    """
    folder.mkdir(parents=True, exist_ok=True)
    require_space(folder)
    port = _free_port()
    log_path = folder / "prefect-server.log"
    with log_path.open("wb") as log:
        process = _spawn(port, log.fileno())
    atexit.register(_stop, process)
    _wait_until_healthy(process, port, log_path)
    return f"http://127.0.0.1:{port}/api"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _spawn(port: int, log: int) -> subprocess.Popen[bytes]:
    import prefect

    return subprocess.Popen(
        [
            *(sys.executable, "-m", "uvicorn", "--app-dir", str(Path(prefect.__file__).parent.parent), "--factory"),
            *("prefect.server.api.server:create_app", "--host", "127.0.0.1", "--port", str(port)),
            *("--log-level", "error", "--lifespan", "on"),
        ],
        env={**os.environ, "PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        preexec_fn=_die_with_parent,  # noqa: PLW1509 - one call that takes no lock
    )


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _wait_until_healthy(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    import httpx

    deadline = time.monotonic() + _STARTUP_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerError(f"Prefect's temporary server ended with code {process.returncode}; its log is {log}")
        try:
            if httpx.get(f"http://127.0.0.1:{port}/api/health", timeout=5).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise ServerError(f"Prefect's temporary server did not answer within {_STARTUP_SECONDS:.0f} s; its log is {log}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
