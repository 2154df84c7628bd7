"""A process of another host, as leases know hosts: by a name and a boot of its own. Asks for one device, and obeys.

``another_host HOST BOOT FOLDER DEVICE``: prints ``granted TOKEN`` once it has the device; then ``sweep`` on its input
makes it recover what is in FOLDER, and ``release`` gives the device back CLEAN; the end of its input just ends it.
"""

import sys
from pathlib import Path

from db.engine import open_for_writing
from db.leases import DatabaseLeaseStore
from qualification.execution import attempt, identity, recovery
from qualification.execution.attempt import Attempt
from qualification.execution.holding import acquire
from qualification.execution.leases import LeaseRequest
from qualification.execution.probes.gpus import GpuReader
from qualification.records import ReceiptStatus

host, boot, folder, device = sys.argv[1:]
attempt.host = recovery.host = lambda: host
identity.boot_id = recovery.boot_id = lambda: boot
store = DatabaseLeaseStore(open_for_writing())
reader = GpuReader()


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def sweep() -> None:
    for done in recovery.Recovery(store, reader, lambda *_: None).sweep(Path(folder)):
        say("swept", done.receipt.status if done.receipt else done.reason)
    say("swept all")


request = LeaseRequest(
    run=f"on-{host}", attempt=1, candidates=(device,), count=1, folder=f"{folder}/on-{host}/1", host=host,
    holder=identity.myself(),
)  # fmt: skip
for line in sys.stdin:
    if line == "sweep\n":
        sweep()
    elif line == "acquire\n":
        Attempt(run=request.run, attempt=1, folder=Path(request.folder), recorded=False).announce()
        held = acquire(
            store,
            request,
            reader=reader,
            recover=recovery.Recovery(store, reader, lambda *_: None).holding,
            waiting=lambda reason: say("waiting", reason),
        )
        say("granted", held.leases[0].token)
    elif line == "release\n":
        store.release(held.leases[0], ReceiptStatus.CLEAN)
        say("released")
reader.close()
