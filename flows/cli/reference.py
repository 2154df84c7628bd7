"""The reference of the command line as Markdown, from the commands' own help: ``python -m flows.cli.reference``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flows.cli.main import COMMANDS, build, load_command

WIDTH = 100
_HEAD = """# Commands

Written by `make docs` from the commands' own help; a test fails when the two differ.
[exit-codes.md](exit-codes.md) says what an exit code means, [settings.md](settings.md) which environment variables
count.
"""


def reference() -> str:
    """Return the help of ``qualify``, of every command and of every sub-command."""
    root = build()
    parts = [_HEAD, _block("qualify", root)]
    for name in COMMANDS:
        parts += [_block(path, command) for path, command in _below(f"qualify {name}", load_command(name))]
    return "\n".join(parts)


def _below(path: str, command: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - typer keeps its classes private
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from _below(f"{path} {name}", inner)


def _block(path: str, command: Any) -> str:  # noqa: ANN401
    context = command.context_class(command, info_name=path, terminal_width=WIDTH, max_content_width=WIDTH)
    lines = (line.rstrip() for line in command.get_help(context).splitlines())
    return f"## {path}\n\n```text\n{chr(10).join(lines)}\n```\n"


if __name__ == "__main__":
    print(reference(), end="")  # noqa: T201 - this is its output
