"""The versioned contract between a subject's trainer_rank and the workloads that qualify it.

A workload calls these functions and nothing else of the package. A change that breaks one of them raises the version,
and a pipeline that speaks another version refuses the head by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer_rank.admission.agree import Agreement
from trainer_rank.devices.cards import load_card
from trainer_rank.devices.protocol import Device
from trainer_rank.devices.virtual import VirtualDevice
from trainer_rank.devices.virtual_memory import LibraryDemand
from trainer_rank.errors import UnsupportedError
from trainer_rank.geometry import Topology
from trainer_rank.microbatch import MicroBatch
from trainer_rank.models.megatron import QWEN_36_35B_A3B
from trainer_rank.models.protocol import ModelRuntime
from trainer_rank.models.reference import SMALL, build_reference
from trainer_rank.policies import Scope, load_policy
from trainer_rank.rank import TrainerRank
from trainer_rank.ranks import Ranks, join
from trainer_rank.release import caches
from trainer_rank.reports.recordings import StepRecorder
from trainer_rank.reports.spool import Spool
from trainer_rank.requests import Request

CONTRACT_VERSION = 1


@dataclass(frozen=True, eq=False)
class Subject:
    """A constructed TrainerRank with the device it runs on. Tokens lie in [0, ``vocabulary``).

    ``ranks``: this process among the context-parallel ranks; None for one alone.
    """

    rank: TrainerRank
    model: ModelRuntime
    device: Device
    vocabulary: int
    recorder: StepRecorder | None
    ranks: Ranks | None = None


def construct(
    *,
    ground: str,
    policy: str,
    seed: int,
    slots: Sequence[str],
    index: int = 0,
    capacity: int | None = None,
    adapter_rank: int = 1,
    dropout: float = 0.0,
    layers: int = 0,
    context: int = 1,
    demands: Sequence[tuple[str, str, int, str]] = (),
    recordings: Path | None = None,
    on_event: Callable[[Mapping[str, Any]], None] = lambda _: None,
) -> Subject:
    """Build a model on the ground's device (in BF16 on real cards), with a TrainerRank over it.

    ``ground``: ``native`` (the visible CUDA device ``index``) or ``rehearsal`` (a virtual H200 of ``capacity`` bytes on
    which libraries make ``demands`` beside the card's own: name, phase, bytes, ``cublas`` or ``nccl``).
    ``adapter_rank`` and ``dropout`` (a rate on the adapters' inputs) are every slot's. ``layers``: 0 for the small
    reference model, else so many of the Megatron model, which needs a real card and has no dropout. ``context``: how
    many ranks divide each batch's rows among them; this process is one of them, as its launcher's environment says.
    ``recordings``: the folder that gets the allocator recording of every step, and planner reports in ``reports``.
    """
    device = _device(ground, index, capacity, [LibraryDemand(*each) for each in demands], peers=context > 1)
    with device.activate():
        ranks = join(context, "nccl" if ground == "native" else "gloo") if context > 1 else None
    model: ModelRuntime
    if layers:
        model = _megatron(layers, device, slots, adapter_rank, seed, context)
    else:
        dtype, group = torch.bfloat16 if ground == "native" else torch.float32, ranks.group if ranks else None
        model = build_reference(
            SMALL, device, slots=slots, rank=adapter_rank, dropout=dropout, seed=seed, dtype=dtype, group=group
        )
    recorder = None if recordings is None else StepRecorder(device, recordings)

    def tell(event: Mapping[str, Any]) -> None:
        if recorder is not None:
            recorder.event(event)
        on_event(event)

    spool = None if recordings is None else Spool(recordings / "reports")
    rank = TrainerRank(
        model,
        load_policy(policy),
        on_event=tell,
        spool=spool,
        agreement=Agreement(ranks.store, ranks.votes) if ranks else None,
    )
    return Subject(rank, model, device, model.geometry.vocabulary, recorder, ranks)


def _device(ground: str, index: int, capacity: int | None, demands: Sequence[LibraryDemand], peers: bool) -> Device:
    if ground == "rehearsal":
        card = load_card("h200")
        return VirtualDevice(card.among_peers() if peers else card, index, capacity=capacity, demands=demands)
    if ground == "native":
        from trainer_rank.devices.cuda import CudaDevice

        return CudaDevice(index)
    raise UnsupportedError(f"ground {ground!r} does not exist; choose of native, rehearsal")


def _megatron(layers: int, device: Device, slots: Sequence[str], rank: int, seed: int, context: int) -> ModelRuntime:
    if isinstance(device, VirtualDevice):
        raise UnsupportedError("the Megatron model needs a real card; ask for 0 layers on ground rehearsal")
    from trainer_rank.models.megatron.runtime import MegatronRuntime

    geometry, topology = QWEN_36_35B_A3B.with_layers(layers), Topology(context=context)
    return MegatronRuntime(geometry, device, slots, topology=topology, rank=rank, seed=seed)


def request(
    tokens: torch.Tensor,
    targets: torch.Tensor,
    *,
    slot: str,
    gradients: bool = True,
    group: str | None = None,
    hidden: bool = False,
) -> Request:
    """Make a request of host int64 tensors (n,); ``hidden`` asks for the last hidden states too."""
    return Request(tokens, targets, slot, gradients, group, hidden)


def forward(
    subject: Subject, requests: Sequence[Request], *, allow_oversize: bool = False, caller_step: str | None = None
) -> Iterator[MicroBatch]:
    """Yield micro-batches with ``step`` and ``outputs`` (by request index, each with ``log_probabilities`` (n,)).

    ``caller_step``: what the caller calls its present step; reports name it.
    """
    subject.rank.caller_step = caller_step
    return subject.rank.forward_micro_batches(requests, allow_oversize=allow_oversize)


def backward(subject: Subject, micro_batch: MicroBatch, loss: torch.Tensor) -> None:
    """Propagate a scalar loss made from the outputs."""
    subject.rank.backward(micro_batch, loss)


def collective(subject: Subject, name: str) -> AbstractContextManager[None]:
    """Protect a collective that runs inside, outside any hand-off."""
    return subject.rank.collective(name)


def meet(subject: Subject, phase: str) -> None:
    """Reach a phase in which libraries of a virtual device take memory; raises what the library would."""
    if isinstance(subject.device, VirtualDevice):
        subject.device.require(phase)


def observe_releases(subject: Subject, only: bool) -> None:
    """Let the rank decide on releases and report them, but make none, as long as ``only``."""
    subject.rank.observe_releases(only)


def tear_down(subject: Subject, phase: str) -> int:
    """Destroy what libraries of a virtual device built in a phase; the bytes that they gave back."""
    return subject.device.give_up(phase) if isinstance(subject.device, VirtualDevice) else 0


def release(subject: Subject, scope: str) -> dict[str, Any]:
    """Release caches for the subject's device: of the ``process`` or of the ``device`` alone; bytes by device name."""
    done = caches.release(subject.device, Scope(scope))
    return {"shrunk": dict(done.shrunk), "segments": done.segments, "nanoseconds": done.nanoseconds}


def equal_slots(subject: Subject, seed: int) -> None:
    """Give every slot the same synthetic adapter, normal with standard deviation 0.02, drawn from ``seed``."""
    with torch.no_grad():
        for slot in subject.model.slots:
            generator = torch.Generator().manual_seed(seed)
            for _, parameter in sorted(subject.model.adapter_parameters(slot).items()):
                parameter.copy_(torch.empty(parameter.shape).normal_(std=0.02, generator=generator))


def replicas(subject: Subject) -> dict[str, list[str]]:
    """Return for each slot the SHA-256 of its adapter and optimizer state on every rank, in rank order."""
    return {slot: list(digests) for slot, digests in subject.rank.replica_digests().items()}


def step(subject: Subject) -> dict[str, dict[str, Any]]:
    """Step the optimizer; per slot that stepped its count ``step`` and ``gradient_norm`` (a scalar tensor)."""
    return {slot: vars(report) for slot, report in subject.rank.optim_step().items()}


def save(subject: Subject, path: Path, custom: Mapping[str, torch.Tensor] | None = None) -> str:
    """Publish a checkpoint with host tensors of the caller's own; returns the SHA-256 of its manifest."""
    return subject.rank.save_checkpoint(path, custom)


def load(subject: Subject, path: Path) -> Mapping[str, torch.Tensor]:
    """Take over a checkpoint whole and return the caller's own tensors."""
    return subject.rank.load_checkpoint(path)


def close(subject: Subject) -> dict[str, int]:
    """Drop everything, recorded as ``close`` when steps are recorded; what is left on the device, in bytes."""
    if subject.recorder is not None:
        subject.recorder.record("close")
    try:
        return subject.rank.close()
    finally:
        if subject.recorder is not None:
            subject.recorder.finish()
        if subject.ranks is not None:
            subject.ranks.leave()
