"""Publish a decision as a commit status and record whether that worked; verdict and decision stay what they are."""

from __future__ import annotations

import os

from sqlalchemy import select

from db.deciding import Case
from db.engine import reading
from db.models import publications
from flows.recorder import Recorder
from qualification.errors import ConfigurationError
from qualification.evidence.signing import utc_now
from qualification.publication import Outcome, StatusApi, repository_of, status_of
from qualification.records import Publication

PUBLIC_API = "https://api.github.com"
API_VARIABLE, TOKEN_VARIABLE = "QUALIFY_STATUS_API", "QUALIFY_STATUS_TOKEN"


def after_a_run(case: Case, recorder: Recorder) -> str | None:
    """Publish if the environment names a token or an API, and say in words what came of it; a run never ends by it."""
    if TOKEN_VARIABLE not in os.environ and API_VARIABLE not in os.environ:
        return None
    try:
        return in_words(publish(case, recorder))
    except ConfigurationError as error:
        return f"not published: {error}"


def in_words(outcome: Outcome) -> str:
    """Say what came of publishing."""
    if not outcome.published:
        return f"not published: {outcome.reason}"
    return "published" if outcome.posted else "shown already"


def publish(case: Case, recorder: Recorder, repository: str | None = None) -> Outcome:
    """Show the decision on the commit that ran, and record what came of it unless that is recorded already.

    ``repository`` is OWNER/NAME; None takes it from the source's label. Raises ConfigurationError when neither says.
    """
    name = repository or repository_of(case.run.repository)
    status = status_of(case.inputs, case.ruling)
    api = StatusApi(os.environ.get(API_VARIABLE, PUBLIC_API), name, os.environ.get(TOKEN_VARIABLE))
    outcome = api.publish(case.run.commit, status)
    fact = Publication(
        run=case.run.run,
        commit=case.run.commit,
        context=status.context,
        state=status.state,
        description=status.description,
        published=outcome.published,
        published_at=utc_now(),
        reason=outcome.reason,
    )
    if not _recorded(recorder, fact):
        recorder.record([fact], None)
        recorder.seal()
    return outcome


def _recorded(recorder: Recorder, fact: Publication) -> bool:
    """Whether the newest publication of this commit and context says the same."""
    of_context = (publications.c.commit == fact.commit, publications.c.context == fact.context)
    says = ("state", "description", "published", "reason")
    query = select(*(publications.c[name] for name in says)).where(*of_context)
    with reading(recorder.engine) as connection:
        newest = connection.execute(query.order_by(publications.c.sequence.desc()).limit(1)).one_or_none()
    return newest is not None and tuple(newest) == tuple(getattr(fact, name) for name in says)
