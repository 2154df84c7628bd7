"""``qualify gate`` and the commands with which people sign, as processes, on a real ledger."""

import json

import msgspec
import pytest
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

from qualification.git import git
from qualification.records import Ground, ReceiptStatus, Verdict
from tests.databases import Workplace, sqlite_workplace
from tests.recorded import RECEIPT, RULES, SOURCE, Recorded, recorded_here

__all__ = ["Workplace", "recorded_here", "sqlite_workplace"]


def test_from_held_to_adopted_to_rejected_by_people_s_words(recorded_here: Recorded) -> None:
    recorded_here.run("run-1")
    keys = recorded_here.keys
    held = recorded_here.command("gate", "check")
    assert (held.returncode, held.stdout.splitlines()[1]) == (4, "  - 0 of 1 approvals")
    assert "next: qualify approve run-1" in held.stdout

    signed = recorded_here.command("approve", "run-1", "--key", str(keys / "ada"), "--note", "read the plots")
    assert signed.returncode == 0
    assert signed.stdout.startswith("adopted: run run-1")
    assert "approve of ada" in signed.stderr
    assert recorded_here.command("gate", "check").returncode == 0
    assert recorded_here.command("verify").returncode == 0

    assert recorded_here.command("hold", "--key", str(keys / "bo")).returncode == 0
    assert recorded_here.command("gate", "check").returncode == 4
    assert recorded_here.command("reject", "--key", str(keys / "author")).returncode == 0
    rejected = recorded_here.command("gate", "check", "--json")
    assert rejected.returncode == 3
    answer = json.loads(rejected.stdout)
    assert (answer["schema"], answer["decision"], answer["row"]) == ("qualify.gate/1", "rejected", "person_rejected")
    assert answer["reasons"] == ["author rejected it"]


@pytest.mark.parametrize(
    ("person", "more", "code", "message"),
    [
        ("author", (), 7, "author may not approve run run-1: author wrote the commit"),
        ("viewer", (), 7, "viewer is viewer; to approve takes the role approver"),
        ("stranger", (), 7, "this one is nobody's in people.toml"),
        ("nobody", (), 2, "there is no such private key; give --key FILE, the key of a person in "),
        ("ada", ("--days", "8"), 2, "the gate rules let an approval count for 7 days at most"),
    ],
)
def test_a_word_that_could_not_count_is_refused_before_it_is_signed(
    recorded_here: Recorded, person: str, more: tuple[str, ...], code: int, message: str
) -> None:
    recorded_here.run("run-1")
    refused = recorded_here.command("approve", "--key", str(recorded_here.keys / person), *more)
    assert refused.returncode == code
    assert message in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert len(recorded_here.examine().inputs.remarks) == 0


def test_a_key_that_others_can_read_or_that_is_locked_is_refused(recorded_here: Recorded) -> None:
    recorded_here.run("run-1")
    key = recorded_here.keys / "ada"
    key.chmod(0o644)
    refused = recorded_here.command("approve", "--key", str(key))
    assert (refused.returncode, "can be read by others" in refused.stderr) == (2, True)


def test_a_commit_gets_permission_to_run_by_its_full_id(recorded_here: Recorded) -> None:
    recorded_here.run("run-1")
    key = str(recorded_here.keys / "ada")
    assert recorded_here.command("permit", "a" * 40, "--key", key).returncode == 0
    assert recorded_here.command("permit", "a" * 39, "--key", key).returncode == 2
    assert recorded_here.command("permit", "a" * 40, "--key", str(recorded_here.keys / "viewer")).returncode == 7


def test_cleanup_that_was_not_proved_is_code_6_and_tampering_code_5_before_every_other(recorded_here: Recorded) -> None:
    dirty = msgspec.structs.replace(RECEIPT, status=ReceiptStatus.DIRTY, reason="pid 7 is alive")
    recorded_here.run("run-1", verdict=Verdict.FAILED, receipt=dirty)
    answer = recorded_here.command("gate", "check", "--json")
    assert (answer.returncode, json.loads(answer.stdout)["decision"]) == (6, "rejected")
    log = recorded_here.workplace.store.path(recorded_here.result().artifacts[0].sha256)
    log.unlink()
    tampered = recorded_here.command("gate", "check")
    assert tampered.returncode == 5
    assert tampered.stdout.startswith("held, tampered: run run-1")
    assert recorded_here.command("gate", "explain").returncode == 5
    refused = recorded_here.command("approve", "--key", str(recorded_here.keys / "ada"))
    assert (refused.returncode, "nothing is signed over evidence" in refused.stderr) == (5, True)


