"""Verify an evidence bundle without the program that wrote it: Python >= 3.11 and the package ``cryptography`` alone.

    verify_bundle.py BUNDLE --trust FOLDER         keys/*.json and people.toml, as in $QUALIFY_TRUST
    verify_bundle.py BUNDLE --accept KEY_ID ...    keys inside the bundle, after comparing their ids with their owners

A bundle is a tar of bundle.json (manifest), head.json (signed tree head), entries/<sequence>.json (DSSE envelopes over
in-toto statements), keys.json and blobs/sha256/<digest>. Exit code 0: verified; 5: not, the line says why; 2: usage.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import sys
import tarfile
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

PAYLOAD_TYPE = "application/vnd.in-toto+json"
MEMBER = re.compile(r"(bundle|head|keys)\.json|entries/\d{12}\.json|blobs/sha256/[0-9a-f]{64}")
MOST_MEMBERS, MOST_BYTES, MOST_SMALL = 20_000, 4 << 30, 64 << 20
PREFIX, SUFFIX = "urn:trainer-rank-qualification:", ":v1"
STAMPS = {  # the field of each kind of fact that says when it was signed
    "qualification-result": "started_at", "cleanup-receipt": "taken_at", "adoption-decision": "decided_at",
    "human-approval": "signed_at", "run-permission": "signed_at", "tree-head": "signed_at", "tombstone": "removed_at",
    "status-publication": "published_at"}  # fmt: skip
BY_PEOPLE = {"human-approval", "run-permission"}
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, tarfile.TarError)


class BadError(Exception):
    """Something does not verify; the text ends in the code of its kind."""


def require(condition: object, code: str, text: str) -> None:
    if not condition:
        raise BadError(f"{text} [{code}]")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def canonical(value: Any) -> bytes:
    """RFC 8785, for JSON without floats."""
    if isinstance(value, dict):
        keys = sorted(value, key=lambda key: key.encode("utf-16-be", "surrogatepass"))
        return b"{" + b",".join(canonical(key) + b":" + canonical(value[key]) for key in keys) + b"}"
    if isinstance(value, list):
        return b"[" + b",".join(map(canonical, value)) + b"]"
    if isinstance(value, float) or (type(value) is int and abs(value) >= 2**53):
        raise ValueError(f"{value} has no canonical form")
    return json.dumps(value, ensure_ascii=False).encode()


def parse(data: bytes, text: str) -> Any:
    try:
        value = json.loads(data)
        require(canonical(value) == data, "not-canonical", f"{text}: is not in canonical form")
    except (ValueError, RecursionError):
        raise BadError(f"{text}: is no canonical JSON [not-canonical]") from None
    return value


def key_id(public: str) -> str:
    return sha256(canonical({"keytype": "ed25519", "scheme": "ed25519", "keyval": {"public": public}}))


class Keys:
    """The keys that count, by id: raw bytes, owner, use, and when they are valid."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[Ed25519PublicKey, str, str, str, str]] = {}

    def add(self, public: str, owner: str, use: str, start: str | None, end: str | None) -> str:
        key, identity = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)), key_id(public)
        self.known[identity] = (key, owner, use, (start or "")[:19], (end or "9999")[:19])
        return identity

    def load(self, folder: Path) -> None:
        for path in sorted((folder / "keys").glob("*.json")):
            try:
                content = json.loads(path.read_bytes())
                valid = content.get("valid_from"), content.get("expires_at")
                added = self.add(content["keyval"]["public"], content["owner"], "pipeline", *valid)
            except MALFORMED:
                raise BadError(f"{path}: is no Ed25519 public key file [key-altered]") from None
            require(path.name == f"{added}.json", "key-altered", f"{path}: is not the key that its name claims")
        people = folder / "people.toml"
        listed = tomllib.loads(people.read_text()).get("people", {}) if people.exists() else {}
        for name, person in listed.items():
            for text in person["keys"]:
                key: Any = load_ssh_public_key(text.encode()) if text.startswith("ssh-") else None
                public = key.public_bytes_raw().hex() if key else text
                self.add(public, name, "person", None, str(person.get("expires_at") or "9999"))

    def accept(self, listed: list[dict[str, Any]], wanted: list[str]) -> None:
        for key in listed:
            public, *rest = (key[one] for one in ("public", "owner", "use", "valid_from", "expires_at"))
            sound = len(key) == 6 and key_id(public) == key["keyid"] and key["use"] in ("pipeline", "person")
            require(sound, "key-altered", f"keys.json: {key['keyid']} is the id of another key")
            if key["keyid"] in wanted:
                self.add(public, *rest)

    def signers(self, stored: bytes, place: str) -> tuple[bytes, list[tuple[str, str, str, str]]]:
        """Return an envelope's payload and the owner, use and validity of each known key that signed it."""
        try:
            envelope = json.loads(stored)
            payload = base64.b64decode(envelope["payload"], validate=True)
            signed = [(one["keyid"], base64.b64decode(one["sig"], validate=True)) for one in envelope["signatures"]]
            shape = {"payload", "payloadType", "signatures"} == set(envelope)
            require(shape and envelope["payloadType"] == PAYLOAD_TYPE, "envelope", f"{place}: is no in-toto envelope")
            require(len({one for one, _ in signed}) == len(signed), "envelope", f"{place}: a key id signs twice")
        except MALFORMED:
            raise BadError(f"{place}: is no DSSE envelope [envelope]") from None
        again: dict[str, Any] = {"payload": base64.b64encode(payload).decode(), "payloadType": PAYLOAD_TYPE}
        again["signatures"] = [{"keyid": one, "sig": base64.b64encode(sig).decode()} for one, sig in signed]
        require(canonical(again) == stored, "not-canonical", f"{place}: the envelope is not canonical")
        pae = b"DSSEv1 %d %b %d %b" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)
        found = []
        for identity, signature in signed:
            hits = [one for one, known in self.known.items() if _verifies(known[0], signature, pae)]
            right = identity in hits or (not hits and identity not in self.known)
            require(right, "signature", f"{place}: a signature does not verify under the key id that it carries")
            found += [self.known[one][1:] for one in hits]
        require(found, "signer-unknown", f"{place}: no signature of a key that is trusted here")
        return payload, found


