"""The second incident: a tiny phase, then one of long histories, on two context-parallel ranks with the planner warm.

Every rank is given the whole of every batch and computes its share of the rows. Both phases begin with the same adapter
in both slots, no optimizer state, and the same random state; runtime, tapes and planner stay as the tiny phase left
them. What the tiny phase cost must not price the large one. Each phase: two groups forward and backward, one update.

Parameters: ``scale`` that the reported lengths are divided by (64; 1 is the incident's own), ``capacity`` of each
virtual card (2,200,000,000 B), ``seed`` (593015), ``rank`` of the adapters (1); ``layers``: 0 for the reference model,
else so many of the Megatron model, on real cards. Tokens come from ``seed`` + 1.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from qualification.errors import ConfigurationError
from qualification.execution.worker import Context
from qualification.records import Ground
from qualification.workloads.full_step import SLOTS, Output
from qualification.workloads.histories import LENGTHS, scaled

RANKS = 2
TINY = ((64, 56, 72, 64), (64, 56, 72, 64))
FIRST = 10
"""Histories of the large phase's first group; the other nine are the second."""
_FIRST_TOKEN = 16
_MASK_EVERY, _MASK_FROM = 7, 2
_OLD_LOG_PROBABILITY = -10.0


def run(context: Context) -> None:
    """Run both phases; every rank keeps its recordings and its checkpoints in a folder of its own."""
    rank = _rank(context)
    contract, output = context.contract, context.output / f"rank-{rank}"
    subject = contract.construct(
        ground=context.job.ground.value,
        policy=context.job.policy,
        seed=context.parameter("seed"),
        slots=SLOTS,
        index=int(os.environ["LOCAL_RANK"]),
        capacity=context.parameter("capacity"),
        adapter_rank=context.parameter("rank"),
        layers=context.parameter("layers"),
        context=RANKS,
        recordings=output,
        on_event=context.emit_event,
    )
    contract.equal_slots(subject, context.parameter("seed"))
    contract.save(subject, output / "start")
    generator = torch.Generator().manual_seed(context.parameter("seed") + 1)
    lengths = scaled(LENGTHS, context.parameter("scale"))
    for name, groups in (("tiny", TINY), ("large", (lengths[:FIRST], lengths[FIRST:]))):
        contract.load(subject, output / "start")
        context.emit("phase", name=name, lengths=[list(group) for group in groups])
        _train(context, subject, groups, generator)
        _step(context, subject, name, output)
    context.close(subject)


def _rank(context: Context) -> int:
    if context.parameter("layers") and context.job.ground is not Ground.NATIVE:
        raise ConfigurationError("workload context_parallel runs the Megatron model on ground native alone; layers=0")
    if context.job.ground is Ground.NATIVE and (seen := torch.cuda.device_count()) < RANKS:
        raise ConfigurationError(f"workload context_parallel needs {RANKS} GPUs on ground native; {seen} seen here")
    if os.environ.get("WORLD_SIZE") != str(RANKS):
        raise ConfigurationError(f"workload context_parallel needs {RANKS} ranks; start its worker with torchrun")
    return int(os.environ["RANK"])


def _train(context: Context, subject: object, groups: Sequence[Sequence[int]], generator: torch.Generator) -> None:
    """Run every group forward and backward, whole histories together."""
    contract, vocabulary, history = context.contract, subject.vocabulary, 0  # type: ignore[attr-defined]
    for number, lengths in enumerate(groups):
        requests = []
        for length in lengths:
            tokens = torch.randint(_FIRST_TOKEN, vocabulary, (length + 1,), generator=generator)
            slot = SLOTS[history % len(SLOTS)]
            requests.append(contract.request(tokens[:-1], tokens[1:], slot=slot, group=str(number)))
            history += 1
        for micro_batch in contract.forward(subject, requests):
            loss = _loss(micro_batch.outputs)
            contract.backward(subject, micro_batch, loss)
            context.emit("loss", step=micro_batch.step, value=round(float(loss.detach()), 9))


def _loss(outputs: Mapping[int, Output]) -> torch.Tensor:
    """Return the mean of reward times importance ratio over the sampled positions; within a slot rewards alternate."""
    terms = []
    for index, output in sorted(outputs.items()):
        sampled = output.log_probabilities[_MASK_FROM::_MASK_EVERY]
        reward = 1.0 if index % 4 < 2 else -1.0
        terms.append(-reward * (sampled - _OLD_LOG_PROBABILITY).exp().mean())
    return torch.stack(terms).mean()


def _step(context: Context, subject: object, name: str, output: Path) -> None:
    """Make the phase's update, then tell and keep what every rank holds."""
    contract = context.contract
    slots = {
        slot: {"step": each["step"], "gradient_norm": round(float(each["gradient_norm"]), 9)}
        for slot, each in contract.step(subject).items()
    }
    context.emit("optimizer", phase=name, slots=slots)
    context.emit("replicas", phase=name, digests=contract.replicas(subject))
    contract.save(subject, output / name)
