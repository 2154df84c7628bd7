"""One batch in two matched arms: the rank decides on releases in both, and makes them in only one.

Each arm begins in the same state: one ordinary step, the backward's library memory given back, the cache filled as in
the workload pressure. Everything up to the first decision on a release must be equal. On a virtual card each arm has a
fresh one; on a real card, narrowed as in pressure, another arm goes first, so that every library is loaded in both.

Parameters: as for the workload pressure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from qualification.execution.worker import Context
from qualification.records import Ground
from qualification.workloads.full_step import SLOTS, policy_loss, ragged_requests
from qualification.workloads.library_demand import BACKWARD, Libraries, libraries
from qualification.workloads.pressure import fill

ARMS = ("observe", "release")


def run(context: Context) -> None:
    """Run both arms to their ends, whatever those are."""
    virtual = context.job.ground is Ground.REHEARSAL
    if not virtual:
        _load(context)
    for index, arm in enumerate(ARMS):
        _arm(context, arm, index if virtual else 0)


def _load(context: Context) -> None:
    """Run one ordinary step in a rank of its own, from the construction to the close."""
    subject = context.contract.construct(
        ground=context.job.ground.value, policy=context.job.policy, seed=context.parameter("seed"), slots=SLOTS
    )
    wanted = libraries(context, subject)
    _train(context, subject, _batch(context, subject), wanted)
    wanted.close()
    context.close(subject, arm="load")


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
    wanted = libraries(context, subject)
    contract.observe_releases(subject, True)
    batch = _batch(context, subject)
    _train(context, subject, batch, wanted)
    wanted.tear_down(BACKWARD)
    fill(context, subject, "matched")
    context.emit("matched", arm=arm, state=_state(subject))
    contract.observe_releases(subject, arm == "observe")
    outcome = _outcome(context, subject, batch, wanted)
    context.emit("outcome", arm=arm, **outcome)
    wanted.close()
    context.close(subject, arm=arm)


def _batch(context: Context, subject: Any) -> list[object]:  # noqa: ANN401 - its types are its own
    generator = torch.Generator().manual_seed(context.parameter("seed"))
    return ragged_requests(context, subject.vocabulary, generator, "batch")


def _train(context: Context, subject: Any, batch: list[object], wanted: Libraries) -> None:  # noqa: ANN401
    def begin(gradient: torch.Tensor) -> torch.Tensor:
        wanted.meet(BACKWARD)
        return gradient

    for micro_batch in context.contract.forward(subject, batch):
        loss = policy_loss(micro_batch.outputs)
        loss.register_hook(begin)  # type: ignore[no-untyped-call]
        context.contract.backward(subject, micro_batch, loss)


def _outcome(context: Context, subject: Any, batch: list[object], wanted: Libraries) -> dict[str, str]:  # noqa: ANN401
    try:
        _train(context, subject, batch, wanted)
    except Exception as error:
        return {"kind": "failed", "type": type(error).__name__, "text": str(error)[:300]}
    return {"kind": "finished"}


def _state(subject: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the device's figures and the SHA-256 of its segments and blocks, wherever the driver has put them."""
    device = subject.device
    segments = sorted(
        [each.pool, each.stream, each.total, [[block.size, block.requested, str(block.state)] for block in each.blocks]]
        for each in device.snapshot().segments
    )
    return {
        "free": device.memory_info().free,
        "allocated": device.allocated(),
        "reserved": device.reserved(),
        "blocks_sha256": hashlib.sha256(json.dumps(segments, separators=(",", ":")).encode()).hexdigest(),
    }
