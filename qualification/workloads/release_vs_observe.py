"""One batch in two matched arms: the rank decides on releases in both, and makes them in only one.

Each arm has a fresh virtual card in the same state: one ordinary step, the backward's library memory given back, the
cache filled as in the workload pressure. Everything up to the first decision on a release must be equal.

Parameters: as for the workload pressure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from qualification.errors import ConfigurationError
from qualification.execution.worker import Context
from qualification.records import Ground
from qualification.workloads.full_step import SLOTS, policy_loss, ragged_requests
from qualification.workloads.pressure import BACKWARD, fill

ARMS = ("observe", "release")


def run(context: Context) -> None:
    """Run both arms to their ends, whatever those are."""
    if context.job.ground is not Ground.REHEARSAL:
        raise ConfigurationError("workload release_vs_observe needs a virtual card; run it on ground rehearsal")
    for index, arm in enumerate(ARMS):
        _arm(context, arm, index)


def _arm(context: Context, arm: str, index: int) -> None:
    contract, seed = context.contract, context.parameter("seed")

    def tell(event: Mapping[str, object]) -> None:
        context.emit_event({**event, "arm": arm})

    subject = contract.construct(
        ground=context.job.ground.value,
        policy=context.job.policy,
        seed=seed,
        slots=SLOTS,
        index=index,
        capacity=context.parameter("capacity"),
        demands=[("backward", BACKWARD, context.parameter("demand"), "cublas")],
        recordings=context.output / arm,
        on_event=tell,
    )
    contract.observe_releases(subject, True)
    batch = ragged_requests(context, subject.vocabulary, torch.Generator().manual_seed(seed), "batch")
    _train(context, subject, batch)
    contract.tear_down(subject, BACKWARD)
    fill(context, subject, "matched")
    context.emit("matched", arm=arm, state=_state(subject))
    contract.observe_releases(subject, arm == "observe")
    outcome = _outcome(context, subject, batch)
    context.emit("outcome", arm=arm, **outcome)
    context.close(subject, arm=arm)


def _train(context: Context, subject: Any, batch: list[object]) -> None:  # noqa: ANN401 - its types are its own
    for micro_batch in context.contract.forward(subject, batch):
        context.contract.backward(subject, micro_batch, policy_loss(micro_batch.outputs))


def _outcome(context: Context, subject: Any, batch: list[object]) -> dict[str, str]:  # noqa: ANN401
    try:
        _train(context, subject, batch)
    except Exception as error:
        return {"kind": "failed", "type": type(error).__name__, "text": str(error)[:300]}
    return {"kind": "finished"}


def _state(subject: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the device's figures and the SHA-256 of its segments and blocks."""
    device = subject.device
    blocks = json.dumps(device.snapshot().to_trace(), separators=(",", ":")).encode()
    return {
        "free": device.memory_info().free,
        "allocated": device.allocated(),
        "reserved": device.reserved(),
        "allocator_retries": device.allocator_retries(),
        "snapshot_sha256": hashlib.sha256(blocks).hexdigest(),
    }
