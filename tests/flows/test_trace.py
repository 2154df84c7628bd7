from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from flows.cli.main import execute

CASES = Path(__file__).parents[1] / "data" / "traces"
RECORDINGS = sorted(Path(str(files("trainer_rank.tapes").joinpath("recordings"))).glob("*.gz"))


def check(capsys: pytest.CaptureFixture[str], *paths: Path) -> tuple[int, list[dict[str, Any]], str]:
    code = execute(["trace", "check", "--json", *map(str, paths)])
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["schema"] == "qualify.trace.check/1"
    return code, document["files"], captured.err


def test_recordings_of_real_cards_are_exact_and_replayed_fast(capsys: pytest.CaptureFixture[str]) -> None:
    code, rows, err = check(capsys, *RECORDINGS)
    assert (code, err) == (0, "")
    assert [row["file"] for row in rows] == [str(path) for path in RECORDINGS]
    assert {row["exact"] for row in rows} == {True}
    assert {row["divergence"] for row in rows} == {None}
    assert rows[0].keys() >= {"peak_allocated", "peak_reserved", "events_per_second", "partial"}
    assert all(type(row["events_per_second"]) is int and row["events_per_second"] > 0 for row in rows)


def test_a_divergence_exits_3_and_names_the_event(capsys: pytest.CaptureFixture[str]) -> None:
    code, rows, err = check(capsys, *sorted(CASES.glob("A02_*.json")))
    assert (code, err) == (3, "")
    assert [row["divergence"] and row["divergence"]["event"] for row in rows] == [0, 2, None]
    assert [row["exact"] for row in rows] == [False, False, True]
    assert rows[0]["divergence"].keys() == {"event", "expected", "got"}


def test_an_unreadable_file_exits_2_with_one_line_and_the_others_are_still_checked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(RECORDINGS[0].read_bytes()[:30_000])
    code, rows, err = check(capsys, cut, RECORDINGS[1])
    assert code == 2
    assert err.count("\n") == 1 and str(cut) in err and "byte 30000" in err
    assert [row["exact"] for row in rows] == [False, True]
    assert rows[0]["peak_allocated"] is None


def test_an_unreadable_file_is_one_line_for_people_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "torn.json").write_text("{")
    os.mkfifo(tmp_path / "pipe")
    for name, words in (("torn.json", "byte"), ("pipe", "no regular file"), (".", "no regular file")):
        assert execute(["trace", "check", str(tmp_path / name)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == captured.err.count(str(tmp_path / name)) == 1
        assert words in captured.err


def test_a_history_that_contradicts_itself_is_called_incomplete(capsys: pytest.CaptureFixture[str]) -> None:
    _, rows, _ = check(capsys, CASES / "A02_history_started_late.json")
    assert "the trace is incomplete" in rows[0]["notes"][-1]
    execute(["trace", "check", str(CASES / "A02_history_started_late.json")])
    assert "the trace is incomplete" in capsys.readouterr().out


def test_people_get_a_table_and_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    code = execute(
        ["trace", "check", *map(str, [RECORDINGS[0], CASES / "A04_expandable.json", CASES / "A18_ends_in_oom.json"])]
    )
    out = capsys.readouterr().out.splitlines()
    assert code == 3
    assert out[0].split()[:2] == ["file", "result"]
    assert "exact" in out[1] and "14,336,811,008" in out[1]
    assert "diverges at event 0" in out[2]
    assert "exact up to out of memory" in out[3]
    assert "segment_map" in out[4]


def test_the_command_imports_neither_torch_nor_prefect() -> None:
    """What keeps its start fast; `python -m bench startup` measures how fast."""
    program = (
        "import sys; from flows.cli.main import execute; "
        f"code = execute(['trace', 'check', {str(CASES / 'A16_zero_bytes.json')!r}]); "
        "sys.exit(code or 'torch' in sys.modules or 'prefect' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
