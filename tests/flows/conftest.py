"""One real Prefect server for the whole session, private folders per test, and people who may permit heads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from securesystemslib.signer import CryptoSigner

from flows.cli.main import execute
from tests.flows.subjects import Trainer

os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")


@pytest.fixture(scope="session")
def prefect_address() -> Iterator[str]:
    """Return the address of a running Prefect server."""
    from prefect.settings import PREFECT_API_URL
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=180):
        yield str(PREFECT_API_URL.value())


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Point home and trust at fresh folders and return the home."""
    monkeypatch.setenv("QUALIFY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("QUALIFY_TRUST", str(tmp_path / "trust"))
    return tmp_path / "home"


@pytest.fixture
def with_server(private: Path, prefect_address: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run flows on the session's server, with private folders; return the home."""
    monkeypatch.setenv("PREFECT_API_URL", prefect_address)
    return private


@pytest.fixture
def permit(private: Path, tmp_path: Path) -> Callable[[str], None]:
    """Return what an operator does to permit a head."""
    return lambda head: permitted_by_an_operator(head, tmp_path / "operator.pem", private.parent / "trust")


def permitted_by_an_operator(head: str, key: Path, trust: Path) -> None:
    """Sign the permission to run a head with the key of an operator, whom ``trust`` is told of first."""
    if not key.exists():
        signer = CryptoSigner.generate_ed25519()
        key.write_bytes(signer.private_bytes)
        key.chmod(0o600)
        trust.mkdir(parents=True, exist_ok=True)
        public = signer.public_key.keyval["public"]
        (trust / "people.toml").write_text(f'[people.olga]\nroles = ["operator"]\nkeys = ["{public}"]\n')
    assert execute(["permit", head, "--key", str(key)]) == 0


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    """Return a repository whose trainer_rank does what a test asks for."""
    return Trainer(tmp_path / "trainer")
