from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flows.cli.main import execute

ASSUMED = [word for name in ("expert-lora", "head", "optimizer", "40-layers", "ragged") for word in ("--assume", name)]


@pytest.fixture(autouse=True)
def _default_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = execute(["plan", *arguments, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "qualify.plan/1"
    return code, document


def test_incident_b_is_unknown_and_lists_every_uncovered_stage(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = plan(capsys, "incident-b", "--card", "h200")
    assert (code, document["outcome"], document["rung"]) == (4, "unknown", None)
    assert document["uncovered"] == ["expert-lora", "head", "optimizer", "40-layers", "ragged"]
    assert document["can_assume"].keys() == set(document["uncovered"])
    assert sorted(index for row in document["subforwards"] for index in row["requests"]) == list(range(19))
    assert all(
        type(row[key]) is int for row in document["subforwards"] for key in ("allocated", "reserved", "device_used")
    )
    assert document["card"] == {"name": "h200", "capacity": 150_109_880_320}


def test_incident_a_is_replanned_with_nothing_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = plan(capsys, "incident-a", "--card", "h200-incident")
    assert (code, document["outcome"], document["rung"], document["time_percent"]) == (0, "admitted", "rerun", 125)
    assert document["uncovered"] == document["assumed"] == []
    assert sorted(index for row in document["subforwards"] for index in row["requests"]) == list(range(19))
    assert all(row["bound"]["device_used"] <= 150_121_021_440 for row in document["subforwards"])


def test_under_assumptions_the_plan_and_the_assumptions_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = plan(capsys, "incident-b", *ASSUMED)
    assert (code, document["outcome"], document["rung"], document["uncovered"]) == (0, "admitted", "rerun", [])
    assert [each["name"] for each in document["assumed"]] == ["expert-lora", "head", "optimizer", "40-layers", "ragged"]
    assert execute(["plan", "incident-b", *ASSUMED]) == 0
    text = capsys.readouterr().out
    assert "admitted under 5 assumptions" in text
    assert text.count("assumed ") >= 5 and "125 % of the undivided plan's time" in text


def test_people_see_a_table_and_what_to_assume(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["plan", "incident-b"]) == 4
    out = capsys.readouterr().out
    assert "400,511" in out and "378,556" in out
    assert "--assume 40-layers" in out and "without expert-lora, head" in out


def test_a_batch_comes_from_a_file_or_standard_input(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = '{"lengths": [4096, 4096], "groups": [[1, 0]]}'
    (tmp_path / "batch.json").write_text(text)
    _, from_file = plan(capsys, str(tmp_path / "batch.json"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    _, from_input = plan(capsys, "-")
    assert from_file["subforwards"] == from_input["subforwards"]
    assert from_file["packed_tokens"] == 8192


def test_json_lines_give_one_document_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "two.jsonl").write_text('{"lengths": [64]}\n{"lengths": [128, 64]}\n')
    assert execute(["plan", str(tmp_path / "two.jsonl"), "--json"]) == 0
    one, two = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (one["packed_tokens"], two["packed_tokens"]) == (64, 192)


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        ('{"lengths":[]}', 2, "at least one request"),
        ('{"lengths":[0]}', 2, "request 0 has length 0"),
        ('{"lengths":[5,-1]}', 2, "request 1 has length -1"),
        ('{"lengths":[1]', 2, "line 1"),
        ('{"lengths":[9223372036854775807,9223372036854775807],"groups":[[0],[1]]}', 3, "9223372036854775807 tokens"),
    ],
)
def test_bad_batches_end_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, code: int, words: str
) -> None:
    (tmp_path / "batch.json").write_text(content)
    assert execute(["plan", str(tmp_path / "batch.json"), "--json"]) == code
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and words in captured.err
    assert "e+" not in captured.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.json"], "incident-a, incident-b"),
        (["incident-b", "--card", "h9000"], "h200"),
        (["incident-b", "--assume", "magic"], "40-layers"),
        (["incident-b", "--policy", "magic"], "forecast"),
        (["incident-b", "--capacity", "0"], "--capacity is 0"),
    ],
)
def test_a_wrong_name_is_answered_with_those_there_are(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert execute(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and words in captured.err


def test_a_card_smaller_than_the_model_exits_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["plan", "incident-a", "--capacity", "1000000"]) == 3
    captured = capsys.readouterr()
    assert (
        captured.err
        == "qualify: incident-a refused: the model's weights alone take 69321221376 B and the card has 1000000 B\n"
    )
    assert captured.out.startswith("incident-a: refused")


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize(
    "setting",
    ["backend:cudaMallocAsync", "expandable_segments:True", "max_split_size_mb:128", "roundup_power2_divisions:4"],
)
def test_other_allocator_settings_are_refused_by_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variable: str, setting: str
) -> None:
    monkeypatch.setenv(variable, setting)
    assert execute(["plan", "incident-b", "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and f"{variable}={setting}" in captured.err


def test_planning_imports_neither_torch_nor_prefect() -> None:
    """What keeps its start fast; `python -m bench startup` measures how fast."""
    program = (
        "import sys; from flows.cli.main import execute; code = execute(['plan', 'incident-b']); "
        "sys.exit(code != 4 or 'torch' in sys.modules or 'prefect' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
