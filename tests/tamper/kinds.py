"""The register of kinds of tampering: what is done, and the code, place and sequence that verification gives.

Unless it says otherwise, the intruder can write the database and the blobs, drop triggers and compute hashes, but holds
no key and cannot touch the trust folder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from qualification.evidence.findings import Code
from tests.tamper.site import SUFFIX, Site

STEPS = b"steps" + SUFFIX + b"run-1"
Apply = Callable[[Site], None]


class Kind(NamedTuple):
    """One kind of tampering, and how it must be found."""

    name: str
    apply: Apply
    code: Code
    place: str
    sequence: int | None


CORPUS: list[Kind] = []


def kind(code: Code, place: str, sequence: int | None = None) -> Callable[[Apply], Apply]:
    def register(apply: Apply) -> Apply:
        CORPUS.append(Kind(apply.__name__, apply, code, place, sequence))
        return apply

    return register


def sql(site: Site, *statements: str) -> None:
    with site.unprotected() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