def _verifies(key: Ed25519PublicKey, signature: bytes, data: bytes) -> bool:
    try:
        key.verify(signature, data)
    except InvalidSignature:
        return False
    return True


def open_fact(stored: bytes, keys: Keys, place: str) -> tuple[str, dict[str, Any]]:
    """Return kind and record of an envelope after every check that it must pass."""
    payload, signers = keys.signers(stored, place)
    statement = parse(payload, f"{place}: payload")
    named = str(statement.get("predicateType")) if isinstance(statement, dict) else ""
    kind = named.removeprefix(PREFIX).removesuffix(SUFFIX)
    require(f"{PREFIX}{kind}{SUFFIX}" == named and kind in STAMPS, "statement", f"{place}: unknown predicate {named}")
    use = "person" if kind in BY_PEOPLE else "pipeline"
    try:
        predicate = statement["predicate"]
        record = predicate["qualification"] if kind == "qualification-result" else predicate
        digests = {name: value for one in statement["subject"] for name, value in one["digest"].items()}
        same = statement["_type"] == "https://in-toto.io/Statement/v1" and _agree(kind, record, predicate, digests)
        stamp, person = record[STAMPS[kind]][:19], record["person"] if use == "person" else None
    except MALFORMED:
        raise BadError(f"{place}: is no {kind} [statement]") from None
    require(same, "statement", f"{place}: subject and predicate contradict each other")
    permitted = [one for one in signers if one[1] == use]
    require(permitted, "signer-not-permitted", f"{place}: a {kind} signed by {signers[0][0]}")
    valid = [one for one in permitted if one[2] <= stamp < one[3]]
    require(valid, "key-expired", f"{place}: signed at {stamp}, when the key was not valid")
    right = person is None or person in {one[0] for one in valid}
    require(right, "signer-not-permitted", f"{place}: the word of {person}, not signed by that person")
    return kind, record


