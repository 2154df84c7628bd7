"""The gate on real ledgers: people, time, tampering, newer runs, and replays of what was decided."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from securesystemslib.signer import CryptoSigner
from sqlalchemy import text

from db.deciding import replay
from db.engine import reading
from db.permissions import permitted_by
from qualification.approvals import NEVER
from qualification.errors import ConfigurationError, TamperedError, UnknownError
from qualification.evidence.signing import add_signature, sign, utc_now
from qualification.evidence.statements import statement
from qualification.evidence.trust import Trust, load_people
from qualification.records import Approval, Decision, Ground, ReceiptStatus, Verdict
from tests.recorded import COMMIT, OTHER_COMMIT, RECEIPT, RULES, SOURCE, Recorded


def word(recorded: Recorded, run: str, person: str = "ada", action: str = "approve", **changed: object) -> Approval:
    """A word bound to exactly what the run rests on now."""
    inputs = recorded.examine(run).inputs
    given = Approval(
        action=action,
        person=person,
        role="approver",
        commit=inputs.commit,
        policy=inputs.policy,
        evidence_root=inputs.evidence_root,
        rules_sha256=inputs.rules_sha256,
        signed_at=utc_now(),
        expires_at=in_days(7) if action == "approve" else NEVER,
    )
    return msgspec.structs.replace(given, **changed)


def in_days(days: float) -> str:
    return (datetime.now(UTC) + timedelta(days=days)).strftime("%Y-%m-%dT%H:%M:%SZ")


def test_a_native_run_waits_for_approval_and_is_adopted_with_it(recorded: Recorded) -> None:
    recorded.run("run-1")
    assert recorded.examine().ruling.row == "unapproved"
    recorded.say("ada", word(recorded, "run-1"))
    case = recorded.examine()
    assert (case.ruling.decision, case.inputs.approved_by) == (Decision.ADOPTED, ("ada",))


def test_a_rehearsal_is_held_however_much_it_is_approved(recorded_here: Recorded) -> None:
    recorded_here.run("run-1", ground=Ground.REHEARSAL)
    recorded_here.say("ada", word(recorded_here, "run-1"))
    assert recorded_here.examine().ruling.reasons == ("full_step is rehearsal evidence, native is required",)


def test_an_approval_counts_for_one_run_only_and_a_rejection_for_the_commit(recorded_here: Recorded) -> None:
    recorded_here.run("run-1")
    recorded_here.say("ada", word(recorded_here, "run-1"))
    recorded_here.run("run-2", duration_ms=1)
    second = recorded_here.examine("run-2")
    assert second.ruling.row == "unapproved"
    assert second.inputs.remarks == ("approve at sequence 3 does not count: it is bound to other evidence",)
    first = recorded_here.examine("run-1")
    assert (first.ruling.row, first.inputs.superseded_by) == ("superseded", "run-2")
    recorded_here.say("bo", word(recorded_here, "run-1", "bo", "reject"))
    assert recorded_here.examine("run-2").ruling.reasons == ("bo rejected it",)


def test_a_rehearsal_or_another_policy_does_not_supersede(recorded_here: Recorded) -> None:
    recorded_here.run("run-1")
    recorded_here.run("run-2", ground=Ground.REHEARSAL)
    other = msgspec.structs.replace(recorded_here.result().policy, name="none")
    recorded_here.run("run-3", policy=other)
    recorded_here.run("run-4", source=msgspec.structs.replace(SOURCE, commit=OTHER_COMMIT))
    assert recorded_here.examine("run-1").inputs.superseded_by is None


@pytest.mark.parametrize(
    ("person", "changed", "remark"),
    [
        ("author", {}, "author wrote the commit"),
        ("viewer", {}, "viewer is viewer; to approve takes the role approver"),
        ("ada", {"expires_at": "2026-01-01T00:00:00Z"}, "it expired at 2026-01-01T00:00:00Z"),
        ("ada", {"rules_sha256": "0" * 64}, "it is bound to other gate rules"),
    ],
)
def test_a_word_that_does_not_count_is_shown_with_its_reason(
    recorded_here: Recorded, person: str, changed: dict[str, object], remark: str
) -> None:
    recorded_here.run("run-1")
    recorded_here.say(person, word(recorded_here, "run-1", person, **changed))
    case = recorded_here.examine()
    assert case.ruling.row == "unapproved"
    assert case.inputs.remarks == (f"approve at sequence 3 does not count: {remark}",)


def test_an_approval_moved_to_another_commit_does_not_count_there(recorded_here: Recorded) -> None:
    recorded_here.run("run-1")
    approved = word(recorded_here, "run-1")
    recorded_here.say("ada", approved)
    recorded_here.run("run-2", source=msgspec.structs.replace(SOURCE, commit=OTHER_COMMIT))
    assert recorded_here.examine("run-2").ruling.row == "unapproved"
    recorded_here.say("ada", msgspec.structs.replace(approved, commit=OTHER_COMMIT))
    assert "bound to other evidence" in recorded_here.examine("run-2").inputs.remarks[0]


def drop_result(database: str) -> str:
    return "DELETE FROM workload_results"


def set_verdict(database: str) -> str:
    return "UPDATE workload_results SET verdict = 'PASSED'"


def drop_trigger(database: str) -> str:
    return f"DROP TRIGGER ledger_appends{' ON ledger' if database == 'postgresql' else ''}"


@pytest.mark.parametrize("change", [drop_result, set_verdict, drop_trigger])
def test_whatever_does_not_verify_is_held_as_tampered(recorded: Recorded, change: Callable[[str], str]) -> None:
    recorded.run("run-1", verdict=Verdict.FAILED)
    with recorded.workplace.engine.begin() as connection:
        connection.execute(text(change(connection.dialect.name)))
    case = recorded.examine("run-1")
    assert (case.ruling.decision, case.ruling.row) == (Decision.HELD, "tampered")


def test_a_changed_blob_is_held_as_tampered_and_a_lost_run_is_no_missing_run(recorded_here: Recorded) -> None:
    recorded_here.run("run-1")
    rules = recorded_here.examine().run.rules_sha256
    log = recorded_here.result().artifacts[0].sha256
    path = recorded_here.workplace.store.path(log)
    path.chmod(0o600)
    path.write_bytes(b"something else")
    assert recorded_here.examine().ruling.row == "tampered"
    with recorded_here.workplace.engine.begin() as connection:
        connection.execute(text("DELETE FROM runs"))
    with pytest.raises(TamperedError, match="the evidence does not verify: sequence 1, table runs"):
        recorded_here.examine("run-1")
    assert recorded_here.workplace.store.has(rules)


def test_without_a_tree_head_that_covers_it_a_run_is_not_adopted(recorded_here: Recorded) -> None:
    recorded_here.run("run-1")
    made = msgspec.structs.replace(recorded_here.result(), run="run-2", duration_ms=2)
    proof = msgspec.structs.replace(RECEIPT, run="run-2")
    recorded_here.workplace.record(made, proof, source=SOURCE)
    assert recorded_here.examine("run-2").ruling.row == "unverified"
    recorded_here.ledger.sign_head()
    assert recorded_here.examine("run-2").ruling.row == "unapproved"


def test_a_past_decision_is_replayed_from_its_stored_bytes_whatever_came_later(recorded: Recorded) -> None:
    recorded.run("run-1", receipt=msgspec.structs.replace(RECEIPT, status=ReceiptStatus.UNVERIFIED, reason="no NVML"))
    held = recorded.examine().decision()
    (at,) = recorded.append(held, source=SOURCE)
    recorded.say("bo", word(recorded, "run-1", "bo", "reject"))
    (recorded.workplace.trust / "people.toml").write_text(
        (recorded.workplace.trust / "people.toml").read_text().replace('roles = ["viewer"]', 'roles = ["admin"]')
    )
    assert recorded.examine().ruling.decision is Decision.REJECTED
    with reading(recorded.workplace.engine) as connection:
        replayed = replay(connection, at, Trust.load(recorded.workplace.trust))
    assert replayed.recorded == held
    assert (replayed.ruling.row, replayed.ruling.reasons) == (held.row, held.reasons)
    assert replayed.differences == ()


def test_a_decision_that_the_table_would_not_make_is_shown_with_its_differences(recorded_here: Recorded) -> None:
    recorded_here.run("run-1")
    bent = msgspec.structs.replace(
        recorded_here.examine().decision(), decision=Decision.ADOPTED, row="adopted", evidence_root="0" * 64
    )
    (at,) = recorded_here.append(bent, source=SOURCE)
    trust = Trust.load(recorded_here.workplace.trust)
    with reading(recorded_here.workplace.engine) as connection:
        differences = replay(connection, at, trust).differences
        with pytest.raises(UnknownError, match="sequence 1 of the ledger holds no decision"):
            replay(connection, 1, trust)
    assert [one.split()[0] for one in differences] == ["decision", "row", "evidence"]


def test_only_an_unexpired_permission_of_a_permitted_person_lets_a_commit_run(recorded_here: Recorded) -> None:
    recorded_here.run("run-1")

    def permitted(commit: str = OTHER_COMMIT) -> tuple[str, ...]:
        trust = recorded_here.workplace.trust
        with reading(recorded_here.workplace.engine) as connection:
            return permitted_by(connection, commit, Trust.load(trust), load_people(trust), utc_now())

    given = word(recorded_here, "run-1", action="permit", evidence_root=None, rules_sha256=None, policy="")
    assert permitted() == ()
    recorded_here.say("viewer", msgspec.structs.replace(given, commit=OTHER_COMMIT, person="viewer"))
    recorded_here.say("ada", msgspec.structs.replace(given, commit=OTHER_COMMIT, expires_at="2026-01-01T00:00:00Z"))
    assert permitted() == ()
    recorded_here.say("ada", msgspec.structs.replace(given, commit=OTHER_COMMIT, expires_at=in_days(1)))
    assert permitted() == ("ada",)
    assert permitted(COMMIT) == ()


def test_a_run_is_found_by_a_start_of_its_name_that_only_one_has(recorded_here: Recorded) -> None:
    with pytest.raises(ConfigurationError, match="no run is recorded yet"):
        recorded_here.examine()
    recorded_here.run("20261130-1")
    recorded_here.run("20261130-2", duration_ms=2)
    assert recorded_here.examine("20261130-1").run.run == "20261130-1"
    with pytest.raises(ConfigurationError, match="is ambiguous"):
        recorded_here.examine("20261130")
    with pytest.raises(ConfigurationError, match="is not recorded"):
        recorded_here.examine("%")


def test_the_head_is_read_again_where_a_run_follows_a_reference(recorded_here: Recorded, tmp_path: Path) -> None:
    recorded_here.run("run-1", source=msgspec.structs.replace(SOURCE, reference="refs/pull/7/head"))
    assert recorded_here.examine().ruling.row == "head_moved"
    assert recorded_here.examine(address=str(tmp_path)).inputs.head == "unreadable"


def test_two_people_are_two_and_one_person_twice_is_one(recorded_here: Recorded) -> None:
    rules = recorded_here.blob(RULES.replace(b"people = 1", b"people = 2"))
    recorded_here.run("run-1", rules_sha256=rules)
    recorded_here.say("ada", word(recorded_here, "run-1"))
    recorded_here.say("ada", word(recorded_here, "run-1", note="again"))
    assert recorded_here.examine().ruling.reasons == ("1 of 2 approvals",)
    recorded_here.say("bo", word(recorded_here, "run-1", "bo"))
    assert recorded_here.examine().inputs.approved_by == ("ada", "bo")
    assert recorded_here.examine().ruling.decision is Decision.ADOPTED


def test_two_people_may_sign_one_statement(recorded_here: Recorded) -> None:
    rules = recorded_here.blob(RULES.replace(b"people = 1", b"people = 2"))
    recorded_here.run("run-1", rules_sha256=rules)
    signers = [CryptoSigner(recorded_here.people[name]) for name in ("ada", "bo")]
    envelope = add_signature(sign(statement(word(recorded_here, "run-1")), signers[0]), signers[1])
    recorded_here.ledger.append(envelope)
    assert recorded_here.examine().inputs.approved_by == ("ada", "bo")
