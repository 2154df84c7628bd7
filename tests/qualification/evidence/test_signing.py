"""Who signed: keys made once, envelopes opened strictly, one key and one person counted once."""

from __future__ import annotations

import base64
import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from securesystemslib.signer import CryptoSigner

from qualification.errors import ConfigurationError
from qualification.evidence.authentic import authenticate
from qualification.evidence.canonical import canonical_bytes
from qualification.evidence.findings import Code, InvalidEvidence
from qualification.evidence.signing import add_signature, open_envelope, pipeline_signer, read_signer, sign
from qualification.evidence.statements import statement
from qualification.evidence.trust import (
    KeyUse,
    Person,
    Trust,
    TrustedKey,
    accept_public_key,
    load_people,
    people_keys,
    raw_public_key,
)
from tests import facts
from tests.tamper.judges import tool

PAYLOAD = statement(facts.approval("alice"))


def _public(signer: CryptoSigner) -> str:
    return str(signer.public_key.keyval["public"])


def _key(signer: CryptoSigner, owner: str, use: KeyUse = KeyUse.PERSON) -> TrustedKey:
    return TrustedKey(keyid=signer.public_key.keyid, public=_public(signer), owner=owner, use=use)


@pytest.fixture(scope="module")
def alice() -> CryptoSigner:
    return CryptoSigner.generate_ed25519()


@pytest.fixture(scope="module")
def bob() -> CryptoSigner:
    return CryptoSigner.generate_ed25519()


def test_the_pipelines_key_is_made_on_first_use_and_private(tmp_path: Path) -> None:
    signer = pipeline_signer(tmp_path)
    assert pipeline_signer(tmp_path).public_key.keyid == signer.public_key.keyid
    private = tmp_path / "keys" / "pipeline.pem"
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    trust = Trust.load(tmp_path)
    assert [key.owner for key in trust.keys.values()] == ["pipeline"]
    opened = open_envelope(sign(b"{}", signer), trust)
    assert (opened.payload, opened.unknown) == (b"{}", ())


def test_processes_that_arrive_at_once_use_one_key(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from qualification.evidence.signing import pipeline_signer; "
        "print(pipeline_signer(Path(sys.argv[1])).public_key.keyid)"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE) for _ in range(6)
    ]
    assert len({process.communicate()[0] for process in running}) == 1
    assert len(list((tmp_path / "keys").iterdir())) == 2


def test_a_private_key_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    pipeline_signer(tmp_path)
    private = tmp_path / "keys" / "pipeline.pem"
    private.chmod(0o640)
    with pytest.raises(ConfigurationError, match="can be read by others"):
        pipeline_signer(tmp_path)


def test_a_persons_ssh_key_signs_and_its_passphrase_is_needed(tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    path = tmp_path / "id_ed25519"
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, BestAvailableEncryption(b"open sesame")))
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match="is locked by a passphrase"):
        read_signer(path)
    signer = read_signer(path, b"open sesame")
    line = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    assert raw_public_key(f"{line} alice@laptop", "alice") == _public(signer)


@pytest.mark.parametrize(
    "content", [b"", b"nothing", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"]
)
def test_what_is_no_private_key_is_named_without_showing_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key.pem"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match=r"key\.pem: is no private key"):
        read_signer(path)
    with pytest.raises(ConfigurationError, match="no such private key"):
        read_signer(tmp_path / "absent.pem")


def test_a_key_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rsa.pem"
    key = generate_private_key(65537, 2048)
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match="not an Ed25519 key"):
        read_signer(path)
    line = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    with pytest.raises(ConfigurationError, match="give an Ed25519 key"):
        raw_public_key(line, "alice")


