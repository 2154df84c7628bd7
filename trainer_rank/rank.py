"""The training layer of one process: admits plans by forecast, runs them, steps the adapters, keeps checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from trainer_rank import checkpoint
from trainer_rank.admission.budget import Budget
from trainer_rank.admission.ladder import ladder
from trainer_rank.admission.planner import Choice, choose
from trainer_rank.admission.refusal import explain_refusal
from trainer_rank.claims import Claims
from trainer_rank.errors import AdmissionRefused, CheckpointError, InvalidInputError
from trainer_rank.events import Announcer, announce_forecast, announce_observation
from trainer_rank.execution import PlanRun
from trainer_rank.forecasting import Sample
from trainer_rank.microbatch import MicroBatch
from trainer_rank.models.protocol import ModelRuntime
from trainer_rank.optimizer import OptimizerSettings, SlotOptimizer
from trainer_rank.packing import GroupKey, units
from trainer_rank.policies import Policy
from trainer_rank.probing import Probes
from trainer_rank.randomness import RandomState, capture, restore
from trainer_rank.requests import Request, shapes_of


@dataclass(frozen=True)
class SlotReport:
    """One slot's optimizer step. ``gradient_norm``: float32 scalar on the device, before clipping."""

    step: int
    gradient_norm: torch.Tensor


