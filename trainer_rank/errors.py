"""Errors that a caller of trainer_rank may meet, one class per party who can act."""

from __future__ import annotations


class TrainerRankError(Exception):
    """Base of every error raised on purpose; its text says what happened, to what, and what to do."""


class InvalidInputError(TrainerRankError, ValueError):
    """The caller's requests, geometry or settings cannot be used as given."""


class UnsupportedError(TrainerRankError):
    """A topology, allocator setting or feature that the model of memory does not cover; named in the text."""


class TraceError(TrainerRankError, ValueError):
    """A trace file cannot be read; the text names the byte or the event."""


class TapeError(TrainerRankError, ValueError):
    """A tape cannot be fitted, loaded, or used for this target; the text gives the reason."""


class AdmissionRefused(TrainerRankError):  # noqa: N818 - the outcome is called "refused" everywhere
    """No candidate plan fits; the text names the largest term, the shortfall in bytes and two ways to make it fit."""


class AdmissionUnknown(AdmissionRefused):
    """No candidate is known to fit, and of at least one it is not known what it takes; the text names what to probe."""


class PlanningError(TrainerRankError):
    """Planning itself failed, on this rank or on a peer; the plan was not executed."""


class CheckpointError(TrainerRankError):
    """A checkpoint is missing, torn or altered; the previous group stays loadable."""