class TestOneKeyCountedTwice:
    """Two signatures are asked for; what does not make two people does not reach two, in either verifier."""

    @staticmethod
    def people(envelope: bytes, keys: list[TrustedKey]) -> frozenset[str]:
        ours = authenticate(envelope, Trust(keys)).people
        theirs = tool.Keys()
        for key in keys:
            theirs.add(key.public, key.owner, key.use.value, None, None)
        assert {owner for owner, *_ in theirs.signers(envelope, "it")[1]} == ours
        return ours

    def test_two_people_are_two(self, alice: CryptoSigner, bob: CryptoSigner) -> None:
        envelope = add_signature(sign(PAYLOAD, alice), bob)
        assert self.people(envelope, [_key(alice, "alice"), _key(bob, "bob")]) == {"alice", "bob"}

    def test_the_same_signature_twice_is_an_error(self, alice: CryptoSigner) -> None:
        content = json.loads(sign(PAYLOAD, alice))
        envelope = canonical_bytes({**content, "signatures": content["signatures"] * 2})
        with pytest.raises(InvalidEvidence) as raised:
            self.people(envelope, [_key(alice, "alice")])
        assert raised.value.code is Code.ENVELOPE
        theirs = tool.Keys()
        theirs.add(_public(alice), "alice", "person", None, None)
        with pytest.raises(tool.BadError, match="signs twice"):
            theirs.signers(envelope, "it")

    def test_one_key_under_two_names_is_refused_when_people_are_read(self, alice: CryptoSigner) -> None:
        people = {name: Person(roles=("approver",), keys=(_public(alice),)) for name in ("alice", "mallory")}
        with pytest.raises(ConfigurationError, match="belongs to both alice and mallory"):
            Trust(people_keys(people))

    def test_one_key_as_ssh_and_raw_is_one(self, alice: CryptoSigner) -> None:
        key = alice._private_key.public_key()
        line = key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
        people = {"alice": Person(roles=("approver",), keys=(line, _public(alice), _public(alice).upper()))}
        keys = list(Trust(people_keys(people)).keys.values())
        assert len(keys) == 1
        assert self.people(sign(PAYLOAD, alice), keys) == {"alice"}

    def test_two_keys_of_one_person_are_one(self, alice: CryptoSigner, bob: CryptoSigner) -> None:
        envelope = add_signature(sign(PAYLOAD, alice), bob)
        assert self.people(envelope, [_key(alice, "alice"), _key(bob, "alice")]) == {"alice"}

    def test_a_signature_under_the_others_id_is_never_the_others(self, alice: CryptoSigner, bob: CryptoSigner) -> None:
        content = json.loads(sign(PAYLOAD, alice))
        content["signatures"][0]["keyid"] = bob.public_key.keyid
        for keys in ([_key(alice, "alice"), _key(bob, "bob")], [_key(bob, "bob")], [_key(alice, "alice")]):
            with pytest.raises(InvalidEvidence) as raised:
                authenticate(canonical_bytes(content), Trust(keys))
            assert raised.value.code is Code.SIGNATURE

    def test_an_empty_id_is_refused_clearly(self, alice: CryptoSigner) -> None:
        content = json.loads(sign(PAYLOAD, alice))
        content["signatures"][0]["keyid"] = ""
        with pytest.raises(InvalidEvidence, match="under the other id ''"):
            authenticate(canonical_bytes(content), Trust([_key(alice, "alice")]))

    def test_an_unknown_signature_more_is_ignored_but_shown(self, alice: CryptoSigner) -> None:
        content = json.loads(sign(PAYLOAD, alice))
        garbage = {"keyid": "f" * 64, "sig": base64.b64encode(bytes(64)).decode()}
        envelope = canonical_bytes({**content, "signatures": [*content["signatures"], garbage]})
        assert authenticate(envelope, Trust([_key(alice, "alice")])).unknown == ("f" * 64,)
        assert self.people(envelope, [_key(alice, "alice")]) == {"alice"}

    def test_garbage_under_a_known_id_spoils_the_envelope(self, alice: CryptoSigner, bob: CryptoSigner) -> None:
        content = json.loads(sign(PAYLOAD, alice))
        garbage = {"keyid": bob.public_key.keyid, "sig": base64.b64encode(bytes(64)).decode()}
        envelope = canonical_bytes({**content, "signatures": [*content["signatures"], garbage]})
        with pytest.raises(InvalidEvidence) as raised:
            authenticate(envelope, Trust([_key(alice, "alice"), _key(bob, "bob")]))
        assert raised.value.code is Code.SIGNATURE


@pytest.mark.parametrize(
    ("start", "end", "valid"),
    [
        (None, None, True),
        ("2026-11-30T12:00:00Z", None, True),
        ("2026-11-30T12:00:01Z", None, False),
        (None, "2026-11-30T12:00:00Z", False),
        (None, "2026-11-30T12:00:01.5Z", True),
    ],
)
def test_a_key_signs_only_while_it_is_valid(
    alice: CryptoSigner, start: str | None, end: str | None, valid: bool
) -> None:
    key = TrustedKey(
        keyid=alice.public_key.keyid,
        public=_public(alice),
        owner="alice",
        use=KeyUse.PERSON,
        valid_from=start,
        expires_at=end,
    )
    envelope = sign(PAYLOAD, alice)
    if valid:
        assert authenticate(envelope, Trust([key])).people == {"alice"}
    else:
        with pytest.raises(InvalidEvidence) as raised:
            authenticate(envelope, Trust([key]))
        assert raised.value.code is Code.KEY_EXPIRED


def test_another_pipelines_key_is_accepted_by_its_id_and_a_persons_is_not(tmp_path: Path, alice: CryptoSigner) -> None:
    accept_public_key(tmp_path, _key(alice, "other site", KeyUse.PIPELINE))
    accept_public_key(tmp_path, _key(alice, "other site", KeyUse.PIPELINE))
    assert [key.owner for key in Trust.load(tmp_path).keys.values()] == ["other site"]
    with pytest.raises(ConfigurationError, match=r"add alice to .*people\.toml"):
        accept_public_key(tmp_path, _key(alice, "alice"))


@pytest.mark.parametrize(
    "content", ["people = 3", "[people.alice]\nroles = 1", "[people", "[people.a]\nkeys=[]\nrole=1"]
)
def test_a_file_of_people_that_cannot_be_read_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "people.toml").write_text(content)
    with pytest.raises(ConfigurationError, match=r"people\.toml"):
        load_people(tmp_path)


def test_a_full_disk_leaves_no_half_key(tmp_path: Path) -> None:
    program = (
        "import resource, signal, sys; from pathlib import Path; from qualification.evidence import signing\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))\n"
        "signing.pipeline_signer(Path(sys.argv[1]))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, check=False)
    assert b"File too large" in done.stderr
    assert list((tmp_path / "keys").iterdir()) == []
