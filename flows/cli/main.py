"""The ``qualify`` command: names its commands, imports only the one in use, and turns errors into one line and a code.

A command module exposes either ``app``, a :class:`typer.Typer` with sub-commands, or ``command``, a function.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any

try:
    import typer
    from typer.core import TyperGroup
except ModuleNotFoundError:
    sys.exit(
        "qualify: only the library is installed; pip install 'trainer-rank-qualification[pipeline]' adds the command"
    )

from flows.cli.exits import ExitCode, for_error
from qualification.errors import QualificationError
from trainer_rank.errors import TrainerRankError

if TYPE_CHECKING:
    from typer._click import Command, Context, HelpFormatter

DISTRIBUTION = "trainer-rank-qualification"

COMMANDS = {
    "run": "Qualify a policy: run workloads, prove cleanup, record evidence, ask the gate.",
    "plan": "Forecast and plan a batch without a GPU.",
    "trace": "Check recorded allocator traces against the model of the allocator.",
    "tape": "Fit, show and check allocation tapes.",
    "replay": "Make a reported admission decision again, from nothing but the report.",
    "evidence": "List and show what was recorded.",
    "verify": "Walk the ledger and the blobs; find the first bad sequence.",
    "bundle": "Export evidence for someone else, or import it.",
    "gate": "Ask whether a policy may be adopted, and why.",
    "approve": "Sign your approval of a run's commit, evidence and gate rules.",
    "reject": "Sign your rejection of a run's commit and policy.",
    "hold": "Sign that a run's commit and policy shall wait.",
    "permit": "Sign the permission to run one commit's code here.",
    "gpus": "Show which device is held by whom.",
    "exec": "Run any command under the supervisor and print its receipt.",
    "sweep": "Close what a killed run left behind.",
    "trigger": "Start the deployment pr-head on a Prefect server and wait for it.",
    "db": "Look after the evidence database.",
    "doctor": "Say what this machine has, and what is missing.",
}
"""Every command and its summary, in the order of the help; its module is ``flows.cli.<name>``."""

EXAMPLES = """\b
Examples:
  qualify run                                  qualify the checkout at hand on the virtual device
  qualify gate explain                         why the newest run is held
  qualify plan incident-b --card h200          does this batch fit one H200?
  qualify trace check recording.json.gz        is the allocator model exact here?
  qualify verify                               is the evidence intact?
"""


@dataclass
class Invocation:
    """What the options before the command's name ask for."""

    debug: bool = False


class LazyCommands(TyperGroup):
    """A group that imports a command's module when that command is used, so that help and reading start fast."""

    def list_commands(self, ctx: Context) -> list[str]:  # noqa: ARG002 - the signature is typer's
        """Return the names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:  # noqa: ARG002
        """Import and return one command, or None when there is none of that name."""
        return load_command(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:  # noqa: ARG002
        """Write the list of commands from their summaries alone."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def load_command(name: str) -> Command:
    """Import the module of one command and return it ready to run, under its own name."""
    module = import_module(f"flows.cli.{name}")
    group: typer.Typer | None = getattr(module, "app", None)
    if group is None:
        group = typer.Typer()
        group.command(name=name)(module.command)
    group.rich_markup_mode = None
    group._add_completion = False
    command = typer.main.get_command(group)
    command.name = name
    command.short_help = COMMANDS[name]
    return command


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"qualify {version(DISTRIBUTION)}")
        raise typer.Exit


def _callback(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an unexpected error.")] = False,
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Decide with evidence whether a memory-admission policy for large-model training may be adopted."""
    del show_version
    context.obj.debug = debug


def build() -> Command:
    """Return the whole command."""
    application = typer.Typer(rich_markup_mode=None, add_completion=False)
    application.callback(cls=LazyCommands, epilog=EXAMPLES, no_args_is_help=True)(_callback)
    return typer.main.get_command(application)


def complain(error: BaseException) -> None:
    """Write one line about ``error`` to standard error."""
    foreseen = isinstance(error, QualificationError | TrainerRankError | OSError)
    text = str(error) if foreseen else f"unexpected {type(error).__name__}: {error} (--debug shows the traceback)"
    print(f"qualify: {' '.join(text.split())}", file=sys.stderr)  # noqa: T201 - this is the command line


def execute(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. Errors end as one line on standard error."""
    invocation = Invocation()
    try:
        outcome: Any = build().main(args=arguments, prog_name="qualify", standalone_mode=False, obj=invocation)
    except Exception as error:
        if hasattr(error, "format_message"):  # typer's usage errors; their classes are private to it
            _complain_about_usage(error)
            return ExitCode.USAGE
        if invocation.debug:
            traceback.print_exc()
        complain(error)
        return for_error(error)
    except KeyboardInterrupt:
        outcome = ExitCode.INTERRUPTED
    if outcome == ExitCode.INTERRUPTED:
        print("qualify: interrupted", file=sys.stderr)  # noqa: T201
    return outcome if isinstance(outcome, int) else ExitCode.PASSED


def _complain_about_usage(error: Any) -> None:  # noqa: ANN401
    context = getattr(error, "ctx", None)
    message = error.format_message()
    if not message.startswith("Usage:"):  # a command without its arguments shows its whole help
        hint = f"; see {context.command_path} --help" if context else ""
        message = f"qualify: {' '.join(message.split()).rstrip('.')}{hint}"
    print(message, file=sys.stderr)  # noqa: T201


def main() -> None:
    """Start the command line."""
    sys.exit(execute())
