"""The documentation names every command, exit code and environment variable, and says of each what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flows.cli.exits import ExitCode
from flows.cli.main import COMMANDS
from flows.cli.reference import reference

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCES = [
    path for package in ("trainer_rank", "qualification", "db", "flows") for path in (ROOT / package).rglob("*.py")
]
VARIABLE = re.compile(r"\b(?:QUALIFY|TRAINER_RANK)_[A-Z][A-Z_]*\b")


def test_the_command_reference_is_the_commands_own_help() -> None:
    assert (DOCS / "commands.md").read_text() == reference(), "run make docs"


def test_every_command_has_a_module_and_every_module_a_command() -> None:
    modules = {path.stem.partition("_")[0] for path in (ROOT / "flows/cli").glob("*.py")}  # tape_plot is part of tape
    assert modules - {"", "main", "exits", "reference"} == set(COMMANDS)


@pytest.mark.parametrize("code", list(ExitCode))
def test_every_exit_code_is_explained(code: ExitCode) -> None:
    assert f"| {code.value} |" in (DOCS / "exit-codes.md").read_text()


def test_exactly_the_environment_variables_that_the_code_reads_are_documented() -> None:
    used = {name for path in (*SOURCES, ROOT / "prefect.yaml") for name in VARIABLE.findall(path.read_text())}
    documented = set(VARIABLE.findall((DOCS / "settings.md").read_text()))
    assert documented == used


def test_links_between_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_commands_shown_in_the_readme_exist() -> None:
    shown = re.findall(r"^\$ (?:\.venv/bin/)?qualify ([a-z]+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert shown
    assert set(shown) <= set(COMMANDS)


def test_every_number_in_the_readme_s_tables_names_the_command_that_gives_it() -> None:
    for section in re.split(r"^## ", (ROOT / "README.md").read_text(), flags=re.MULTILINE):
        if section.startswith("Figures"):
            assert re.search(r"`(make bench|python -m bench|qualify)[^`]*`", section)
