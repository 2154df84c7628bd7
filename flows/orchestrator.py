"""Which Prefect a flow runs on: the server that the environment names, or a temporary one of our own.

Call :func:`prepare` before anything imports Prefect, which reads its settings on import.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module

from qualification.home import home

_CHOSEN_BY_USER = ("PREFECT_API_URL", "PREFECT_HOME", "PREFECT_PROFILE", "PREFECT_PROFILES_PATH")
_ALWAYS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
}


def is_temporary() -> bool:
    """Whether no server is configured, so that Prefect starts a temporary one beside the flow."""
    return not any(os.environ.get(name) for name in _CHOSEN_BY_USER)


def describe() -> str:
    """Say in words which Prefect a flow would run on."""
    if is_temporary():
        return "temporary server (no PREFECT_API_URL)"
    return next(f"{name}={os.environ[name]}" for name in _CHOSEN_BY_USER if os.environ.get(name))


def prepare() -> bool:
    """Set Prefect's environment, once, and return whether its server will be a temporary one.

    No telemetry ever, and nothing of Prefect's own log on the terminal: what happens is told by the progress, and an
    error by one line. Without a configured server, a private folder.
    """
    temporary = is_temporary()
    for name, value in _ALWAYS.items():
        os.environ.setdefault(name, value)
    if temporary:
        os.environ["PREFECT_HOME"] = str(home() / "prefect")
        os.environ["PREFECT_LOGGING_TO_API_ENABLED"] = "false"
    return temporary


@contextmanager
def on_prefect(meanwhile: Callable[[], object]) -> Iterator[None]:
    """Run flows on the configured server, or on one of our own that lasts as long as this process.

    ``meanwhile`` is called before Prefect is imported, while a server of our own starts; what it raises ends the
    context before it began. On our own server the flow's heartbeat is off: its thread costs a second at the end, and
    only a lasting server reads it.
    """
    if not prepare():
        meanwhile()
        yield
        return
    from flows.temporary_server import start_server

    server = start_server(home())
    meanwhile()
    import_module("flows.qualify")  # takes a second, in which the server starts
    from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    server.wait()
    with temporary_settings({PREFECT_API_URL: server.url, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        yield
