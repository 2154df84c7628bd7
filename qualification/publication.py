"""Show a decision as a commit status (GitHub's statuses API), once per content, on exactly the commit that ran.

Publishing is a courtesy: whatever the API answers, verdict and decision stay what they are. Equal content is not posted
again, because a commit holds 1,000 statuses per context and then refuses more for ever.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from qualification.errors import ConfigurationError
from qualification.gate import TAMPERED, GateInputs, Ruling
from qualification.records import Decision

MOST_CHARACTERS = 140
_STATES = {Decision.ADOPTED: "success", Decision.REJECTED: "failure", Decision.HELD: "pending"}
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_TIMEOUT_SECONDS = 10.0
_LONGEST_WAIT_SECONDS = 5.0
_MOST_BYTES = 4 << 20


class Status(msgspec.Struct, frozen=True):
    """A commit status: one context per policy, and a description that is equal for equal decisions."""

    context: str
    state: str
    description: str


class Outcome(NamedTuple):
    """``published``: the commit shows the status now. ``posted``: this call put it there. ``reason``: why not."""

    published: bool
    posted: bool
    reason: str | None = None


def status_of(inputs: GateInputs, ruling: Ruling) -> Status:
    """Return the status of a decision; held is pending, and error where the evidence does not verify."""
    state = "error" if ruling.row == TAMPERED.name else _STATES[ruling.decision]
    text = f"{ruling.decision.value}: {ruling.reasons[0]}"
    short = text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 1]}…"
    return Status(context=f"qualify/{inputs.policy}", state=state, description=short)


def repository_of(label: str) -> str:
    """Return owner/name of a repository on GitHub, given by its host and path."""
    host, _, path = label.partition("/")
    parts = path.removesuffix(".git").split("/")
    if host != "github.com" or len(parts) != 2 or not all(parts):
        raise ConfigurationError(f"{label} is not github.com/OWNER/NAME; name the repository with --repository")
    return path.removesuffix(".git")


class StatusApi:
    """GitHub's statuses API of one repository. The token is sent to ``base`` alone, and appears in no text."""

    def __init__(
        self, base: str, repository: str, token: str | None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        address = urlsplit(base)
        if address.scheme != "https" and not (address.scheme == "http" and address.hostname in _LOOPBACK):
            raise ConfigurationError(f"the API {address.hostname or base!r} must be reached by https")
        self._root = f"{base.rstrip('/')}/repos/{repository}"
        self._token, self._sleep = token, sleep
        self._opener = _opener()

    def publish(self, commit: str, status: Status) -> Outcome:
        """Post the status unless the commit shows the same one already. Never raises for what the API does."""
        try:
            shown = self._ask("GET", f"{self._root}/commits/{commit}/status?per_page=100")
            if _shows(shown, status):
                return Outcome(published=True, posted=False)
            self._ask("POST", f"{self._root}/statuses/{commit}", msgspec.to_builtins(status))
        except _RefusedError as refused:
            return Outcome(published=False, posted=False, reason=str(refused))
        return Outcome(published=True, posted=True)

    def _ask(self, method: str, address: str, body: object = None) -> object:
        """Return the answer; one failure of the server, or a short wait that it asks for, is tried once more."""
        try:
            return self._ask_once(method, address, body)
        except _RefusedError as refused:
            if refused.wait is None or refused.wait > _LONGEST_WAIT_SECONDS:
                raise
            self._sleep(refused.wait)
        return self._ask_once(method, address, body)

    def _ask_once(self, method: str, address: str, body: object) -> object:
        headers = {"Accept": "application/vnd.github+json", "Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(address, data=data, headers=headers, method=method)  # noqa: S310 - checked above
        try:
            with self._opener.open(request, timeout=_TIMEOUT_SECONDS) as answer:
                return json.loads(answer.read(_MOST_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                raise _RefusedError(f"the API answered {error.code} to {method}", _wait(error)) from None
        except (OSError, HTTPException, ValueError) as error:
            cause = getattr(error, "reason", error)
            raise _RefusedError(f"the API could not be used: {type(cause).__name__}", None) from None


class _RefusedError(Exception):
    """The API did not do it; ``wait`` is in how many seconds it may be tried again, None never."""

    def __init__(self, text: str, wait: float | None) -> None:
        super().__init__(text)
        self.wait = wait


def _opener() -> urllib.request.OpenerDirector:
    """Return an opener that follows no redirect: a request carries the token."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener


def _wait(error: urllib.error.HTTPError) -> float | None:
    if error.code >= 500:
        return 1.0
    given = error.headers.get("Retry-After", "") if error.code in (403, 429) else ""
    return float(given) if given.isdigit() else None


def _shows(answer: object, status: Status) -> bool:
    """Whether the newest status of this context, which the API lists first, is the same."""
    listed = answer.get("statuses") if isinstance(answer, dict) else None
    for one in listed if isinstance(listed, list) else []:
        if isinstance(one, dict) and one.get("context") == status.context:
            return (one.get("state"), one.get("description")) == (status.state, status.description)
    return False
