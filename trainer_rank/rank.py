"""The training layer of one process: admits plans by forecast, runs them, steps the adapters, keeps checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer_rank import checkpoint
from trainer_rank.admission.agree import Agreement
from trainer_rank.admission.decide import Outcome
from trainer_rank.admission.planner import Choice, Unit
from trainer_rank.admission.refusal import explain_refusal
from trainer_rank.errors import AdmissionRefused, AdmissionUnknown, CheckpointError, InvalidInputError
from trainer_rank.events import Announcer, announce_forecast, announce_observation
from trainer_rank.execution import KEY_BYTES, PlanRun, prefix_keys
from trainer_rank.microbatch import Admitted, MicroBatch
from trainer_rank.models.context import watch
from trainer_rank.models.protocol import ModelRuntime
from trainer_rank.optimizer import OptimizerSettings, SlotOptimizer
from trainer_rank.packing import units
from trainer_rank.policies import Policy
from trainer_rank.prefixes import Prefixes, find_prefixes
from trainer_rank.probing import Probes
from trainer_rank.randomness import RandomState, capture, restore
from trainer_rank.rank_tapes import RankTapes, load_rank_tapes, save_rank_tapes
from trainer_rank.release.distributed import exchange
from trainer_rank.release.headroom import Headroom
from trainer_rank.release.libraries import BACKWARD, COLLECTIVE, FORWARD
from trainer_rank.replicas import Replicas
from trainer_rank.reports.failure import Revision
from trainer_rank.reports.report import Origin
from trainer_rank.reports.spool import Spool
from trainer_rank.reports.witness import Witness
from trainer_rank.requests import Request, RequestShape, shapes_of
from trainer_rank.sampling import Sampler


@dataclass(frozen=True)
class SlotReport:
    """One slot's optimizer step. ``gradient_norm``: float32 scalar on the device, before clipping."""

    step: int
    gradient_norm: torch.Tensor


