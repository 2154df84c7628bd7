"""Errors that end a command with one line, one class per exit code; every other module subclasses these.

The text says what happened, to what, and what to do about it.
"""

from __future__ import annotations


class QualificationError(Exception):
    """Base of every error raised on purpose; as such, an operation that could not be done (exit 1)."""


class ConfigurationError(QualificationError):
    """The request, settings or an input cannot be used as given (exit 2)."""


class RefusedError(QualificationError):
    """The request is understood and refused, or what it asked for failed (exit 3)."""


class UnknownError(QualificationError):
    """The answer is held, unknown, inconclusive or incomplete (exit 4)."""


class TamperedError(QualificationError):
    """Evidence does not verify (exit 5); the text gives the first bad sequence."""


class NotCleanError(QualificationError):
    """Cleanup was not proved (exit 6)."""


class NotPermittedError(QualificationError):
    """No permitted person allowed this (exit 7)."""
