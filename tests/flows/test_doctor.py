"""``qualify doctor`` names what is there, what is missing and what is in the way; it never guesses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.cli.main import execute


@pytest.fixture(autouse=True)
def _private_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUALIFY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("QUALIFY_TRUST", str(tmp_path / "trust"))


def _findings(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, str]]:
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "qualify.doctor/1"
    return {finding["name"]: finding for finding in document["findings"]}


def test_a_working_machine_has_no_problem(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert execute(["doctor", "--json"]) == 0
    found = _findings(capsys)
    assert found["QUALIFY_HOME"]["value"] == str(tmp_path / "home")
    assert found["database"]["value"].endswith("(created by the first run)")
    assert not (tmp_path / "home/evidence.db").exists()
    assert {"torch", "prefect", "git", "disk", "docker engine", "prefect mode"} <= set(found)


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(
    "setting",
    ["backend:cudaMallocAsync", "expandable_segments:True", "max_split_size_mb:128", "roundup_power2_divisions:4"],
)
def test_an_allocator_setting_that_the_model_does_not_cover_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variable: str, setting: str
) -> None:
    monkeypatch.setenv(variable, setting)
    assert execute(["doctor", "--json"]) == 2
    found = _findings(capsys)["allocator setting"]
    assert (found["health"], found["value"]) == ("problem", f"{variable}={setting}")


def test_a_database_that_is_not_one_is_a_problem(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/evidence.db").write_bytes(b"not a database" * 100)
    assert execute(["doctor", "--json"]) == 2
    assert _findings(capsys)["database"]["health"] == "problem"


def test_a_password_in_the_database_s_address_is_never_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUALIFY_DATABASE", "postgresql://qualify:secret@127.0.0.1:1/evidence")
    assert execute(["doctor"]) == 2
    shown = capsys.readouterr()
    assert "secret" not in shown.out + shown.err
    assert "127.0.0.1:1" in shown.out


def test_a_home_that_is_a_file_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QUALIFY_HOME", str(tmp_path / "file"))
    assert execute(["doctor"]) == 2
    assert (
        capsys.readouterr().err
        == f"qualify: QUALIFY_HOME={tmp_path}/file is not a folder; name a folder that may be created\n"
    )
