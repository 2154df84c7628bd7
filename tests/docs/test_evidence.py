"""docs/evidence.md names every kind of fact, with its schema, and every code that verification can give."""

from __future__ import annotations

from pathlib import Path

import pytest

from qualification.evidence.findings import EXPLANATIONS, Code
from qualification.evidence.schema_files import FOLDER
from qualification.evidence.statements import KINDS, PredicateType

PAGE = (Path(__file__).parents[2] / "docs" / "evidence.md").read_text()


@pytest.mark.parametrize("code", Code)
def test_every_code_is_on_the_page(code: Code) -> None:
    text = EXPLANATIONS[code].replace("$QUALIFY_TRUST", "`$QUALIFY_TRUST`")
    assert f"| `{code.value}` | {text} |" in PAGE


@pytest.mark.parametrize("kind", PredicateType)
def test_every_kind_of_fact_is_on_the_page_with_its_signer_and_schema(kind: PredicateType) -> None:
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{kind.short}` |") and "schemas" in line]
    assert f"schemas/{kind.short}.json" in line
    assert ("| pipeline |" in line) == (KINDS[kind].signer.value == "pipeline")
    assert (FOLDER / f"{kind.short}.json").is_file()
