"""The gate's table in the documentation is the code's."""

from pathlib import Path

from qualification.gate import ADOPTION, CONDITIONS, REJECTIONS, TAMPERED
from qualification.reporting.gate import rules_table

PAGE = Path(__file__).parents[3] / "docs" / "gate.md"


def test_the_page_holds_the_table_that_the_command_prints() -> None:
    assert rules_table() in PAGE.read_text(), "replace the table in docs/gate.md by the output of: qualify gate table"


def test_the_table_names_every_row_once_in_the_order_in_which_they_are_looked_at() -> None:
    names = [line.split("`")[1] for line in rules_table().splitlines()[2:]]
    assert names == [row.name for row in (TAMPERED, *REJECTIONS, ADOPTION, *CONDITIONS)]
    assert rules_table().count("**adopted**") == 1
