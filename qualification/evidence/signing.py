"""DSSE envelopes signed with Ed25519 (securesystemslib), and the pipeline's own key.

The private key is ``$QUALIFY_TRUST/keys/pipeline.pem`` (mode 0600), made on first use; its public half lies beside it.
"""

from __future__ import annotations

import stat
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import UnverifiedSignatureError
from securesystemslib.signer import CryptoSigner, Signature

from qualification.errors import ConfigurationError
from qualification.evidence.canonical import canonical_bytes
from qualification.evidence.files import write_once
from qualification.evidence.findings import Code, InvalidEvidence
from qualification.evidence.trust import KEYS_FOLDER, PIPELINE, Trust, TrustedKey
from qualification.records import Record

PAYLOAD_TYPE = "application/vnd.in-toto+json"
PRIVATE_KEY_FILE = "pipeline.pem"


class Opened(Record, frozen=True):
    """A verified envelope: its payload, the distinct keys that signed it, and ids of signatures nobody here knows."""

    payload: bytes
    signers: tuple[TrustedKey, ...]
    unknown: tuple[str, ...] = ()

    def people(self) -> frozenset[str]:
        """Return the distinct owners of the keys that signed: two keys of one person count once."""
        return frozenset(key.owner for key in self.signers)


def utc_now() -> str:
    """Return the present time as a record's stamp."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def sign(payload: bytes, signer: CryptoSigner) -> bytes:
    """Return the stored bytes of a DSSE envelope over an in-toto statement's canonical bytes."""
    envelope = Envelope(payload, PAYLOAD_TYPE, {})
    envelope.sign(signer)
    return canonical_bytes(envelope.to_dict())


def add_signature(stored: bytes, signer: CryptoSigner) -> bytes:
    """Return the envelope with one more signature over the same payload."""
    envelope = _read(stored)
    envelope.sign(signer)
    return canonical_bytes(envelope.to_dict())


def open_envelope(stored: bytes, trust: Trust) -> Opened:
    """Verify an envelope's stored bytes. At least one signature of a trusted key is needed.

    A key's id is only a hint: the key that verifies is the signer. A signature that carries another id than its key's,
    or a known key's signature that does not verify, spoils the envelope; signatures of unknown keys are listed.
    Raises InvalidEvidence.
    """
    envelope = _read(stored)
    pae = envelope.pae()
    signers, unknown = [], []
    for signature in envelope.signatures.values():
        key = _signer(signature, pae, trust)
        if key is None:
            unknown.append(signature.keyid)
        else:
            signers.append(key)
    if not signers:
        known = ", ".join(identity[:12] for identity in unknown) or "nobody"
        raise InvalidEvidence(Code.SIGNER_UNKNOWN, f"is signed by {known}, not by a key that is trusted here")
    return Opened(payload=envelope.payload, signers=tuple(signers), unknown=tuple(unknown))


def unverified_payload(stored: bytes) -> bytes:
    """Return what an envelope holds, whoever signed it: to be shown, never to be decided on. Raises InvalidEvidence."""
    payload: bytes = _read(stored).payload
    return payload


def _read(stored: bytes) -> Envelope:
    try:
        envelope = Envelope.from_dict(msgspec.json.decode(stored))
    except (KeyError, TypeError, ValueError, AttributeError, msgspec.DecodeError) as error:
        raise InvalidEvidence(Code.ENVELOPE, f"is no DSSE envelope: {error}") from None
    if envelope.payload_type != PAYLOAD_TYPE:
        raise InvalidEvidence(Code.ENVELOPE, f"holds {envelope.payload_type!r}, not {PAYLOAD_TYPE}")
    if canonical_bytes(envelope.to_dict()) != stored:
        raise InvalidEvidence(Code.NOT_CANONICAL, "is a DSSE envelope, but its JSON is not canonical")
    return envelope


def _signer(signature: Signature, pae: bytes, trust: Trust) -> TrustedKey | None:
    hinted = trust.keys.get(signature.keyid)
    if hinted is not None:
        if _verifies(hinted, signature, pae):
            return hinted
        raise InvalidEvidence(Code.SIGNATURE, f"carries a signature of key {signature.keyid[:12]} that does not verify")
    actual = next((key for key in trust.keys.values() if _verifies(key, signature, pae)), None)
    if actual is not None:
        raise InvalidEvidence(
            Code.SIGNATURE, f"is signed by key {actual.keyid[:12]} under the other id {signature.keyid[:12]!r}"
        )
    return None


def _verifies(key: TrustedKey, signature: Signature, pae: bytes) -> bool:
    try:
        key.key().verify_signature(Signature(key.keyid, signature.signature), pae)
    except UnverifiedSignatureError:
        return False
    return True


def pipeline_signer(folder: Path) -> CryptoSigner:
    """Return the pipeline's signer under the trust folder, making its key pair on first use.

    Several processes may arrive at once: one private key wins, and the others use it.
    """
    path = folder / KEYS_FOLDER / PRIVATE_KEY_FILE
    if not path.exists():
        _make_pipeline_key(path)
    return read_signer(path)


def read_signer(path: Path, passphrase: bytes | None = None) -> CryptoSigner:
    """Read an Ed25519 private key from a PEM or OpenSSH file that only its owner can read.

    Raises ConfigurationError naming the file; never shows what is in it.
    """
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise ConfigurationError(f"{path} can be read by others; chmod 600 it, and replace the key if that was so")
        content = path.read_bytes()
        load = load_ssh_private_key if b"OPENSSH" in content[:64] else load_pem_private_key
        key = load(content, passphrase)
    except FileNotFoundError:
        raise ConfigurationError(f"{path}: there is no such private key") from None
    except TypeError:
        words = (
            "has no passphrase" if passphrase else "is locked by a passphrase; qualify asks for it with --passphrase"
        )
        raise ConfigurationError(f"{path}: {words}") from None
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigurationError(f"{path}: is no private key that can be read ({type(error).__name__})") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigurationError(f"{path}: is not an Ed25519 key; make one with ssh-keygen -t ed25519")
    return CryptoSigner(key)


def _make_pipeline_key(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    signer = CryptoSigner.generate_ed25519()
    public = {**signer.public_key.to_dict(), "owner": PIPELINE}
    public_path = path.parent / f"{signer.public_key.keyid}.json"
    write_once(public_path, canonical_bytes(public))
    try:
        write_once(path, signer.private_bytes, mode=0o600)
    except FileExistsError:  # another process was first; its key is the pipeline's
        public_path.unlink()
