"""The spool is private, bounded, idempotent, and whole whenever its writers are killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.trainer_rank.reports.test_reports import _document
from trainer_rank.reports import spool as spooling
from trainer_rank.reports.report import canonical, identified
from trainer_rank.reports.spool import Spool

WRITER = """
import sys
from pathlib import Path
from tests.trainer_rank.reports.test_reports import _document
from trainer_rank.reports.spool import Spool

spool, start = Spool(Path(sys.argv[1]), files=20), int(sys.argv[2])
print("begun", flush=True)
for step in range(start, start + 100000):
    spool.write(_document([10, 20], 100_000, step=step))
"""


def _names(folder: Path, ending: str) -> set[str]:
    return {path.name.removesuffix(ending) for path in folder.glob(f"*{ending}")}


def test_it_is_private_idempotent_and_bounded(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", files=3)
    first = _document([10], 100_000)
    assert spool.write(first) == spool.write(first) == first["id"]
    assert len(spool.reports()) == 1
    assert (tmp_path / "spool").stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in (tmp_path / "spool").iterdir())
    written = [spool.write(_document([10], 100_000, step=step)) for step in range(10, 15)]
    assert [path.name.split(".")[0] for path in spool.reports()] == written[-3:]
    assert len(list((tmp_path / "spool").iterdir())) == 6, "a projection beside each report and no draft"


def test_it_is_bounded_in_bytes_of_reports_and_projections_and_keeps_the_newest(tmp_path: Path) -> None:
    both = sum(len(canonical(_document([10], 100_000, step=10))) for _ in range(2))
    spool = Spool(tmp_path / "spool", size=3 * both)
    written = [spool.write(_document([10], 100_000, step=step)) for step in range(10, 20)]
    assert [path.name.split(".")[0] for path in spool.reports()][-1] == written[-1]
    assert 2 <= len(spool.reports()) <= 3
    assert sum(path.stat().st_size for path in (tmp_path / "spool").iterdir()) <= 3 * both
    tiny = Spool(tmp_path / "tiny", size=10)
    last = [tiny.write(_document([10], 100_000, step=step)) for step in range(3)][-1]
    assert [path.name for path in tiny.reports()] == [f"{last}.report.json"]


def test_killed_writers_leave_whole_reports_and_nothing_that_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "spool"
    chance = random.Random(3)
    writers = []
    for number in range(4):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), str(number * 100_000)], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        writers.append(writer)
        if number % 2:  # two at a time
            time.sleep(chance.uniform(0.05, 0.4))
            for each in writers:
                os.kill(each.pid, signal.SIGKILL)
                assert each.wait() == -signal.SIGKILL
            writers.clear()
            _check_whole(folder)
    (folder / ".draft-left").write_bytes(b"{")
    (folder / f"{'0' * 64}.projection.json").write_bytes(b"{}")
    spool = Spool(folder, files=20)
    spool.write(_document([10], 100_000, step=1))
    assert (folder / ".draft-left").exists(), "perhaps of a writer that is at work"
    monkeypatch.setattr(spooling, "ABANDONED_SECONDS", -1.0)
    last = spool.write(_document([10], 100_000, step=2))
    assert {path.name.split(".", 1)[1] for path in folder.iterdir()} == {"report.json", "projection.json"}
    assert _names(folder, ".report.json") == _names(folder, ".projection.json")
    assert len(spool.reports()) == 20
    assert spool.reports()[-1].name == f"{last}.report.json"


def _check_whole(folder: Path) -> None:
    for path in folder.glob("*.report.json"):
        document = json.loads(path.read_bytes())
        assert identified(document)["id"] == document["id"] == path.name.split(".")[0]
        projection = json.loads(path.with_name(f"{document['id']}.projection.json").read_bytes())
        assert projection["projection_of"] == document["id"]
        assert identified(projection)["id"] == projection["id"]
