"""Whose signed word counts on a run: roles and what they may do, and the weighing of approvals, rejections and holds.

An approval is bound to one commit, policy, evidence root and rules digest, and expires. It counts once per person, and
only from someone permitted who neither wrote the commit nor asked for the run. A rejection or hold speaks about commit
and policy whatever the evidence, and lasts until the same person approves. Deny by default.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from enum import StrEnum

from qualification.evidence.trust import KeyUse, Person, TrustedKey
from qualification.records import Approval, Commit, Count, Record, Sha256

NEVER = "9999-12-31T23:59:59Z"
"""When a rejection or a hold expires, unless its signer says otherwise."""


class Role(StrEnum):
    """What a person is here; each role may do what those before it may."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    APPROVER = "approver"
    ADMIN = "admin"


class Action(StrEnum):
    """What a person may want to do."""

    VIEW = "view"
    RUN = "run"
    PERMIT = "permit"
    APPROVE = "approve"
    REJECT = "reject"
    HOLD = "hold"
    MANAGE = "manage"


_LEAST_ROLE = {
    Action.VIEW: Role.VIEWER,
    Action.RUN: Role.OPERATOR,
    Action.PERMIT: Role.OPERATOR,
    Action.APPROVE: Role.APPROVER,
    Action.REJECT: Role.APPROVER,
    Action.HOLD: Role.APPROVER,
    Action.MANAGE: Role.ADMIN,
}
_RANK = {role: rank for rank, role in enumerate(Role)}


class Word(Record, frozen=True):
    """A person's statement as the ledger holds it: its sequence there, and the keys that verified its signatures."""

    sequence: Count
    approval: Approval
    signers: tuple[TrustedKey, ...]


class Matter(Record, frozen=True):
    """What is being decided, and whose word cannot count on it: the commit's authors and who asked for the run."""

    commit: Commit
    policy: str
    evidence_root: Sha256
    rules_sha256: Sha256
    valid_days: Count
    authors: tuple[str, ...]
    requested_by: tuple[str, ...]


class Weighed(Record, frozen=True):
    """Distinct people whose word counts now, by name; ``remarks`` say which words do not count, and why."""

    approved_by: tuple[str, ...] = ()
    rejected_by: tuple[str, ...] = ()
    held_by: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


def refusal(name: str, people: Mapping[str, Person], action: Action, now: str) -> str | None:
    """Return why ``name`` may not do ``action`` at ``now`` (UTC), or None when permitted."""
    person = people.get(name)
    if person is None:
        return f"{name} is not among the permitted people"
    if person.expires_at is not None and moment(person.expires_at) <= moment(now):
        return f"the permission of {name} expired at {person.expires_at}"
    unknown = [role for role in person.roles if role not in set(Role)]
    if unknown:
        return f"{name} has the unknown role {unknown[0]!r}"
    least = _LEAST_ROLE[action]
    if all(_RANK[Role(role)] < _RANK[least] for role in person.roles):
        held = ", ".join(person.roles) or "no role"
        return f"{name} is {held}; to {action.value} takes the role {least.value}"
    return None


def involvement(name: str, people: Mapping[str, Person], matter: Matter) -> str | None:
    """Return why ``name`` cannot approve this matter, whatever the role: its author, its requester, or unknown ones."""
    person = people.get(name)
    names = {name.casefold(), *(other.casefold() for other in (person.identities if person else ()))}
    if not matter.authors:
        return "who wrote the commit is unknown, so nobody can approve it as somebody else"
    if not matter.requested_by:
        return "who asked for the run is unknown, so nobody can approve it as somebody else"
    if any(author.casefold() in names for author in matter.authors):
        return f"{name} wrote the commit"
    if any(requester.casefold() in names for requester in matter.requested_by):
        return f"{name} asked for the run"
    return None


def weigh(words: Iterable[Word], people: Mapping[str, Person], matter: Matter, now: str) -> Weighed:
    """Weigh every recorded word on this commit and policy; each person's last word that applies is the one that counts.

    An approval that has expired, or is bound to other evidence or rules, does not apply, so that it cannot withdraw an
    earlier rejection either.
    """
    latest: dict[str, Action] = {}
    remarks: list[str] = []
    for word in sorted(words, key=lambda word: word.sequence):
        if (word.approval.commit, word.approval.policy) != (matter.commit, matter.policy):
            continue
        for name, why in _speakers(word, people, matter, now):
            if why is None:
                latest[name] = Action(word.approval.action)
            else:
                remarks.append(f"{word.approval.action} at sequence {word.sequence} does not count: {why}")
    return Weighed(
        approved_by=_who(latest, Action.APPROVE),
        rejected_by=_who(latest, Action.REJECT),
        held_by=_who(latest, Action.HOLD),
        remarks=tuple(remarks),
    )


def _who(latest: Mapping[str, Action], action: Action) -> tuple[str, ...]:
    return tuple(sorted(name for name, said in latest.items() if said is action))


def _speakers(word: Word, people: Mapping[str, Person], matter: Matter, now: str) -> Iterator[tuple[str, str | None]]:
    """Yield each distinct person who signed, with why the word does not count from them (None: it counts)."""
    action = word.approval.action
    if action not in {Action.APPROVE, Action.REJECT, Action.HOLD}:
        return
    persons = dict.fromkeys(key.owner for key in word.signers if key.use is KeyUse.PERSON)
    if not persons:
        yield word.approval.person, "no permitted person's key signed it"
    if persons and word.approval.person not in persons:
        yield word.approval.person, f"it names {word.approval.person}, and {', '.join(persons)} signed it"
        return
    for name in persons:
        yield name, refusal(name, people, Action(action), now) or _unbound(word.approval, name, people, matter, now)


def _unbound(approval: Approval, name: str, people: Mapping[str, Person], matter: Matter, now: str) -> str | None:
    """Return why a permitted person's word does not apply to this matter at this time."""
    signed, expires, present = (moment(stamp) for stamp in (approval.signed_at, approval.expires_at, now))
    if expires <= present:
        return f"it expired at {approval.expires_at}"
    if approval.action != Action.APPROVE:
        return None
    if signed > present:
        return f"it was signed at {approval.signed_at}, later than now"
    if expires - signed > timedelta(days=matter.valid_days):
        return f"it was given for more than the {matter.valid_days} days that the rules allow"
    if approval.evidence_root != matter.evidence_root:
        return "it is bound to other evidence"
    if approval.rules_sha256 != matter.rules_sha256:
        return "it is bound to other gate rules"
    return involvement(name, people, matter)


def moment(stamp: str) -> datetime:
    """Return a record's stamp as a time that compares: its text does not, once fractions of a second are left out."""
    return datetime.fromisoformat(stamp)
