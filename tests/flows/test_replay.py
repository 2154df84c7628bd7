"""``qualify replay`` makes a reported decision again, or says exactly what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.cli.main import execute
from tests.trainer_rank.reports.test_reports import _document
from trainer_rank.reports.report import bounded, canonical, identified


def _written(path: Path, document: object) -> str:
    path.write_bytes(canonical(document))  # type: ignore[arg-type]
    return str(path)


def test_the_same_decision_exits_0_another_3_and_a_lacking_report_4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = _document([10, 20], 1_000_000)
    same = _written(tmp_path / "same.json", document)
    other = identified(document | {"budget": document["budget"] | {"free": 5}})
    differs = _written(tmp_path / "differs.json", other)
    lacking = _written(tmp_path / "lacking.json", bounded(_document([7] * 3000, 1_000_000)))
    assert execute(["replay", same]) == 0
    assert "the same decision: admitted, whole fits" in capsys.readouterr().out
    assert execute(["replay", "--json", same, differs]) == 3
    rows = json.loads(capsys.readouterr().out)["reports"]
    assert [row["same"] for row in rows] == [True, False]
    assert execute(["replay", lacking]) == 4
    assert "missing: layout_inputs_unavailable" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"{"])
def test_what_is_no_report_exits_2(tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(content)
    assert execute(["replay", str(path)]) == 2
    assert capsys.readouterr().err.startswith("qualify: ")
    assert execute(["replay", str(tmp_path / "nowhere.json")]) == 2
