"""What refuses a run is found while Prefect's server starts, and not after it."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import text

from db.engine import open_for_writing, writing
from flows import temporary_server
from flows.cli.main import execute
from tests.flows.subjects import Trainer


class Starting:
    """A server that has not answered yet; whoever waits for it has begun too late to look at the request."""

    def wait(self) -> None:
        raise AssertionError("the server was waited for")


@pytest.fixture(autouse=True)
def _a_server_is_starting(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PREFECT_API_URL", "PREFECT_HOME", "PREFECT_PROFILE", "PREFECT_PROFILES_PATH"):
        monkeypatch.setenv(name, "")  # so that it is restored to what it was before
    monkeypatch.setenv("PREFECT_LOGGING_TO_API_ENABLED", "false")
    monkeypatch.setattr(temporary_server, "start_server", lambda _: Starting())


def _refused(capsys: pytest.CaptureFixture[str], code: int, said: str, *arguments: str) -> None:
    assert execute(["run", *arguments]) == code
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_an_unknown_policy(capsys: pytest.CaptureFixture[str]) -> None:
    _refused(capsys, 2, "policy 'nobody-has-it' is not in the subject", "--policy", "nobody-has-it")


def test_a_dirty_repository_and_an_unpermitted_head(capsys: pytest.CaptureFixture[str], trainer: Trainer) -> None:
    asked = ("--repo", str(trainer.folder), "--head", trainer.head("raise RuntimeError('never')"))
    _refused(capsys, 7, "nobody permitted", *asked)
    (trainer.folder / "trainer_rank" / "left.py").touch()
    _refused(capsys, 2, "has uncommitted changes", *asked)


def test_a_database_from_a_newer_version(capsys: pytest.CaptureFixture[str]) -> None:
    engine = open_for_writing()
    with writing(engine) as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = 'ffffffffffff'"))
    engine.dispose()
    _refused(capsys, 2, "ffffffffffff")


def test_no_gpu_for_a_native_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/nowhere")
    _refused(capsys, 3, "no GPU for ground native", "--ground", "native")
