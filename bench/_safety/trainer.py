"""A rank that trains on what it is given and tells, for each micro-batch, what was promised and what happened."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench._safety.ground import Ground
from trainer_rank.errors import AdmissionRefused
from trainer_rank.microbatch import MicroBatch
from trainer_rank.outofmemory import FailureKind, failure_kind, forget_frames
from trainer_rank.policies import Policy
from trainer_rank.rank import TrainerRank
from trainer_rank.requests import Request


@dataclass(frozen=True)
class Step:
    """One micro-batch. Bytes; seconds. ``limit``: the most that PyTorch may hold by the decision's own budget.

    ``held``: allocated before it. The forecast's figures are None under a policy that makes none. ``retries`` are the
    allocator's own; what a release of ours provokes is not counted.
    """

    rung: str
    requests: int
    tokens: int
    packed: int
    planned_s: float
    seconds: float
    held: int
    limit: int | None
    forecast: int | None
    bound: int | None
    peak_reserved: int
    peak_allocated: int
    retries: int
    out_of_memory: int


class DidNotFitError(Exception):
    """The work did not fit; ``kind`` says who found no memory."""

    def __init__(self, kind: FailureKind) -> None:
        super().__init__(kind.value)


class Trainer:
    """``policy`` decides what runs together; failures leave no gradients and nothing on the device."""

    def __init__(self, ground: Ground, policy: Policy) -> None:
        self._ground = ground
        self._events: list[tuple[float, Mapping[str, Any]]] = []
        self.rank = TrainerRank(ground.model, policy, on_event=self._note)

    def _note(self, event: Mapping[str, Any]) -> None:
        self._events.append((time.perf_counter(), {**event, "reserved": self._ground.device.reserved()}))

    def run(self, requests: Sequence[Request], *, most: int | None = None, oversize: bool = False) -> list[Step]:
        """Run requests, or the first ``most`` micro-batches of them. Raises DidNotFitError or AdmissionRefused."""
        return list(self.steps(requests, most=most, oversize=oversize))

    def steps(self, requests: Sequence[Request], *, most: int | None = None, oversize: bool = False) -> Iterator[Step]:
        """Yield each micro-batch as soon as it ran."""
        iterator = self.rank.forward_micro_batches(requests, allow_oversize=oversize)
        device, count = self._ground.device, 0
        sightings = device.out_of_memory_count()
        try:
            while most is None or count < most:
                self._events.clear()
                before = self._counters()
                begun = time.perf_counter()
                micro_batch = next(iterator, None)
                if micro_batch is None:
                    return
                tokens, number = self._learn(micro_batch)
                micro_batch.release()
                count += 1
                yield self._step(begun, before, tokens, number)
        except AdmissionRefused:
            raise
        except Exception as error:
            kind = failure_kind(error, device.out_of_memory_count() - sightings)
            forget_frames(error)
            self.rank.discard_gradients()
            if kind is FailureKind.OTHER:
                raise
            raise DidNotFitError(kind) from None
        finally:
            iterator.close()  # type: ignore[attr-defined]

    def _learn(self, micro_batch: MicroBatch) -> tuple[int, int]:
        outputs = list(micro_batch.outputs.values())
        found = sum(each.log_probabilities.shape[0] for each in outputs), len(outputs)
        if micro_batch.training_slots:
            losses = [each.log_probabilities.mean() for each in outputs if each.log_probabilities.requires_grad]
            self.rank.backward(micro_batch, -torch.stack(losses).mean())
        return found

    def _counters(self) -> tuple[int, int, int]:
        device = self._ground.device
        return device.allocated(), device.allocator_retries(), device.out_of_memory_count()

    def _step(self, begun: float, before: tuple[int, int, int], tokens: int, number: int) -> Step:
        moment, forecast = next((at, each) for at, each in self._events if each["event"] == "forecast")
        device = self._ground.device
        held, retries, failures = before
        known = forecast["bound_reserved"] is not None
        return Step(
            rung=forecast["rung"],
            requests=number,
            tokens=tokens,
            packed=sum(forecast["packed_tokens"]),
            planned_s=moment - begun,
            seconds=time.perf_counter() - begun,
            held=held,
            limit=forecast["reserved"] + forecast["available"] if known else None,
            forecast=forecast["peak_reserved"],
            bound=forecast["bound_reserved"],
            peak_reserved=device.peak_reserved(),
            peak_allocated=device.peak_allocated(),
            retries=device.allocator_retries() - retries - self._provoked(),
            out_of_memory=device.out_of_memory_count() - failures,
        )

    def _provoked(self) -> int:
        """Count releases of one device's cache: each is a retry that was provoked."""
        return sum(each["event"] == "release" and bool(each["segments"]) for _, each in self._events)
