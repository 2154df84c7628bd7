"""Where tree heads go besides the trust folder: plugins named in ``$QUALIFY_TREE_HEAD_SINKS``.

The variable holds ``module:argument`` entries separated by spaces. Each module has a function
``publish(head, envelope, argument)``; ``qualification.evidence.git_note:/path/to/repository`` is one that comes along.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module

from qualification.errors import ConfigurationError, QualificationError
from qualification.records import TreeHead

Publish = Callable[[TreeHead, bytes, str], None]


class TreeHeadSinkError(QualificationError):
    """A tree head lies in the trust folder, but could not be brought to another place that was asked for."""


def configured() -> tuple[tuple[str, Publish, str], ...]:
    """Return name, function and argument of each sink that the environment names.

    Raises ConfigurationError for one that cannot be loaded.
    """
    return tuple(_load(entry) for entry in os.environ.get("QUALIFY_TREE_HEAD_SINKS", "").split())


def publish(head: TreeHead, envelope: bytes) -> None:
    """Bring a signed head to every configured sink. Raises TreeHeadSinkError naming the first that fails."""
    for name, send, argument in configured():
        try:
            send(head, envelope, argument)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise TreeHeadSinkError(
                f"tree head {head.size} is signed and kept, but not brought to {name}: {reason}"
            ) from error


def _load(entry: str) -> tuple[str, Publish, str]:
    module, _, argument = entry.partition(":")
    try:
        send = import_module(module).publish
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"QUALIFY_TREE_HEAD_SINKS names {entry!r}, whose module has no publish: {error}"
        ) from None
    return entry, send, argument
