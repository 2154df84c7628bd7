"""Roles and actions, and whose signed word counts; with real Ed25519 and OpenSSH keys and real envelopes."""

from itertools import product

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st
from securesystemslib.signer import CryptoSigner

from qualification.approvals import NEVER, Action, Matter, Role, Weighed, Word, involvement, refusal, weigh
from qualification.evidence.findings import Code, InvalidEvidence
from qualification.evidence.signing import add_signature, open_envelope, sign
from qualification.evidence.statements import read_statement, statement
from qualification.evidence.trust import Person, Trust, people_keys
from qualification.records import Approval

NOW = "2026-11-30T12:00:00Z"
COMMIT, ROOT, RULES = "c" * 40, "e" * 64, "f" * 64
MATTER = Matter(
    commit=COMMIT,
    policy="forecast",
    evidence_root=ROOT,
    rules_sha256=RULES,
    valid_days=7,
    authors=("author@example.org",),
    requested_by=("requester",),
)
KEYS = {name: Ed25519PrivateKey.generate() for name in ("ada", "bo", "author", "requester", "viewer", "stranger")}


def raw(name: str) -> str:
    return KEYS[name].public_key().public_bytes_raw().hex()


def openssh(name: str) -> str:
    return KEYS[name].public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode() + f" {name}@laptop"


def person(name: str, *roles: str, **more: object) -> Person:
    return msgspec.structs.replace(Person(roles=roles, keys=(openssh(name),)), **more)


PEOPLE = {
    "Ada": person("ada", "approver"),
    "Bo": person("bo", "viewer", "admin"),
    "Author": person("author", "approver", identities=("Author@example.org",)),
    "requester": person("requester", "approver"),
    "Viewer": person("viewer", "viewer"),
}


def approval(name: str, action: str = "approve", **changed: object) -> Approval:
    given_word = Approval(
        action=action,
        person=name,
        role="approver",
        commit=COMMIT,
        policy="forecast",
        evidence_root=ROOT,
        rules_sha256=RULES,
        signed_at="2026-11-29T12:00:00Z",
        expires_at="2026-12-06T12:00:00Z" if action == "approve" else NEVER,
    )
    return msgspec.structs.replace(given_word, **changed)


def envelope(word: Approval, *names: str) -> bytes:
    first, *others = names
    stored = sign(statement(word), CryptoSigner(KEYS[first]))
    for name in others:
        stored = add_signature(stored, CryptoSigner(KEYS[name]))
    return stored


def word_of(stored: bytes, sequence: int = 1, people: dict[str, Person] = PEOPLE) -> Word:
    """Read a stored envelope as the ledger does: verified first, then taken apart."""
    opened = open_envelope(stored, Trust(people_keys(people)))
    fact = read_statement(opened.payload).fact
    assert isinstance(fact, Approval)
    return Word(sequence=sequence, approval=fact, signers=opened.signers)


def said(*words: Approval, matter: Matter = MATTER) -> Weighed:
    keys = {"Ada": "ada", "Bo": "bo", "Author": "author", "requester": "requester", "Viewer": "viewer"}
    heard = [word_of(envelope(word, keys[word.person]), number) for number, word in enumerate(words, 1)]
    return weigh(heard, PEOPLE, matter, NOW)


ALLOWED = {
    Role.VIEWER: {Action.VIEW},
    Role.OPERATOR: {Action.VIEW, Action.RUN, Action.PERMIT},
    Role.APPROVER: {Action.VIEW, Action.RUN, Action.PERMIT, Action.APPROVE, Action.REJECT, Action.HOLD},
    Role.ADMIN: set(Action),
}


@pytest.mark.parametrize(("role", "action"), list(product(Role, Action)))
def test_each_role_may_do_exactly_what_is_listed_and_each_refusal_says_why(role: Role, action: Action) -> None:
    why = refusal("Eve", {"Eve": person("stranger", role.value)}, action, NOW)
    if action in ALLOWED[role]:
        assert why is None
    else:
        assert why is not None
        assert why.startswith(f"Eve is {role.value}; to {action.value} takes the role ")


@pytest.mark.parametrize("action", Action)
def test_nobody_is_permitted_by_default(action: Action) -> None:
    eve = person("stranger", "admin")
    assert refusal("Eve", {}, action, NOW) == "Eve is not among the permitted people"
    assert "has the unknown role 'root'" in str(refusal("Eve", {"Eve": person("stranger", "root")}, action, NOW))
    assert "is no role" in str(refusal("Eve", {"Eve": person("stranger")}, action, NOW))
    expired = msgspec.structs.replace(eve, expires_at=NOW)
    assert refusal("Eve", {"Eve": expired}, action, NOW) == f"the permission of Eve expired at {NOW}"
    valid = msgspec.structs.replace(eve, expires_at="2026-11-30T12:00:01Z")
    assert refusal("Eve", {"Eve": valid}, action, NOW) is None


def test_an_approval_by_somebody_else_who_is_permitted_counts() -> None:
    assert said(approval("Ada")) == Weighed(approved_by=("Ada",))
    assert said(approval("Ada"), approval("Bo")).approved_by == ("Ada", "Bo")


@pytest.mark.parametrize(
    ("word", "why"),
    [
        (approval("Author"), "Author wrote the commit"),
        (approval("requester"), "requester asked for the run"),
        (approval("Viewer"), "Viewer is viewer; to approve takes the role approver"),
        (approval("Ada", evidence_root="d" * 64), "it is bound to other evidence"),
        (approval("Ada", evidence_root=None), "it is bound to other evidence"),
        (approval("Ada", rules_sha256="d" * 64), "it is bound to other gate rules"),
        (approval("Ada", expires_at=NOW), f"it expired at {NOW}"),
        (approval("Ada", signed_at="2026-11-30T12:00:01Z"), "later than now"),
        (approval("Ada", expires_at="2026-12-06T12:00:01Z"), "it was given for more than the 7 days"),
    ],
)
def test_an_approval_that_is_not_bound_to_this_matter_does_not_count(word: Approval, why: str) -> None:
    weighed = said(word)
    assert weighed.approved_by == ()
    (remark,) = weighed.remarks
    assert remark.startswith("approve at sequence 1 does not count: ")
    assert why in remark


