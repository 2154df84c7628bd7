"""Gather from the evidence database what the gate decides on, and keep what it answered as a record.

Facts come from the stored envelopes, opened with the trusted keys again; the projections only say where to look, and
verification has compared them with the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
from sqlalchemy import Connection, Engine, Select, select

from db import queries
from db.engine import reading
from db.models import approvals
from db.source import StoredEvidence, read_identity
from qualification.approvals import Word, weigh
from qualification.errors import ConfigurationError, TamperedError, UnknownError
from qualification.evidence.authentic import Authentic, authenticate
from qualification.evidence.blobs import BlobStore
from qualification.evidence.canonical import evidence_root, is_root_of_first
from qualification.evidence.findings import InvalidEvidence
from qualification.evidence.heads import TreeHeads
from qualification.evidence.signing import utc_now
from qualification.evidence.trust import Person, Trust, load_people
from qualification.evidence.verify import Verification, verify
from qualification.gate import GateInputs, Head, Ruling, decide, decide_again, flatten
from qualification.records import AdoptionDecision, Approval, Receipt, WorkloadResult
from qualification.reference import head_standing
from qualification.reporting.lines import RunLine
from qualification.rules import RulesDocument, parse_rules
from qualification.standing import RunEvidence, Verified, assemble, matter


class Case(NamedTuple):
    """One run before the gate: its evidence, the rules, what verification showed, the inputs, and the answer."""

    run: RunLine
    evidence: RunEvidence
    document: RulesDocument
    verification: Verification
    inputs: GateInputs
    ruling: Ruling

    def decision(self) -> AdoptionDecision:
        """Return the record of this answer, which holds every input and can be replayed from them alone."""
        return AdoptionDecision(
            run=self.run.run,
            decision=self.ruling.decision,
            row=self.ruling.row,
            reasons=self.ruling.reasons,
            evidence_root=self.inputs.evidence_root,
            rules_sha256=self.inputs.rules_sha256,
            ledger_size=self.verification.size,
            ledger_root=self.verification.root,
            decided_at=self.inputs.decided_at,
            inputs=flatten(self.inputs),
        )


def examine(
    engine: Engine,
    store: BlobStore,
    trust_folder: Path,
    *,
    run: str | None = None,
    commit: str | None = None,
    document: RulesDocument | None = None,
    address: str | None = None,
) -> Case:
    """Verify the whole ledger, then put a run before the gate as things stand now, all from one view of the database.

    ``run`` None means the newest, of ``commit`` if given; ``document`` None the rules that the run was made under.
    ``address`` is the repository in which to look whether the commit is still the head of its reference. Raises
    ConfigurationError when there is no such run, TamperedError when the evidence is too damaged to say.
    """
    trust = Trust.load(trust_folder)
    now = utc_now()
    with reading(engine) as connection:
        heads = TreeHeads(trust_folder, read_identity(connection)).read(trust)
        verification = verify(StoredEvidence(connection), store, trust, heads)
        line = _find(connection, verification, run, commit)
        return consider(
            connection,
            line,
            document or recorded_rules(store, line),
            verification,
            trust,
            load_people(trust_folder),
            head=head_standing(line.commit, line.reference, address),
            now=now,
        )


def _find(connection: Connection, verification: Verification, run: str | None, commit: str | None) -> RunLine:
    """Find the run; of evidence that does not verify, say so rather than that the run is not there."""
    try:
        return queries.find_run(connection, run, commit)
    except ConfigurationError:
        if verification.first is not None:
            raise TamperedError(f"the evidence does not verify: {verification.first}") from None
        raise


def consider(
    connection: Connection,
    run: RunLine,
    document: RulesDocument,
    verification: Verification,
    trust: Trust,
    people: Mapping[str, Person],
    *,
    head: Head,
    now: str,
) -> Case:
    """Put one run before the gate at ``now`` (UTC), under these rules and with what verifying the ledger showed."""
    evidence = run_evidence(connection, run, trust)
    weighed = weigh(words_on(connection, run.commit, trust), people, matter(evidence, document), now)
    verified = Verified(
        problems=tuple(str(finding) for finding in verification.findings),
        size=verification.size,
        root=verification.root,
        covered_size=verification.head,
    )
    inputs = assemble(
        evidence,
        document,
        verified,
        weighed,
        head=head,
        superseded_by=queries.newer_run(connection, run),
        now=now,
    )
    return Case(run, evidence, document, verification, inputs, decide(inputs))


def run_evidence(connection: Connection, run: RunLine, trust: Trust) -> RunEvidence:
    """Read a run's results and receipts from their stored envelopes. One that cannot be opened is left out.

    Verification names it; the gate holds the run as tampered, and finds the fact missing besides.
    """
    entries = queries.entries_of(connection, run.run)
    opened = [found for _, found in _opened(entries, trust)]
    facts = [found.read.fact for found in opened]
    return RunEvidence(
        run=run.run,
        commits=tuple(dict.fromkeys(found.read.commit for found in opened if found.read.commit)) or (run.commit,),
        sources=tuple({source.manifest_sha256: source for found in opened if (source := found.read.source)}.values()),
        results=tuple(fact for fact in facts if isinstance(fact, WorkloadResult)),
        receipts=tuple(fact for fact in facts if isinstance(fact, Receipt)),
        evidence_root=evidence_root([digest for _, digest, _ in entries]),
        last_sequence=max((sequence for sequence, _, _ in entries), default=run.sequence),
    )


def words_on(connection: Connection, commit: str, trust: Trust) -> list[Word]:
    """Return every approval, rejection and hold of a commit, as signed."""
    return words_from(connection, select(approvals.c.sequence).where(approvals.c.commit == commit), trust)


def words_from(connection: Connection, sequences: Select[tuple[int]], trust: Trust) -> list[Word]:
    """Return the people's words at the selected ledger sequences, opened with the trusted keys."""
    return [
        Word(sequence=sequence, approval=found.read.fact, signers=found.signers)
        for sequence, found in _opened(queries.envelopes(connection, connection.scalars(sequences)), trust)
        if isinstance(found.read.fact, Approval)
    ]


