"""The command itself: help without imports, one line per error, the right code, the traceback only on request."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

from flows.cli.main import COMMANDS, execute
from qualification import errors

HINT = "(--debug shows the traceback)"


def _offer(monkeypatch: pytest.MonkeyPatch, error: BaseException | None, answer: int | None = None) -> None:
    def command() -> int | None:
        if error is not None:
            raise error
        return answer

    module = ModuleType("flows.cli.example")
    module.command = command  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flows.cli.example", module)
    monkeypatch.setitem(COMMANDS, "example", "An example.")


def _started(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = "import sys; from flows.cli.main import main; main()"
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)


def test_help_names_every_command_and_teaches_by_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in COMMANDS)
    assert "qualify gate explain" in shown


def test_help_imports_no_command() -> None:
    program = (
        "import sys; from flows.cli.main import execute; execute(['--help']); "
        "print(*sorted(name for name in sys.modules if name.startswith('flows.cli.') or name in ('torch', 'prefect')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].split() == ["flows.cli.exits", "flows.cli.main"]


def test_version_is_the_distribution_s() -> None:
    done = _started("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("qualify ")


@pytest.mark.parametrize("arguments", [["nonsense"], ["--nonsense"], ["\x1b]0;x\x07"], ["--", "nonsense"]])
def test_wrong_usage_is_one_line_and_exit_2(arguments: list[str]) -> None:
    done = _started(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("qualify: No such")
    assert done.stderr.count("\n") == 1


def test_without_arguments_the_whole_help_is_shown_on_standard_error() -> None:
    done = _started()
    assert (done.returncode, done.stdout) == (2, "")
    assert "Examples:" in done.stderr


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (errors.ConfigurationError("no such\nworkload"), 2, "qualify: no such workload"),
        (errors.TamperedError("sequence 3"), 5, "qualify: sequence 3"),
        (OSError(28, "No space left on device", "/x"), 1, "qualify: [Errno 28] No space left on device: '/x'"),
        (
            ZeroDivisionError("by zero"),
            1,
            f"qualify: unexpected ZeroDivisionError: by zero {HINT}",
        ),
        (KeyboardInterrupt(), 130, "qualify: interrupted"),
    ],
)
def test_an_error_ends_in_one_line_and_its_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, line: str
) -> None:
    _offer(monkeypatch, error)
    assert execute(["example"]) == code
    assert capsys.readouterr().err == f"{line}\n"


def test_the_traceback_is_shown_on_request(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _offer(monkeypatch, ZeroDivisionError("by zero"))
    assert execute(["--debug", "example"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(("answer", "code"), [(None, 0), (0, 0), (4, 4)])
def test_a_command_s_answer_is_the_exit_code(monkeypatch: pytest.MonkeyPatch, answer: int | None, code: int) -> None:
    _offer(monkeypatch, None, answer)
    assert execute(["example"]) == code
