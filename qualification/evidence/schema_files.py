"""JSON Schemas of the statements, made from the records; ``python -m qualification.evidence.schema_files`` writes them.

They are shipped as ``schemas/<kind>.json`` for readers in other languages; this package itself decodes strictly into
the records.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from qualification.evidence.statements import KINDS, PredicateType, Statement

FOLDER = Path(__file__).with_name("schemas")


def schema(predicate_type: PredicateType) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a statement of this predicate type."""
    made = msgspec.json.schema(Statement[KINDS[predicate_type].predicate])  # type: ignore[misc]
    definitions = made["$defs"]
    statement = definitions.pop(made["$ref"].rpartition("/")[2])
    statement["properties"]["predicateType"] = {"const": predicate_type.value}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": predicate_type.value,
        **statement,
        "title": predicate_type.short,
        "$defs": definitions,
    }


def text(predicate_type: PredicateType) -> str:
    """Return the schema as the text of its file."""
    return json.dumps(schema(predicate_type), indent=2, sort_keys=True) + "\n"


def path(predicate_type: PredicateType) -> Path:
    """Return the file of a schema in the package."""
    return FOLDER / f"{predicate_type.short}.json"


def main() -> None:
    """Write every schema."""
    FOLDER.mkdir(exist_ok=True)
    for predicate_type in PredicateType:
        path(predicate_type).write_text(text(predicate_type))


if __name__ == "__main__":
    main()