def recorded_rules(store: BlobStore, run: RunLine) -> RulesDocument:
    """Return the gate rules that a run was made under, from the blob that was stored with it.

    Raises InvalidEvidence when the blob is missing or altered.
    """
    return parse_rules(store.read(run.rules_sha256), f"of run {run.run}", None)


class Replayed(NamedTuple):
    """A recorded decision, what the table answers from its stored inputs, and in what that differs (nothing: equal)."""

    recorded: AdoptionDecision
    ruling: Ruling
    differences: tuple[str, ...]


def replay(connection: Connection, sequence: int, trust: Trust) -> Replayed:
    """Decide again from the stored bytes of a recorded decision, and compare the evidence it names with the ledger's.

    Raises UnknownError when there is no decision at this sequence, or one of another version of the table.
    """
    for _, found in _opened(queries.envelopes(connection, [sequence]), trust):
        if isinstance(recorded := found.read.fact, AdoptionDecision):
            try:
                ruling = decide_again(recorded)
            except msgspec.ValidationError as error:
                raise UnknownError(f"the decision at sequence {sequence} is of another version: {error}") from None
            return Replayed(recorded, ruling, tuple(_differences(connection, sequence, recorded, ruling)))
    raise UnknownError(f"sequence {sequence} of the ledger holds no decision that can be opened")


def _differences(connection: Connection, decided_at: int, recorded: AdoptionDecision, ruling: Ruling) -> Iterator[str]:
    for name in ("decision", "row", "reasons"):
        if (then := getattr(recorded, name)) != (again := getattr(ruling, name)):
            yield f"{name} was {then}, is {again}"
    before = [digest for sequence, digest, _ in queries.entries_of(connection, recorded.run) if sequence < decided_at]
    if not is_root_of_first(recorded.evidence_root, before):
        yield f"evidence root was {recorded.evidence_root}, is {evidence_root(before)}"


def _opened(entries: Iterable[tuple[int, str, bytes]], trust: Trust) -> Iterator[tuple[int, Authentic]]:
    for sequence, _, envelope in entries:
        try:
            yield sequence, authenticate(envelope, trust)
        except InvalidEvidence:
            continue
