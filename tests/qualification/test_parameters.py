"""What a workload reads is what it declares, and nothing else is accepted."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from qualification import workloads
from qualification.errors import ConfigurationError
from qualification.parameters import PARAMETERS, check_parameters, parameter
from qualification.rules import judged_workloads

FOLDER = Path(str(workloads.__file__)).parent
SHARED = {"ragged_requests": "full_step", "ragged_rows": "full_step"}
"""Functions that other workloads call, and the module that reads their parameters."""


def _read(workload: str) -> set[str]:
    """Return the names that a module reads; of a shared function those of its own lines."""
    text = (FOLDER / f"{workload}.py").read_text()
    names = set(re.findall(r'context\.parameter\("(\w+)"\)', text))
    for function, module in SHARED.items():
        if module != workload and f"{function}(" in text:
            body = (FOLDER / f"{module}.py").read_text().partition(f"def {function}(")[2].partition("\ndef ")[0]
            names |= set(re.findall(r'context\.parameter\("(\w+)"\)', body))
            text += body
    if "import" in text and "pressure import" in text:
        names |= _read("pressure")
    return names


@pytest.mark.parametrize("workload", sorted(judged_workloads()))
def test_a_workload_declares_exactly_what_it_reads(workload: str) -> None:
    assert _read(workload) == set(PARAMETERS[workload])


@pytest.mark.parametrize("workload", sorted(PARAMETERS))
def test_defaults_are_accepted_and_values_outside_are_not(workload: str) -> None:
    for name, declared in PARAMETERS[workload].items():
        check_parameters(workload, {name: declared.default})
        for value in (declared.least - 1, declared.most + 1):
            if value != declared.default:
                with pytest.raises(ConfigurationError, match=f"parameter {name} of workload {workload} is {value}"):
                    check_parameters(workload, {name: value})


def test_a_value_is_the_one_given_or_the_default() -> None:
    assert parameter("full_step", {"updates": 5}, "updates") == 5
    assert parameter("full_step", {}, "updates") == 3


def test_the_declaration_needs_neither_torch_nor_the_subject() -> None:
    code = "import sys, qualification.parameters as p; print({'torch', 'trainer_rank'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"set()\n"