def _agree(kind: str, record: dict[str, Any], predicate: dict[str, Any], digests: dict[str, str]) -> bool:
    if kind == "qualification-result":
        source, passed = predicate["source"], record["verdict"] == "PASSED"
        named = {"gitCommit": source["commit"], "gitTree": source["tree"], "sha256": source["manifest_sha256"]}
        tests = [one["name"] for one in record["criteria"] if one["verdict"] == "PASSED"]
        says = predicate["result"] == ("PASSED" if passed else "FAILED")
        return digests == named and says and bool(predicate["passedTests"] == tests)
    if kind in BY_PEOPLE:
        same = digests.get("gitCommit") == record["commit"] and digests.get("sha256") == record["evidence_root"]
        return bool(same and (record["action"] == "permit") == (kind == "run-permission"))
    if kind in ("tree-head", "tombstone"):
        return bool(digests["sha256"] == (record["root"] if kind == "tree-head" else record["blobs"][-1]))
    return len(digests["gitCommit"]) == 40


def read(path: Path) -> tuple[dict[str, bytes], dict[str, int]]:
    """Return the small members' bytes, and digest and size of each blob, all of them safe."""
    small: dict[str, bytes] = {}
    blobs: dict[str, int] = {}
    with tarfile.open(path, "r:") as archive:
        for member in archive:
            digest = member.name.rpartition("/")[2]
            require(member.isreg() and MEMBER.fullmatch(member.name), "bundle", f"{member.name!r} may not be inside")
            require(member.name not in small and digest not in blobs, "bundle", f"{member.name} is there twice")
            full = len(small) + len(blobs) >= MOST_MEMBERS or member.offset_data + member.size > MOST_BYTES
            require(not full, "bundle", "holds too much")
            content: Any = archive.extractfile(member)
            if member.name.startswith("blobs/"):
                actual = hashlib.file_digest(content, "sha256").hexdigest()
                require(actual == digest, "blob-altered", f"blob {digest} has other bytes")
                blobs[digest] = member.size
            else:
                require(member.size <= MOST_SMALL, "bundle", f"{member.name} is too large")
                small[member.name] = content.read()
    return small, blobs


def verify(path: Path, keys: Keys, accepted: list[str], now: datetime) -> str:
    """Check everything; return a line that says what was verified. Raises BadError."""
    small, blobs = read(path)
    manifest = parse(small["bundle.json"], "bundle.json")
    known = isinstance(manifest, dict) and len(manifest) == 9 and manifest["format"] == "qualify-bundle/1"
    require(known, "bundle", "the manifest has another form")
    after, chain, entries = manifest["after"], manifest["chain"], manifest["entries"]
    names = {"bundle.json", "head.json", "keys.json", *(f"entries/{one:012d}.json" for one in entries)}
    require(set(small) == names and blobs == manifest["blobs"], "bundle", "is not what its manifest lists")
    require(entries and entries == sorted(set(entries)), "bundle", "lists entries out of order, twice, or none")
    require(entries[0] == after + 1 and entries[-1] <= after + len(chain), "bundle", "lists entries outside its chain")
    sound = all(re.fullmatch("[0-9a-f]{64}", one) for one in (manifest["root"], *chain))
    require(sound, "bundle", "has no sound chain")
    require(len(set(chain)) == len(chain), "repeated", "an envelope is there twice")
    keys.accept(json.loads(small["keys.json"]), accepted)
    facts = []
    for sequence in entries:
        stored = small[f"entries/{sequence:012d}.json"]
        require(sha256(stored) == chain[sequence - after - 1], "entry-hash", f"sequence {sequence}: is not the chain's")
        facts.append((sequence, *open_fact(stored, keys, f"sequence {sequence}")))
    head = _head(small["head.json"], manifest, keys, now)
    _rests_on(facts, manifest, blobs)
    return f"run {manifest['run']}, {len(entries)} entries up to tree head {head['size']}, {len(blobs)} blobs"


