"""Is there a recorded, unexpired permission of a permitted person to run this commit's code here?"""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection, select

from db.deciding import words_from
from db.models import permissions
from qualification.approvals import Action, moment, refusal
from qualification.evidence.trust import Person, Trust


def permitted_by(
    connection: Connection, commit: str, trust: Trust, people: Mapping[str, Person], now: str
) -> tuple[str, ...]:
    """Return the people whose permission to run ``commit`` is in force at ``now`` (UTC); empty: it may not run."""
    found = words_from(connection, select(permissions.c.sequence).where(permissions.c.commit == commit), trust)
    return tuple(
        dict.fromkeys(
            key.owner
            for word in found
            for key in word.signers
            if moment(word.approval.signed_at) <= moment(now) < moment(word.approval.expires_at)
            and refusal(key.owner, people, Action.PERMIT, now) is None
        )
    )
