"""Bad input ends in one line and the right code; nothing is half recorded, and the evidence verifies afterwards."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import db.engine
from db.engine import open_for_writing, reading
from db.models import ledger
from flows.cli.main import execute
from flows.recorder import Recorder
from qualification.execution.inventory import virtual_devices
from tests.flows.subjects import Trainer
from tests.qualification.repositories import make_repository

Permit = Callable[[str], None]
SHORT = "0123456"


@pytest.fixture
def recorded(private: Path) -> Path:
    """Give a home that has an empty ledger; afterwards it is still empty, and verifies."""
    Recorder().close()
    return private


def _one_line(capsys: pytest.CaptureFixture[str]) -> str:
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("qualify: ")]
    assert len(said) == 1, said
    return said[0]


def _assert_nothing_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    engine = open_for_writing()
    with reading(engine) as connection:
        assert connection.execute(ledger.select()).all() == []
    engine.dispose()
    assert execute(["verify"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run", "--workload", "nonsense"], 2, "workload 'nonsense' is not known"),
        (["run", "--workload", "full_step", "--workload", "full_step"], 2, "named twice"),
        (["run", "--head", SHORT], 2, "all 40 hexadecimal digits"),
        (["run", "--head", "A" * 40], 2, "in lower case"),
        (["run", "--head", "--upload-pack=x"], 2, "not a commit id"),
        (["run", "--repo", "."], 2, "without a head"),
        (["run", "--head", "0" * 40, "--repo", "file:///etc"], 2, "neither a local folder"),
        (["run", "--rules", "nonsense"], 2, "no gate rules are named 'nonsense'"),
        (["run", "--ground", "elsewhere"], 2, "'elsewhere' is not one of"),
        (["run", "--parameter", "updates"], 2, "not NAME=VALUE"),
        (
            ["run", "--parameter", "foo=1"],
            2,
            "parameter foo is not known to workload full_step; it takes updates, batches",
        ),
        (["run", "--parameter", "lengths=0"], 2, "parameter lengths is not known"),
        (["run", "--parameter", "capacity=-1"], 2, "capacity of workload full_step is -1"),
        (["run", "--parameter", "capacity=1000000000"], 2, "1400000000 to 150109880320, or 0"),
        (["run", "--parameter", "capacity=1" + "0" * 15], 2, "capacity of workload full_step is 1" + "0" * 15),
        (["run", "--parameter", "updates=1" + "0" * 5000], 2, "updates of workload full_step"),
        (
            ["run", "--parameter", "updates=many"],
            2,
            "updates of workload full_step is 'many'; give a whole number of 1",
        ),
        (["run", "--parameter", "shortest=161"], 2, "shortest of workload full_step is 161, above longest 160"),
        (["run", "--timeout", "0"], 2, "timeout"),
        (["trace", "check", "no-such-file.json"], 2, "no-such-file.json"),
        (["plan", "no-such-batch.json"], 2, "no-such-batch.json"),
        (["plan", "/tmp"], 2, "/tmp: is no regular file"),
        (["plan", ""], 2, "is no regular file"),
        (["gate", "check", "no-such-run"], 2, "no-such-run"),
        (["evidence", "show", "no-such-run"], 2, "no-such-run"),
    ],
)
def test_wrong_requests(
    recorded: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    assert execute(arguments) == code
    assert words in _one_line(capsys)
    _assert_nothing_recorded(capsys)


@pytest.mark.parametrize("lengths", ["[]", "[0]", "[-1]", "[1.5]", '["8"]', "[null]", "[true]"])
def test_lengths_that_no_batch_has(
    recorded: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, lengths: str
) -> None:
    batch = tmp_path / "batch.json"
    batch.write_text(f'{{"lengths": {lengths}, "groups": [[0]]}}')
    assert execute(["plan", str(batch), "--card", "h200"]) == 2
    assert _one_line(capsys)
    _assert_nothing_recorded(capsys)


@pytest.mark.parametrize("form", ["{}", "{}\n{}"])
def test_a_key_given_twice_in_a_batch(
    recorded: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, form: str
) -> None:
    batch = tmp_path / "batch.json"
    batch.write_text(form.replace("{}", '{"lengths": [8], "lengths": [16]}'))
    assert execute(["plan", str(batch), "--card", "h200"]) == 2
    assert "key 'lengths' is given twice" in _one_line(capsys)


@pytest.mark.parametrize("content", [b"", b"{", b"\x1f\x8b\x08\x00trunc", b"[]", b'{"before": []}'])
def test_traces_that_cannot_be_read(
    recorded: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes
) -> None:
    trace = tmp_path / "trace.json"
    trace.write_bytes(content)
    assert execute(["trace", "check", str(trace)]) == 2
    assert _one_line(capsys)
    _assert_nothing_recorded(capsys)


def test_a_policy_that_is_not_built_is_refused_by_name(with_server: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Recorder().close()
    assert execute(["run", "--policy", "telepathy"]) == 2
    assert "policy 'telepathy' is not in the subject" in _one_line(capsys)
    _assert_nothing_recorded(capsys)


def test_a_dirty_repository_with_a_head(
    with_server: Path, trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    Recorder().close()
    head = trainer.head("pass")
    (trainer.folder / "trainer_rank/__init__.py").write_text("changed = True\n")
    assert execute(["run", "--head", head, "--repo", str(trainer.folder)]) == 2
    assert "uncommitted changes" in _one_line(capsys)
    _assert_nothing_recorded(capsys)


def test_a_commit_that_is_not_there(with_server: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Recorder().close()
    make_repository(tmp_path / "library")
    assert execute(["run", "--head", "0" * 40, "--repo", str(tmp_path / "library")]) == 2
    assert "gives no commit" in _one_line(capsys)
    _assert_nothing_recorded(capsys)


def test_native_without_a_gpu_is_refused_before_anything_starts(
    with_server: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Recorder().close()
    monkeypatch.setenv("LD_LIBRARY_PATH", "/nonexistent")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert execute(["run", "--ground", "native"]) == 3
    assert "no GPU for ground native" in _one_line(capsys)
    _assert_nothing_recorded(capsys)


def test_a_database_of_a_newer_schema_is_left_as_it_is(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recorded / "evidence.db"
    with sqlite3.connect(path) as connection:
        (version,) = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        connection.execute("UPDATE alembic_version SET version_num = 'ffffffffffff'")
    connection.close()
    before = path.read_bytes()
    for arguments in (["evidence", "list"], ["verify"], ["gate", "check"]):
        assert execute(arguments) == 2
        said = _one_line(capsys)
        assert "ffffffffffff" in said
        assert version in said
    assert path.read_bytes() == before


def test_a_database_that_stays_locked(
    recorded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db.engine, "LOCK_WAIT_SECONDS", 1)
    holder = sqlite3.connect(recorded / "evidence.db", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    try:
        assert execute(["exec", "--gpu", virtual_devices()[0], "--", "true"]) == 1
        assert "was locked by another process" in _one_line(capsys)
    finally:
        holder.execute("ROLLBACK")
        holder.close()
    _assert_nothing_recorded(capsys)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 3 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk takes root, which CI is")
def test_a_disk_that_fills_up_while_raw_data_are_kept(
    with_server: Path,
    small_disk: Path,
    permit: Permit,
    trainer: Trainer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QUALIFY_HOME", str(small_disk))
    body = "for i in range(3):\n    Path(given['recordings'], f'{i}.bin').write_bytes(os.urandom(1 << 20))\nos._exit(1)"
    head = trainer.head(body)
    permit(head)
    capsys.readouterr()
    assert execute(["run", "--head", head, "--repo", str(trainer.folder), "--json"]) == 1
    assert "no room" in _one_line(capsys)
    for path in (small_disk / "runs").rglob("*.bin"):
        path.unlink()
    assert execute(["verify"]) == 0
