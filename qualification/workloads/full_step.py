"""Three complete updates over two slots on ragged lengths: 18 backwards, real losses and gradients.

Parameters: ``updates`` (3), ``batches`` per update (6), ``requests`` per batch (4), ``shortest`` (24) and ``longest``
(160) tokens of a request, ``seed`` (593015); ``capacity`` bytes of the virtual card (0: the card's own), ``rank`` of
the adapters (1), ``dropout`` on their inputs per million (0), ``frozen`` (0; 1: the second slot's requests ask for no
gradients).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from qualification.execution.worker import Context

SLOTS = ("policy", "adversary")


class Output(Protocol):
    """What a workload reads of a request's output."""

    log_probabilities: torch.Tensor


def run(context: Context) -> None:
    """Train and report; recordings of every step and the last checkpoint stay in the output directory."""
    contract = context.contract
    seed = context.parameter("seed")
    subject = contract.construct(
        ground=context.job.ground.value,
        policy=context.job.policy,
        seed=seed,
        slots=SLOTS,
        capacity=context.parameter("capacity") or None,
        adapter_rank=context.parameter("rank"),
        dropout=context.parameter("dropout") / 1_000_000,
        recordings=context.output,
        on_event=context.emit_event,
    )
    generator = torch.Generator().manual_seed(seed)
    for update in range(context.parameter("updates")):
        for batch in range(context.parameter("batches")):
            requests = ragged_requests(context, subject.vocabulary, generator, f"{update}/{batch}")
            train(context, subject, requests, update)
        report = contract.step(subject)
        slots = {name: _slot(each) for name, each in report.items()}
        context.emit("optimizer", update=update, slots=slots, random_sha256=_random_state())
        del report
    contract.save(subject, context.output / "checkpoint")
    context.close(subject)


def train(context: Context, subject: object, requests: list[object], update: int) -> None:
    """Run forward, loss and backward of every micro-batch; nothing on the device outlives the call."""
    for micro_batch in context.contract.forward(subject, requests):
        loss = policy_loss(micro_batch.outputs)
        context.contract.backward(subject, micro_batch, loss)
        context.emit("loss", step=micro_batch.step, update=update, value=_number(loss))


def ragged_requests(context: Context, vocabulary: int, generator: torch.Generator, group: str) -> list[object]:
    """Draw one batch: lengths uniform between the bounds, slots alternating, one group."""
    requests = []
    for index, tokens in enumerate(ragged_rows(context, vocabulary, generator)):
        slot = SLOTS[index % len(SLOTS)]
        trains = slot == SLOTS[0] or not context.parameter("frozen")
        requests.append(context.contract.request(tokens[:-1], tokens[1:], slot=slot, gradients=trains, group=group))
    return requests


def ragged_rows(context: Context, vocabulary: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Draw the tokens of one batch, each one more than its request's: lengths uniform between the bounds."""
    low, high = context.parameter("shortest"), context.parameter("longest")
    rows = []
    for _ in range(context.parameter("requests")):
        length = int(torch.randint(low, high + 1, (), generator=generator))
        rows.append(torch.randint(0, vocabulary, (length + 1,), generator=generator))
    return rows


def policy_loss(outputs: Mapping[int, Output]) -> torch.Tensor:
    """Return the mean over requests of a signed mean log-probability: in each slot one is rewarded, one punished."""
    signed = [
        (-1.0 if index % 4 < 2 else 1.0) * output.log_probabilities.mean() for index, output in sorted(outputs.items())
    ]
    return torch.stack(signed).mean()


def _slot(report: Mapping[str, Any]) -> dict[str, object]:
    return {"step": report["step"], "gradient_norm": _number(report["gradient_norm"])}


def _random_state() -> str:
    """Return the SHA-256 of the host generator's state: what a rung may not change."""
    return hashlib.sha256(bytes(torch.get_rng_state().tolist())).hexdigest()


def _number(value: torch.Tensor) -> float:
    return round(float(value.detach()), 9)