def test_an_approval_of_another_commit_or_policy_is_about_something_else() -> None:
    assert said(approval("Ada", commit="d" * 40), approval("Ada", policy="none")) == Weighed()


def test_without_a_known_author_or_requester_nobody_is_known_to_be_somebody_else() -> None:
    for field in ("authors", "requested_by"):
        weighed = said(approval("Ada"), matter=msgspec.structs.replace(MATTER, **{field: ()}))
        assert weighed.approved_by == ()
        assert "is unknown" in weighed.remarks[0]
    assert involvement("Ada", PEOPLE, MATTER) is None


def test_a_rejection_or_hold_speaks_about_the_commit_whatever_the_evidence_and_its_author_may_say_it() -> None:
    assert said(approval("Author", "reject", evidence_root="d" * 64)).rejected_by == ("Author",)
    assert said(approval("Ada", "hold", rules_sha256="d" * 64)).held_by == ("Ada",)
    assert said(approval("Viewer", "reject")).rejected_by == ()


def test_the_last_word_of_a_person_counts_and_an_approval_that_does_not_apply_withdraws_nothing() -> None:
    assert said(approval("Ada"), approval("Ada", "reject")) == Weighed(rejected_by=("Ada",))
    assert said(approval("Ada", "reject"), approval("Ada")) == Weighed(approved_by=("Ada",))
    other = said(approval("Ada", "reject"), approval("Ada", evidence_root="d" * 64))
    assert (other.rejected_by, other.approved_by) == (("Ada",), ())
    assert said(approval("Ada", "reject"), approval("Bo")).rejected_by == ("Ada",)


class TestOneKeyCountedTwice:
    def test_the_same_signature_twice_in_one_envelope_is_an_error(self) -> None:
        plain = msgspec.json.decode(envelope(approval("Ada"), "ada"))
        plain["signatures"] *= 2
        with pytest.raises(InvalidEvidence) as refused:
            word_of(msgspec.json.encode(plain))
        assert refused.value.code is Code.ENVELOPE

    def test_two_approvals_by_one_person_are_one(self) -> None:
        assert said(approval("Ada"), approval("Ada", note="again")).approved_by == ("Ada",)

    def test_two_keys_of_one_person_are_one(self) -> None:
        people = {"Ada": Person(roles=("approver",), keys=(raw("ada"), openssh("bo")))}
        word = word_of(envelope(approval("Ada"), "ada", "bo"), people=people)
        assert len(word.signers) == 2
        assert weigh([word], people, MATTER, NOW).approved_by == ("Ada",)

    def test_one_key_in_two_encodings_is_one(self) -> None:
        people = {"Ada": Person(roles=("approver",), keys=(raw("ada"), openssh("ada"), raw("ada").upper()))}
        word = word_of(envelope(approval("Ada"), "ada"), people=people)
        assert len(word.signers) == 1
        assert weigh([word], people, MATTER, NOW).approved_by == ("Ada",)

    def test_a_signature_is_never_attributed_to_the_person_it_only_names(self) -> None:
        weighed = weigh([word_of(envelope(approval("Ada"), "bo"))], PEOPLE, MATTER, NOW)
        assert weighed.approved_by == ()
        assert weighed.remarks == ("approve at sequence 1 does not count: it names Ada, and Bo signed it",)

    def test_two_people_may_sign_one_envelope(self) -> None:
        weighed = weigh([word_of(envelope(approval("Ada"), "ada", "bo"))], PEOPLE, MATTER, NOW)
        assert weighed.approved_by == ("Ada", "Bo")

    def test_a_good_signature_beside_an_unknown_one_counts_once(self) -> None:
        weighed = weigh([word_of(envelope(approval("Ada"), "ada", "stranger"))], PEOPLE, MATTER, NOW)
        assert weighed.approved_by == ("Ada",)

    def test_a_word_that_no_person_signed_does_not_count(self) -> None:
        word = Word(sequence=4, approval=approval("Ada"), signers=())
        assert "no permitted person's key signed it" in weigh([word], PEOPLE, MATTER, NOW).remarks[0]


names = st.sampled_from(["Ada", "Bo", "Author", "requester", "Viewer"])
words = st.lists(
    st.builds(
        approval,
        names,
        st.sampled_from(["approve", "approve", "reject", "hold"]),
        evidence_root=st.sampled_from([ROOT, "d" * 64]),
        expires_at=st.sampled_from([NOW, "2026-12-06T12:00:00Z"]),
    ),
    max_size=5,
)
SIGNERS = {key.owner: key for key in people_keys(PEOPLE)}


@given(words, st.integers(0, 4))
def test_taking_a_word_of_approval_away_never_adds_an_approver(spoken: list[Approval], gone: int) -> None:
    heard = [
        Word(sequence=number, approval=word, signers=(SIGNERS[word.person],)) for number, word in enumerate(spoken, 1)
    ]
    fewer = [word for word in heard if word.sequence != gone + 1 or word.approval.action != "approve"]
    assert set(weigh(fewer, PEOPLE, MATTER, NOW).approved_by) <= set(weigh(heard, PEOPLE, MATTER, NOW).approved_by)
    assert set(weigh(fewer, PEOPLE, MATTER, NOW).rejected_by) >= set(weigh(heard, PEOPLE, MATTER, NOW).rejected_by)
