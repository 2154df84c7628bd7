"""Whether a head may run here: its code is executed, so a permitted person must have said so for exactly this commit.

A commit that the installed, trusted checkout has in its history or on its main branch needs no further word.
"""

from __future__ import annotations

from db.engine import reading
from db.permissions import permitted_by
from flows.recorder import Recorder
from flows.resolve import Resolved
from qualification.errors import ConfigurationError, NotPermittedError
from qualification.evidence.signing import utc_now
from qualification.evidence.trust import Trust, load_people
from qualification.git import git
from qualification.home import trust
from qualification.subject import installed_checkout

TRUSTED_REFERENCES = ("HEAD", "refs/heads/main", "refs/remotes/origin/main")


def require_permission(resolved: Resolved, recorder: Recorder) -> str:
    """Return why the subject may run, in words. Raises NotPermittedError when nobody allowed it."""
    if resolved.checkout is not None:
        return "the checkout at hand"
    commit = resolved.subject.commit
    if _is_trusted(commit):
        return "part of the installed checkout's history"
    with reading(recorder.engine) as connection:
        people = permitted_by(connection, commit, Trust.load(trust()), load_people(trust()), utc_now())
    if not people:
        raise NotPermittedError(
            f"nobody permitted {commit} to run here: a person with the role operator does, with qualify permit {commit}"
        )
    return f"permitted by {', '.join(people)}"


def _is_trusted(commit: str) -> bool:
    return any(_contains(reference, commit) for reference in TRUSTED_REFERENCES)


def _contains(reference: str, commit: str) -> bool:
    try:
        git(installed_checkout(), "merge-base", "--is-ancestor", commit, reference)
    except ConfigurationError:
        return False
    return True