class TrainerRank:
    """Runs requests of several adapter slots on one device within what the device can hold.

    ``on_event`` is told, as a plain mapping, of probes, of every forecast before its forward begins, and of what was
    observed; ``on_stage`` of every stage as it begins. A failing observer never changes training.
    """

    def __init__(
        self,
        model: ModelRuntime,
        policy: Policy,
        *,
        optimizer: OptimizerSettings | None = None,
        on_event: Callable[[Mapping[str, Any]], None] = lambda _: None,
        on_stage: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._model = model
        self._device = model.device
        self._policy = policy
        self._rungs = ladder(policy.ladder)
        self._announcer = Announcer(on_event, on_stage)
        settings = optimizer or OptimizerSettings()
        self._optimizers = {slot: SlotOptimizer(model.adapter_parameters(slot), settings) for slot in model.slots}
        self._probes = Probes(model, policy, self._announcer)
        self._claims = Claims(self._device, policy)
        self._trained: set[str] = set()
        self._current: MicroBatch | None = None
        self._steps = self._samples = self._backwards = 0
        self._closed = False

    def forward_micro_batches(
        self, requests: Sequence[Request], *, allow_oversize: bool = False
    ) -> Iterator[MicroBatch]:
        """Yield micro-batches until every request has run; the widest that fit, groups never divided.

        Outputs of a micro-batch are released when the next one is asked for, unless it is held. Raises
        InvalidInputError for unusable requests before anything runs, AdmissionRefused when nothing fits.
        """
        self._require_open()
        shapes = shapes_of(requests, self._model.slots)
        return self._micro_batches(dict(enumerate(requests)), list(units(shapes)), allow_oversize)

    def _micro_batches(
        self, requests: Mapping[int, Request], pending: list[Any], allow_oversize: bool
    ) -> Iterator[MicroBatch]:
        try:
            while pending:
                self._expire()
                choice = self._admit(pending, allow_oversize)
                del pending[: choice.units]
                yield self._forward(choice, requests)
        finally:
            self._expire()

    def _admit(self, pending: list[Any], allow_oversize: bool) -> Choice:
        training = {shape.slot for unit in pending for shape in unit if shape.gradients}
        for slot in training:
            self._optimizers[slot].prepare_gradients()
        if self._probes.prepare(
            {GroupKey(each.slot, each.gradients, each.hidden) for unit in pending for each in unit}
        ):
            self._claims.libraries_met()
        budget, sample = self._sample(training)
        choice = choose(pending, self._rungs, self._probes.forecaster(sample), budget, oversize=allow_oversize)
        if choice.plan is None:
            raise AdmissionRefused(explain_refusal(choice, pending[0]))
        return choice

    def _sample(self, training: set[str]) -> tuple[Budget, Sample]:
        self._samples += 1
        memory = self._device.memory_info()
        new_states = [each for slot, each in self._optimizers.items() if slot in training and not each.exists]
        claims = self._claims.now(sum(each.state_bytes for each in new_states))
        sample = Sample(self._samples, memory, self._device.snapshot())
        return Budget(self._samples, memory.free, memory.total, claims), sample

    def _forward(self, choice: Choice, requests: Mapping[int, Request]) -> MicroBatch:
        assert choice.plan is not None
        step, self._steps = self._steps, self._steps + 1
        self._device.reset_peaks()
        announce_forecast(self._announcer, step, choice)
        run = PlanRun(self._model, choice.plan, requests, self._announcer.stage)
        micro_batch = MicroBatch(step, choice.decision, run)
        self._current = micro_batch
        with self._device.activate():
            run.forward()
        return micro_batch

    def backward(self, micro_batch: MicroBatch, loss: torch.Tensor) -> None:
        """Propagate ``loss``, a scalar made from the micro-batch's outputs, into the adapters' gradients."""
        self._require_open()
        slots = micro_batch.training_slots
        with self._device.activate():
            micro_batch.consume(loss)
        self._trained |= slots
        self._backwards += 1
        announce_observation(self._announcer, micro_batch.step, self._device)

    def optim_step(self) -> dict[str, SlotReport]:
        """Step the optimizer of every slot that had a backward since its last step, and zero its gradients."""
        self._require_open()
        with self._device.activate():
            reports = {slot: SlotReport(0, self._optimizers[slot].step()) for slot in sorted(self._trained)}
        self._trained.clear()
        return {
            slot: SlotReport(self._optimizers[slot].steps, report.gradient_norm) for slot, report in reports.items()
        }

    def save_checkpoint(self, path: Path) -> str:
        """Publish all slots, optimizer states and generators at ``path`` as one group; returns the manifest's SHA-256.

        Raises CheckpointError when gradients wait for their step, or the group cannot be written.
        """
        self._require_open()
        if self._trained:
            raise CheckpointError(
                f"slot {min(self._trained)} has gradients that were not stepped; call optim_step first"
            )
        random = capture(self._device.torch_device)
        tensors = {f"slot-{slot}": each.state() for slot, each in self._optimizers.items()}
        tensors["random"] = {"host": random.host} | ({} if random.device is None else {"device": random.device})
        metadata = {
            "slots": {slot: each.steps for slot, each in self._optimizers.items()},
            "model": asdict(self._model.geometry),
            "policy": {"name": self._policy.name, "sha256": self._policy.sha256},
        }
        return checkpoint.save(path, checkpoint.Group(tensors, metadata))

    def load_checkpoint(self, path: Path) -> None:
        """Take over a published group whole, or raise CheckpointError and change nothing."""
        self._require_open()
        group = checkpoint.load(path)
        steps = group.metadata.get("slots")
        if not isinstance(steps, dict) or steps.keys() != self._optimizers.keys():
            raise CheckpointError(f"checkpoint {path} holds other slots than {', '.join(self._optimizers)}")
        if group.metadata.get("model") != asdict(self._model.geometry):
            raise CheckpointError(f"checkpoint {path} is of another model; load it into the model it was saved from")
        states = {slot: group.tensors.get(f"slot-{slot}", {}) for slot in steps}
        for slot, optimizer in self._optimizers.items():
            optimizer.check(states[slot], steps[slot])
        for slot, optimizer in self._optimizers.items():
            optimizer.load(states[slot], steps[slot])
            optimizer.clear_gradients()
        self._trained.clear()
        random = group.tensors.get("random", {})
        if "host" in random:
            restore(RandomState(random["host"], random.get("device")), self._device.torch_device)

    def close(self) -> dict[str, int]:
        """Drop everything this rank holds and report what is left on the device, in bytes, and the work done."""
        if not self._closed:
            self._closed = True
            if self._current is not None:
                self._current.release()
            self._current = None
            self._optimizers.clear()
            self._model.close()
            self._device.empty_cache()
        return {
            "allocated": self._device.allocated(),
            "reserved": self._device.reserved(),
            "micro_batches": self._steps,
            "backwards": self._backwards,
            "observer_failures": self._announcer.failures,
        }

    def _expire(self) -> None:
        if self._current is not None:
            self._current.expire()
            self._current = None

    def _require_open(self) -> None:
        if self._closed:
            raise InvalidInputError("this TrainerRank is closed; construct a new one")
