"""Tape files: versioned JSON, gzipped when the name ends in .gz, loadable on any machine.

Equal tapes give equal bytes. What a file holds is checked on reading, to the last index.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path as FilePath
from typing import Any

from trainer_rank.admission.budget import Status
from trainer_rank.admission.budget import Term as Claim
from trainer_rank.errors import TapeError
from trainer_rank.features import FEATURES
from trainer_rank.tapes.explain import Explanation, Grounds
from trainer_rank.tapes.passes import Action, Operation
from trainer_rank.tapes.rules import Rule, Term
from trainer_rank.tapes.tape import Kind, Part, Path, Probe, Tape

SCHEMA = "trainer-rank/tape"
VERSIONS = (1, 2)
"""2 adds library claims and the kind of pass; a tape without them is written as 1, which older releases read."""
LARGEST_FILE = 256 << 20
"""Bytes of JSON, unpacked, that a tape may have."""


def save_tape(tape: Tape, path: str | FilePath) -> None:
    """Write ``tape`` to ``path``; an existing file is replaced whole or not at all."""
    path = FilePath(path)
    text = json.dumps(document(tape), separators=(",", ":"), sort_keys=True).encode()
    whole = path.with_name(f".{path.name}.partial")
    try:
        whole.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
        whole.replace(path)
    except OSError as error:
        whole.unlink(missing_ok=True)
        raise TapeError(f"{path}: cannot be written ({error.strerror or error})") from error


def load_tape(path: str | FilePath, *, target: Mapping[str, str] | None = None) -> Tape:
    """Read a tape. ``target`` names what it must have been recorded for (card, geometry, settings, ...).

    TapeError when the file cannot be read, is of another schema or version, or was recorded for something else.
    """
    path = FilePath(path)
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = _unpacked(data)
        read = json.loads(data.decode())
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise TapeError(f"{path}: not readable as a tape ({error})") from None
    try:
        tape = _tape(read)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise TapeError(f"{path}: not a tape ({error!r})") from None
    for name, wanted in (target or {}).items():
        recorded = tape.provenance.get(name)
        if recorded != wanted:
            raise TapeError(f"{path}: recorded for {name} {recorded or 'unstated'}, not {wanted}; record a tape for it")
    return tape


def _unpacked(data: bytes) -> bytes:
    unpacker = zlib.decompressobj(wbits=31)
    text = unpacker.decompress(data, LARGEST_FILE)
    if not unpacker.eof:
        raise ValueError(f"damaged, cut, or more than {LARGEST_FILE} bytes of JSON")
    return text


def document(tape: Tape) -> dict[str, Any]:
    """Return the content of the file of ``tape``."""
    added: dict[str, Any] = {
        "claims": [[each.name, each.size, str(each.status), each.source] for each in tape.claims],
        "kind": None if tape.kind is None else asdict(tape.kind),
    }
    return (added if any(added.values()) else {}) | {
        "schema": SCHEMA,
        "version": VERSIONS[1] if any(added.values()) else VERSIONS[0],
        "provenance": tape.provenance,
        "explanations": [
            [str(each.grounds), _rule_row(each.rule), [_rule_row(other) for other in each.others]]
            for each in tape.explanations
        ],
        "parts": [
            {"context": part.context, "layers": part.layers, "paths": [_path_row(path) for path in part.paths]}
            for part in tape.parts
        ],
    }


def _rule_row(rule: Rule) -> list[Any]:
    return [[list(term) for term in rule.terms], rule.constant, rule.floor, rule.ceiling]


def _path_row(path: Path) -> dict[str, Any]:
    return {
        "operations": [[int(action), subject, stream] for action, subject, stream in path.operations],
        "stages": [list(stage) for stage in path.stages],
        "allocations": list(path.allocations),
        "ancestors": list(path.ancestors),
        "probes": [
            [probe.features, probe.source, probe.allocated, probe.peak_allocated, probe.peak_reserved]
            for probe in path.probes
        ],
    }


def _tape(document: Any) -> Tape:  # noqa: ANN401 - whatever the file holds
    if document["schema"] != SCHEMA:
        raise ValueError(f"schema {document['schema']!r} is not {SCHEMA!r}")
    if document["version"] not in VERSIONS:
        raise ValueError(f"version {document['version']} is none of {VERSIONS}; use the release that wrote it")
    explanations = tuple(
        Explanation(_rule(rule), tuple(_rule(other) for other in others), Grounds(grounds))
        for grounds, rule, others in document["explanations"]
    )
    parts = tuple(
        Part(
            _whole(part["context"]),
            None if part["layers"] is None else _whole(part["layers"]),
            tuple(_path(path, len(explanations)) for path in part["paths"]),
        )
        for part in document["parts"]
    )
    if any(not part.paths for part in parts):
        raise ValueError("a part has no paths")
    provenance = {str(name): str(value) for name, value in document["provenance"].items()}
    if document["version"] == VERSIONS[0]:
        return Tape(explanations, parts, provenance)
    claims = tuple(
        Claim(str(name), _whole(size), Status(status), str(source)) for name, size, status, source in document["claims"]
    )
    return Tape(explanations, parts, provenance, claims, None if document["kind"] is None else _kind(document["kind"]))


def _kind(row: Mapping[str, Any]) -> Kind:
    kind = Kind(**row)
    flags = {"gradients", "hidden", "shared"}
    counts = vars(kind).keys() - flags - {"retention"}
    if any(type(vars(kind)[name]) is not bool for name in flags) or type(kind.retention) is not str:
        raise TypeError(f"the kind of pass is {row!r}")
    if any(_whole(row[name]) < 0 for name in counts):
        raise ValueError(f"the kind of pass holds a negative figure: {row!r}")
    return kind


def _whole(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is not an integer")
    return value


def _rule(row: Sequence[Any]) -> Rule:
    terms, constant, floor, ceiling = row
    for feature, block, _ in terms:
        if feature not in FEATURES or block < 1:
            raise ValueError(f"no such term: {feature!r} in blocks of {block}")
    return Rule(
        tuple(Term(feature, _whole(block), _whole(coefficient)) for feature, block, coefficient in terms),
        _whole(constant),
        None if floor is None else _whole(floor),
        None if ceiling is None else _whole(ceiling),
    )


def _path(row: Mapping[str, Any], explanations: int) -> Path:
    path = Path(
        operations=tuple(
            Operation(Action(action), _whole(subject), _whole(stream)) for action, subject, stream in row["operations"]
        ),
        stages=tuple((_whole(first), str(name)) for first, name in row["stages"]),
        allocations=tuple(_whole(each) for each in row["allocations"]),
        ancestors=tuple(_whole(each) for each in row["ancestors"]),
        probes=tuple(
            Probe({str(name): _whole(value) for name, value in features.items()}, str(source), *map(_whole, figures))
            for features, source, *figures in row["probes"]
        ),
    )
    if not path.probes or any(not 0 <= each < explanations for each in (*path.allocations, *path.ancestors)):
        raise ValueError("a path without probes, or with an allocation that nothing explains")
    if any(not -len(path.ancestors) <= each.subject < len(path.allocations) for each in path.operations):
        raise ValueError("an operation on an allocation that does not exist")
    return path
