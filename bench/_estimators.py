"""What others would have forecast for a step of the reference model. Bytes of peak allocated memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer_rank.geometry import ModelGeometry
from trainer_rank.models.protocol import PackedBatch
from trainer_rank.models.reference import ReferenceModel, attention, build_reference
from trainer_rank.optimizer import OptimizerSettings, SlotOptimizer

RANK, ALPHA = 8, 16.0
"""The adapters of the recorded runs."""
SLOT = "policy"


class HostDevice:
    """The host in place of a device: under FakeTensorMode nothing is computed and nothing allocated."""

    torch_device = torch.device("cpu")

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Change nothing."""
        yield

    def mark(self, stage: str) -> None:
        """Note nothing."""


def built(geometry: ModelGeometry) -> ReferenceModel:
    """The recorded model, on whatever mode is active."""
    device: Any = HostDevice()
    return build_reference(geometry, device, slots=[SLOT], rank=RANK, alpha=ALPHA, dtype=torch.bfloat16)


def frozen(model: ReferenceModel) -> list[torch.Tensor]:
    """Every weight that is not trained."""
    layers = [weight for layer in model._layers for weight in layer.values()]
    return [*layers, model._embedding, model._norm, model._head]


def parameters(geometry: ModelGeometry) -> tuple[int, int]:
    """Frozen and trained parameters."""
    with FakeTensorMode():
        model = built(geometry)
        trained = sum(each.numel() for each in model.adapter_parameters(SLOT).values())
        return sum(each.numel() for each in frozen(model)), trained


def mem_tracker(geometry: ModelGeometry, lengths: Sequence[int]) -> int:
    """torch's MemTracker under FakeTensorMode over two whole steps, the second with optimizer states.

    Frozen weights are handed over as external tensors: a module with frozen parameters makes it fail. Attention gets
    the shapes of its outputs on the host, as the operator itself cannot run without data.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    _shapes_of_attention()
    with FakeTensorMode():
        model = built(geometry)
        adapters = model.adapter_parameters(SLOT)
        optimizer = SlotOptimizer(adapters, OptimizerSettings())
        optimizer.prepare_gradients()
        rows = sum(lengths)
        tokens, targets = (torch.zeros(rows, dtype=torch.int64) for _ in range(2))
        boundaries = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        tracker = MemTracker()
        tracker.track_external(*adapters.values(), *frozen(model))
        with tracker:
            for _ in range(2):
                outputs = model.forward(
                    PackedBatch(tokens, targets, tuple(lengths), boundaries), slot=SLOT, gradients=True
                )
                outputs.log_probabilities.mean().backward()
                del outputs
                optimizer.step()
        peak = tracker.get_tracker_snapshot("peak")[HostDevice.torch_device]
        return int(peak["Total"])


def accelerate(geometry: ModelGeometry) -> int | None:
    """accelerate's estimate of training with Adam: four times the model; None when it is not installed."""
    try:
        from accelerate.commands.estimate import estimate_training_usage
    except ImportError:
        return None
    size = 2 * sum(parameters(geometry))
    return max(int(each) for each in estimate_training_usage(size, "float32").values())


def deepspeed(geometry: ModelGeometry) -> int | None:
    """DeepSpeed's estimate of ZeRO-2 model states on one device, of all parameters; None when it is not installed."""
    try:
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
    except ImportError:
        return None
    return int(estimate_zero2_model_states_mem_needs(sum(parameters(geometry)), 1, 1, False)[1])


def hand_formula(geometry: ModelGeometry, rows: int) -> int:
    """The hand formula of Megatron's memory report, told of frozen weights and of recomputation.

    2 B a frozen and 18 B a trained parameter; 2 B a kept value for each layer's input; one layer's activations of
    18 + 4 x (expert width / hidden) B for each value of its input; the head's 4 x (1 + vocabulary / hidden).
    """
    kept, trained = parameters(geometry)
    width = geometry.experts_per_token * geometry.expert_hidden + geometry.shared_expert_hidden
    values = rows * geometry.hidden
    layer = values * 18 + 4 * rows * width
    head = 4 * values + 4 * rows * geometry.vocabulary
    return 2 * kept + 18 * trained + 2 * values * geometry.layers + max(layer, head)


def _shapes_of_attention() -> None:
    @attention._on_host.register_fake
    def _forward(query: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(query), query.new_empty(query.size(1), query.size(0), dtype=torch.float32)

    @attention._on_host_backward.register_fake
    def _backward(_: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty_like(each) for each in others[:3])  # query, key, value