class TrainerRank:
    """Runs requests of several adapter slots on one device within what the device can hold.

    ``on_event`` is told, as a plain mapping, of probes, of every forecast before its forward begins, and of what was
    observed; ``on_stage`` of every stage as it begins; ``spool`` keeps planner reports. None of them changes training.
    With an ``agreement`` every rank of its group must be given the same requests, and runs the same plan. Those of a
    context-parallel model start from the first one's adapters and sum their gradients before they step. ``tapes``: a
    file or a folder that :meth:`save_tapes` wrote; what it holds is not probed again. Raises TapeError when it was
    recorded on anything else. ``exact_figures``: announce every micro-batch's exact peaks; without, a plan that clearly
    fits is admitted by its limits in under a millisecond, and the peak of reserved memory is announced as None.
    """

    def __init__(
        self,
        model: ModelRuntime,
        policy: Policy,
        *,
        optimizer: OptimizerSettings | None = None,
        on_event: Callable[[Mapping[str, Any]], None] = lambda _: None,
        on_stage: Callable[[str], None] = lambda _: None,
        spool: Spool | None = None,
        agreement: Agreement | None = None,
        tapes: str | Path | None = None,
        exact_figures: bool = True,
    ) -> None:
        self._model = model
        self._device = model.device
        self._policy = policy
        self._announcer = Announcer(on_event, on_stage)
        self._replicas = Replicas(model)
        settings = optimizer or OptimizerSettings()
        self._optimizers = {slot: SlotOptimizer(model.adapter_parameters(slot), settings) for slot in model.slots}
        vote = None if agreement is None else partial(exchange, gather=agreement.gather)
        known = RankTapes({}) if tapes is None else load_rank_tapes(tapes, model)
        self._headroom = Headroom(self._device, policy, self._announcer, exchange=vote, recorded=known.claims)
        everyone: Callable[[bool], bool] = bool
        if agreement is not None and model.context_group is not None:
            everyone = agreement.everyone
            watch(model.context_group, agreement)
        self._probes = Probes(model, policy, self._announcer, self._headroom.learning, known.recorded, everyone)
        self._sampler = Sampler(
            self._device, policy, self._probes, self._headroom, agreement, exact_figures=exact_figures
        )
        origin = _origin(model, 0 if agreement is None else agreement.rank)
        self._witness = Witness(self._device, policy, self._announcer, spool, origin, self._revision)
        self._trained: set[str] = set()
        self._checkpoint: str | None = None
        self._broken: str | None = None
        self._current: MicroBatch | None = None
        self._steps = self._backwards = 0
        self._closed = False

    @property
    def caller_step(self) -> str | None:
        """What the caller calls its present step."""
        return self._witness.caller_step

    @caller_step.setter
    def caller_step(self, name: str | None) -> None:
        self._witness.caller_step = name

    def observe_releases(self, only: bool) -> None:
        """Decide on releases and report them, but release nothing, as long as ``only``."""
        self._headroom.observe = only

    def forward_micro_batches(
        self, requests: Sequence[Request], *, allow_oversize: bool = False
    ) -> Iterator[MicroBatch]:
        """Yield micro-batches until every request has run; the widest that fit, groups never divided.

        Outputs of a micro-batch are released when the next one is asked for, unless it is held. Raises
        InvalidInputError for unusable requests before anything runs, AdmissionRefused when nothing fits.
        """
        self._require_open()
        shapes = self._shapes(requests)
        given = dict(enumerate(requests))
        prefixes = find_prefixes(prefix_keys(given), KEY_BYTES) if self._model.shares_prefixes else None
        return self._micro_batches(given, list(units(shapes)), prefixes, allow_oversize)

    def _micro_batches(
        self, requests: Mapping[int, Request], pending: list[Unit], prefixes: Prefixes | None, allow_oversize: bool
    ) -> Iterator[MicroBatch]:
        current: MicroBatch | None = None
        try:
            while pending:
                self._expire()
                choice = self._admit(pending, prefixes, allow_oversize)
                del pending[: choice.units]
                current = self._forward(choice, requests)
                yield current
        except GeneratorExit as error:
            if self._current is current:
                self._witness.take_back(error)
            raise
        finally:
            if self._current is current:
                self._expire()

    def _shapes(self, requests: Sequence[Request]) -> tuple[RequestShape, ...]:
        try:
            return shapes_of(requests, self._model.slots)
        except InvalidInputError as error:
            self._sampler.tell(error)
            raise

    def _admit(self, pending: list[Unit], prefixes: Prefixes | None, oversize: bool) -> Choice:
        try:
            choice = self._choose(pending, prefixes, oversize)
        except Exception as error:
            self._witness.planning_failed(self._steps, pending[0], oversize, error)
            raise
        if choice.plan is None:
            self._witness.refused(self._steps, choice, pending[0], prefixes, oversize)
            unknown = choice.decision.outcome is Outcome.UNKNOWN
            raise (AdmissionUnknown if unknown else AdmissionRefused)(explain_refusal(choice, pending[0]))
        return choice

    def _choose(self, pending: list[Unit], prefixes: Prefixes | None, oversize: bool) -> Choice:
        training = {shape.slot for unit in pending for shape in unit if shape.gradients}

        def prepare() -> int:
            for slot in training:
                self._optimizers[slot].prepare_gradients()
            return sum(each.state_bytes for slot in training if not (each := self._optimizers[slot]).exists)

        return self._sampler.choose(pending, prefixes, prepare, oversize)

    def _forward(self, choice: Choice, requests: Mapping[int, Request]) -> MicroBatch:
        assert choice.plan is not None
        step, self._steps = self._steps, self._steps + 1
        announce_forecast(self._announcer, step, choice)
        self._device.reset_peaks()  # after an observer has ended what it was recording until now
        if choice.decision.outcome is not Outcome.ADMITTED_OVERSIZED:
            self._headroom.cap(self._policy.reserve_bytes)
        run = PlanRun(self._model, choice.plan, requests, self._witness.begin)
        micro_batch = MicroBatch(Admitted(step, choice, self._sampler.forecaster), run)
        self._current = micro_batch
        with self._executing(micro_batch):
            with self._headroom.protected(FORWARD), self._headroom.working():
                run.forward()
            self._hand_off(choice)
        self._witness.hand_over(micro_batch.admitted)
        return micro_batch

    def _hand_off(self, choice: Choice) -> None:
        demand = choice.demand
        bound = None if demand is None else demand.bound_reserved
        growth = None if bound is None else max(0, bound - self._device.reserved())
        trains = any(shape.key.gradients for shape in choice.plan.subforwards) if choice.plan else False
        self._headroom.hand_off(growth, trains)

    def collective(self, name: str) -> AbstractContextManager[None]:
        """Protect a collective that runs outside any hand-off, such as a reduction of gradient norms or a barrier."""
        self._require_open()
        return self._headroom.protected(COLLECTIVE, name)

    def direct_forward(self) -> AbstractContextManager[None]:
        """Protect a forward of the caller's own, without micro-batches, as those of this rank are."""
        self._require_open()
        return self._headroom.protected(FORWARD, "direct forward")

    def libraries_torn_down(self) -> None:
        """Keep free again what libraries took: their handles or communicators were destroyed and will be rebuilt."""
        self._headroom.torn_down()

    @contextmanager
    def _executing(self, micro_batch: MicroBatch) -> Iterator[None]:
        with self._device.activate(), self._witness.during(micro_batch.admitted):
            try:
                yield
            except BaseException:
                micro_batch.release()
                raise

    def backward(self, micro_batch: MicroBatch, loss: torch.Tensor) -> None:
        """Propagate ``loss``, a scalar made from the micro-batch's outputs, into the adapters' gradients.

        When it fails the gradients are incomplete: nothing can be stepped or saved until ``discard_gradients()``.
        """
        self._require_open()
        micro_batch.check(loss)
        slots = micro_batch.training_slots
        try:
            with self._executing(micro_batch), self._headroom.protected(BACKWARD):
                micro_batch.consume(loss)
        except BaseException:
            self._broken = f"the backward of micro-batch {micro_batch.step} failed"
            raise
        finally:
            self._headroom.uncap()
        self._trained |= slots
        self._backwards += 1
        announce_observation(self._announcer, micro_batch.step, self._device)
        self._witness.observed(micro_batch.admitted)

    def discard_gradients(self) -> None:
        """Zero every gradient since the last step, and with them what a failed backward left."""
        for optimizer in self._optimizers.values():
            optimizer.clear_gradients()
        self._trained.clear()
        self._broken = None

    def optim_step(self) -> dict[str, SlotReport]:
        """Step the optimizer of every slot that had a backward since its last step, and zero its gradients."""
        self._require_open()
        self._require_whole()
        with self._device.activate():
            self._sum_gradients()
            reports = {slot: SlotReport(0, self._optimizers[slot].step()) for slot in sorted(self._trained)}
        self._trained.clear()
        return {
            slot: SlotReport(self._optimizers[slot].steps, report.gradient_norm) for slot, report in reports.items()
        }

    def _sum_gradients(self) -> None:
        if self._replicas.several:
            with self._headroom.protected(COLLECTIVE, "gradient sum"):
                self._replicas.sum_gradients(sorted(self._trained))

    def replica_digests(self) -> dict[str, tuple[str, ...]]:
        """Return for each slot the SHA-256 of its adapter and optimizer state on every rank, in rank order.

        They are equal as long as the ranks are replicas. Every rank must call this; copies the states to the host.
        """
        self._require_open()
        return self._replicas.digests({slot: each.state() for slot, each in self._optimizers.items()})

    def save_checkpoint(self, path: Path, custom: Mapping[str, torch.Tensor] | None = None) -> str:
        """Publish all slots, optimizer states and generators at ``path`` as one group; returns the manifest's SHA-256.

        ``custom``: host tensors of the caller's own that belong to this state, such as its place in the data. Raises
        CheckpointError when gradients wait for their step, or the group cannot be written.
        """
        self._require_open()
        self._require_whole()
        if self._trained:
            raise CheckpointError(
                f"slot {min(self._trained)} has gradients that were not stepped; call optim_step first"
            )
        random = capture(self._device.torch_device)
        tensors = {f"slot-{slot}": each.state() for slot, each in self._optimizers.items()}
        tensors["random"] = {"host": random.host} | ({} if random.device is None else {"device": random.device})
        if custom:
            tensors["custom"] = dict(custom)
        metadata = {
            "slots": {slot: each.steps for slot, each in self._optimizers.items()},
            "model": asdict(self._model.geometry),
            "policy": {"name": self._policy.name, "sha256": self._policy.sha256},
        }
        self._checkpoint = checkpoint.save(path, checkpoint.Group(tensors, metadata))
        return self._checkpoint

    def load_checkpoint(self, path: Path) -> Mapping[str, torch.Tensor]:
        """Take over a published group whole and return the caller's own state; or raise CheckpointError, unchanged."""
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
        self._broken = None
        self._checkpoint = group.manifest
        random = group.tensors.get("random", {})
        if "host" in random:
            restore(RandomState(random["host"], random.get("device")), self._device.torch_device)
        return group.tensors.get("custom", {})

    def save_tapes(self, path: str | Path) -> tuple[Path, ...]:
        """Write what was recorded here, and what libraries took by phase, into the folder ``path``; returns the files.

        Raises TapeError when nothing was recorded yet, or the folder cannot be written.
        """
        self._require_open()
        return save_rank_tapes(path, self._model, RankTapes(self._probes.recorded, self._headroom.learned()))

    def close(self) -> dict[str, int]:
        """Drop everything this rank holds and report what is left on the device, in bytes, and the work done."""
        if not self._closed:
            self._closed = True
            self._witness.take_back()
            if self._current is not None:
                self._current.release()
            self._current = None
            self._optimizers.clear()
            self._model.close()
            self._device.drop_workspaces()
            self._device.empty_cache()
        return {
            "allocated": self._device.allocated(),
            "reserved": self._device.reserved(),
            "micro_batches": self._steps,
            "backwards": self._backwards,
            "observer_failures": self._announcer.failures,
        }

    def _revision(self, slot: str) -> Revision:
        return Revision(self._optimizers[slot].steps, self._checkpoint)

    def _expire(self) -> None:
        self._witness.take_back()
        self._headroom.uncap()
        if self._current is not None:
            self._current.expire()
            self._current = None

    def _require_whole(self) -> None:
        if self._broken is not None:
            raise InvalidInputError(f"{self._broken}, so the gradients are incomplete; call discard_gradients first")

    def _require_open(self) -> None:
        if self._closed:
            raise InvalidInputError("this TrainerRank is closed; construct a new one")


def _origin(model: ModelRuntime, rank: int) -> Origin:
    device = model.device
    return Origin(device.name, device.card.name, model.geometry.name, model.topology.label, rank)
