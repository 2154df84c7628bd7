"""Append receipts to the workplace of the environment, one transaction each: ``writer.py NAME COUNT START``.

Waits until the Unix time START, so that several of these begin at the same instant, and prints each sequence it got.
"""

from __future__ import annotations

import sys
import time

from db.engine import open_for_writing
from db.ledger import Ledger
from qualification.evidence.blobs import BlobStore
from qualification.evidence.signing import pipeline_signer, sign, utc_now
from qualification.evidence.statements import statement
from qualification.home import home, trust
from tests import facts


def main(name: str, count: int, start: float) -> None:
    signer = pipeline_signer(trust())
    while time.time() < start:
        time.sleep(0.001)
    ledger = Ledger(open_for_writing(), BlobStore(home()), trust(), signer)
    for number in range(count):
        fact = facts.receipt(f"{name}-{number}", taken_at=utc_now())
        entry = ledger.append(sign(statement(fact, facts.subject()), signer))
        sys.stdout.write(f"{entry.sequence}\n")
        sys.stdout.flush()
    ledger.sign_head()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