def test_explain_prints_each_input_each_row_and_the_one_that_applied(recorded_here: Recorded) -> None:
    recorded_here.run("run-1", ground=Ground.REHEARSAL)
    explained = recorded_here.command("gate", "explain")
    assert explained.returncode == 0
    lines = explained.stdout.splitlines()
    assert any(line.split() == ["approvals_required", "1"] for line in lines)
    (applied,) = [line for line in lines if line.lstrip().startswith("=>")]
    assert applied.split()[:5] == ["=>", "not", "met", "rehearsal", "held"]
    document = json.loads(recorded_here.command("gate", "explain", "--json").stdout)
    assert [line["row"] for line in document["table"] if line["applies"]] == ["rehearsal"]
    assert document["inputs"]["workloads.0.elsewhere"] == "PASSED"


def test_a_decision_is_recorded_once_and_replayed_from_the_ledger(recorded_here: Recorded) -> None:
    recorded_here.run("run-1")
    assert "recorded at sequence 3" in recorded_here.command("gate", "check", "--record").stderr
    assert "already recorded at sequence 3" in recorded_here.command("gate", "check", "--record").stderr
    recorded_here.command("approve", "--key", str(recorded_here.keys / "ada"))
    assert "recorded at sequence 5" in recorded_here.command("gate", "check", "--record").stderr
    replayed = recorded_here.command("gate", "explain", "--decision", "3")
    assert replayed.returncode == 0
    assert replayed.stdout.splitlines()[-1].endswith("sequence 3: the same decision, row and reasons")
    assert json.loads(recorded_here.command("gate", "explain", "--decision", "5", "--json").stdout)["differences"] == []
    assert recorded_here.command("gate", "explain", "--decision", "1").returncode == 4


def test_other_rules_are_asked_by_name_or_file_and_a_typo_is_code_2(recorded_here: Recorded) -> None:
    recorded_here.run("run-1")
    missing = recorded_here.command("gate", "check", "--rules", "standard")
    assert missing.returncode == 6
    assert "required probe gpu_memory is absent" in missing.stdout
    rules = recorded_here.keys.parent / "own.toml"
    rules.write_bytes(RULES.replace(b'"full_step"', b'"full_stop"'))
    typo = recorded_here.command("gate", "check", "--rules", str(rules))
    assert (typo.returncode, "workload 'full_stop' is not known" in typo.stderr) == (2, True)
    start, end = RULES.index(b"[[workloads]]"), RULES.index(b"[probes]")
    rules.write_bytes(RULES[:start].replace(b"[freshness]", b"workloads = []\n[freshness]") + RULES[end:])
    empty = recorded_here.command("gate", "check", "--rules", str(rules))
    assert (empty.returncode, "require no workload" in empty.stdout) == (4, True)


def test_a_run_is_asked_for_by_head_and_bad_names_are_refused(recorded_here: Recorded) -> None:
    recorded_here.run("run-1")
    assert recorded_here.command("gate", "check", "--head", SOURCE.commit).returncode == 4
    for arguments in (("--head", "0" * 40), ("--head", "main"), ("run-9",)):
        refused = recorded_here.command("gate", "check", *arguments)
        assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)


def test_the_head_that_moved_away_and_came_back(recorded_here: Recorded) -> None:
    remote = recorded_here.keys.parent / "remote"
    remote.mkdir()
    git(remote, "init", "--quiet")
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    heads = []
    for message in ("first", "second"):
        git(remote, *who, "commit", "--quiet", "--allow-empty", "-m", message)
        heads.append(git(remote, "rev-parse", "HEAD").decode().strip())
    source = msgspec.structs.replace(SOURCE, commit=heads[0], reference="refs/pull/7/head")
    recorded_here.run("run-1", source=source)
    recorded_here.command("approve", "--key", str(recorded_here.keys / "ada"))

    def asked(head: str) -> tuple[int, str]:
        git(remote, "update-ref", "refs/pull/7/head", head)
        answer = recorded_here.command("gate", "check", "--repo", str(remote), "--json")
        return answer.returncode, json.loads(answer.stdout)["row"]

    assert asked(heads[0]) == (0, "adopted")
    assert asked(heads[1]) == (4, "head_moved")
    assert asked(heads[0]) == (0, "adopted")
    assert recorded_here.command("gate", "check").returncode == 4


def test_a_locked_key_is_opened_with_its_passphrase_alone(
    recorded_here: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded_here.run("run-1")
    key = recorded_here.keys / "ada"
    locked = BestAvailableEncryption(b"right")
    key.write_bytes(recorded_here.people["ada"].private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, locked))
    refused = recorded_here.command("approve", "--key", str(key))
    assert (refused.returncode, "is locked by a passphrase" in refused.stderr) == (2, True)
    answers = iter(["wrong", "right"])
    monkeypatch.setattr("flows.cli.approve.getpass", lambda _: next(answers))
    assert recorded_here.command("approve", "--key", str(key), "--passphrase").returncode == 2
    assert recorded_here.command("approve", "--key", str(key), "--passphrase").returncode == 0
