"""Statements say what the records say, in the field's form, and are read back strictly."""

from __future__ import annotations

import json

import fastjsonschema
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from qualification.evidence import schema_files
from qualification.evidence.canonical import canonical_bytes, sha256
from qualification.evidence.findings import EXPLANATIONS, Code, Finding, InvalidEvidence
from qualification.evidence.statements import Fact, PredicateType, read_statement, statement
from qualification.records import Commit, Publication, Sha256, Stamp, Tombstone, TreeHead, Verdict
from tests import facts

FACTS: dict[PredicateType, Fact] = {
    PredicateType.QUALIFICATION_RESULT: facts.result(artifacts=[facts.artifact(b"steps")]),
    PredicateType.CLEANUP_RECEIPT: facts.receipt(),
    PredicateType.ADOPTION_DECISION: facts.decision(),
    PredicateType.HUMAN_APPROVAL: facts.approval(),
    PredicateType.RUN_PERMISSION: replace(facts.approval(action="permit"), evidence_root=None, rules_sha256=None),
    PredicateType.TREE_HEAD: TreeHead(ledger="a", size=3, root="ab" * 32, signed_at=facts.STAMP),
    PredicateType.TOMBSTONE: Tombstone(blobs=("ab" * 32, "cd" * 32), reason="old", removed_at=facts.STAMP),
    PredicateType.STATUS_PUBLICATION: Publication(
        run="run-1",
        commit=facts.COMMIT,
        context="qualify/forecast",
        state="pending",
        description="held",
        published=True,
        published_at=facts.STAMP,
    ),
}
KINDS = list(FACTS)


def _plain(kind: PredicateType) -> dict[str, object]:
    made: dict[str, object] = json.loads(statement(FACTS[kind], facts.subject()))
    return made


def test_every_kind_of_fact_is_tried_here() -> None:
    assert set(FACTS) == set(PredicateType)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fact_comes_back_as_it_was(kind: PredicateType) -> None:
    payload = statement(FACTS[kind], facts.subject())
    read = read_statement(payload)
    assert (read.predicate_type, read.fact) == (kind, FACTS[kind])
    plain = json.loads(payload)
    assert plain["_type"] == "https://in-toto.io/Statement/v1"
    assert plain["predicateType"] == kind.value
    assert all(one["digest"] for one in plain["subject"])


def test_a_result_extends_the_test_result_predicate_and_names_commit_and_tree() -> None:
    payload = statement(facts.result(verdict=Verdict.INCOMPLETE), facts.subject())
    plain = json.loads(payload)
    assert plain["subject"][0]["digest"] == {"gitCommit": facts.COMMIT, "gitTree": "9d" * 20, "sha256": "3c" * 32}
    predicate = plain["predicate"]
    assert predicate["result"] == "FAILED"  # whoever knows only test results fails closed
    assert (predicate["passedTests"], predicate["warnedTests"]) == (["loss"], ["backwards"])
    assert predicate["qualification"]["verdict"] == "INCOMPLETE"
    read = read_statement(payload)
    assert (read.commit, read.source) == (facts.COMMIT, facts.subject())


def test_a_fact_about_a_source_needs_the_source() -> None:
    with pytest.raises(TypeError, match="give the subject"):
        statement(facts.result())


@pytest.mark.parametrize("kind", KINDS)
def test_the_shipped_schema_is_that_of_the_records_and_accepts_the_statement(kind: PredicateType) -> None:
    assert schema_files.path(kind).read_text() == schema_files.text(kind), (
        "run python -m qualification.evidence.schema_files"
    )
    validate = fastjsonschema.compile(json.loads(schema_files.path(kind).read_text()))
    validate(_plain(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_schema_and_reader_refuse_the_same_changes_of_form(kind: PredicateType) -> None:
    validate = fastjsonschema.compile(json.loads(schema_files.path(kind).read_text()))
    for change in ({"more": 1}, {"subject": "none"}, {"predicate": []}, {"_type": "https://in-toto.io/Statement/v9"}):
        broken = {**_plain(kind), **change}
        with pytest.raises(fastjsonschema.JsonSchemaException):
            validate(broken)
        with pytest.raises(InvalidEvidence) as raised:
            read_statement(canonical_bytes(broken))
        assert raised.value.code is Code.STATEMENT


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.data())
def test_any_single_change_of_a_value_is_refused_or_read_as_the_change(data: st.DataObject) -> None:
    """A changed statement never reads as the old fact; and what the reader accepts, the schema accepts."""
    kind = data.draw(st.sampled_from(KINDS))
    plain = _plain(kind)
    place: object = plain
    while isinstance(place, dict | list) and place:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        inner = place[key]  # type: ignore[index]
        if not isinstance(inner, dict | list) or not inner:
            break
        place = inner
    new = data.draw(st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3) | st.just([]) | st.just({}))
    same = type(place[key]) is type(new) and place[key] == new  # type: ignore[index]
    place[key] = new  # type: ignore[index]
    try:
        read = read_statement(canonical_bytes(plain))
    except InvalidEvidence as error:
        assert error.code is Code.STATEMENT
        return
    fastjsonschema.compile(json.loads(schema_files.path(read.predicate_type).read_text()))(plain)
    original = read_statement(statement(FACTS[kind], facts.subject()))
    assert (read == original) == same


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Sha256, "a" * 64 + "\n"),
        (Sha256, "A" * 64),
        (Commit, "a" * 40 + "\n"),
        (Stamp, facts.STAMP + "\n"),
        (Stamp, facts.STAMP.replace("2", "٢")),
        (Stamp, facts.STAMP.replace("Z", "+00:00")),
    ],
)
def test_a_digest_commit_or_stamp_has_exactly_its_form(kind: object, value: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(value, kind)


def test_no_record_holds_a_float() -> None:
    for kind in KINDS:
        assert b'"number"' not in json.dumps(schema_files.schema(kind)).encode()


def test_every_code_is_explained_and_a_finding_reads_as_one_line() -> None:
    assert set(EXPLANATIONS) == set(Code)
    found = Finding(code=Code.BLOB_MISSING, place=f"blob {sha256(b'')[:8]}", text="is not there", sequence=4)
    assert str(found) == "sequence 4, blob e3b0c442: is not there [blob-missing]"
    assert msgspec.json.decode(msgspec.json.encode(found), type=Finding) == found