def _head(stored: bytes, manifest: dict[str, Any], keys: Keys, now: datetime) -> dict[str, Any]:
    try:
        kind, head = open_fact(stored, keys, "head.json")
    except BadError as error:
        raise BadError(f"{error} [tree-head]") from None
    require(kind == "tree-head" and head["ledger"] == manifest["ledger"], "tree-head", "no head of this ledger")
    root, size = manifest["root"], manifest["after"] + len(manifest["chain"])
    genesis = b"trainer-rank-qualification ledger genesis v1\0" + manifest["ledger"].encode()
    require(
        manifest["after"] or root == sha256(genesis), "rewritten", "the chain does not start at the ledger's genesis"
    )
    for number, digest in enumerate(manifest["chain"], manifest["after"] + 1):
        parts = number.to_bytes(8, "big") + bytes.fromhex(root) + bytes.fromhex(digest)
        root = sha256(b"trainer-rank-qualification ledger entry v1\0" + parts)
    require(size >= head["size"], "truncated", f"the chain ends at {size}, the signed head is of size {head['size']}")
    require((size, root) == (head["size"], head["root"]), "rewritten", "the chain does not lead to the signed head")
    now += timedelta(hours=2)
    require(datetime.fromisoformat(head["signed_at"]) <= now, "clock-behind", "this clock is behind the signed head")
    return head


def _rests_on(facts: list[Any], manifest: dict[str, Any], blobs: dict[str, int]) -> None:
    """Every blob must be inside, withheld or removed, and every decision's evidence inside."""
    results = [record for _, kind, record in facts if kind == "qualification-result"]
    removed = {digest for _, kind, record in facts if kind == "tombstone" for digest in record["blobs"]}
    private = {one["sha256"] for result in results for one in result["artifacts"] if one["private"]}
    absent = removed | (private & set(manifest["withheld"]))
    needed = [(one["sha256"], one["size"]) for result in results for one in result["artifacts"]]
    needed += [(one[name], None) for one in results for name in ("environment_sha256", "rules_sha256")]
    needed += [(one["policy"]["sha256"], None) for one in results]
    needed += [(record["rules_sha256"], None) for _, kind, record in facts if kind == "adoption-decision"]
    for digest, size in needed:
        require(digest in blobs or digest in absent, "blob-missing", f"blob {digest} is not in the bundle")
        require(size is None or blobs.get(digest, size) == size, "blob-altered", f"blob {digest} is not of its size")
    evidence = [at for at, kind, _ in facts if kind in ("qualification-result", "cleanup-receipt")]
    for at, kind, made in facts:
        require(made.get("run", manifest["run"]) == manifest["run"], "bundle", f"sequence {at}: is of another run")
        if kind == "adoption-decision":
            digests = [manifest["chain"][one - manifest["after"] - 1] for one in evidence if one < at]
            roots = [sha256(canonical(digests[:count])) for count in range(len(digests) + 1)]
            require(made["evidence_root"] in roots, "bundle", f"sequence {at}: not all of its evidence is inside")


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--trust", type=Path, help="a folder with keys/*.json and people.toml")
    parser.add_argument("--accept", nargs="+", default=[], metavar="KEY_ID", help="ids of keys inside to trust")
    options = parser.parse_args()
    if not (options.accept if options.trust is None else options.trust.is_dir()) or not options.bundle.is_file():
        parser.error("give a bundle's file, and whose signatures count: a folder with --trust, or ids with --accept")
    try:
        keys = Keys()
        if options.trust is not None:
            keys.load(options.trust)
        print(f"{options.bundle} verifies: {verify(options.bundle, keys, options.accept, datetime.now(UTC))}")
        return 0
    except BadError as error:
        print(f"{options.bundle} does NOT verify: {error}")
    except MALFORMED as error:
        print(f"{options.bundle} does NOT verify: is malformed, {error!r} [bundle]")
    return 5


if __name__ == "__main__":
    sys.exit(main())
