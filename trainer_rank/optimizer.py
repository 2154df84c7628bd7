"""AdamW for one adapter slot: float32 masters, gradient clipping, and no state before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from trainer_rank.errors import CheckpointError


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW's settings, and the largest global gradient norm of a slot."""

    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    largest_norm: float = 1.0


class SlotOptimizer:
    """Steps the adapter of one slot. Gradients accumulate in buffers that the slot keeps once it has trained."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], settings: OptimizerSettings) -> None:
        self._parameters = dict(parameters)
        self._settings = settings
        self._masters: dict[str, torch.Tensor] = {}
        self._adamw: torch.optim.AdamW | None = None
        self.steps = 0

    @property
    def exists(self) -> bool:
        """Whether masters and moments exist."""
        return self._adamw is not None

    @property
    def accumulating(self) -> bool:
        """Whether the slot has gradient buffers."""
        return any(parameter.grad is not None for parameter in self._parameters.values())

    @property
    def state_bytes(self) -> int:
        """Bytes of masters and both moments, each tensor rounded up to the allocator's 512 bytes."""
        return sum(3 * (-(-4 * parameter.numel() // 512) * 512) for parameter in self._parameters.values())

    def prepare_gradients(self) -> None:
        """Create zeroed gradient buffers, so that every backward accumulates and none is a first one."""
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def clear_gradients(self) -> None:
        """Zero the gradient buffers in place."""
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                parameter.grad.zero_()

    @torch.no_grad()
    def step(self) -> torch.Tensor:
        """Clip, update the masters, copy them to the parameters, zero the gradients.

        Returns the global gradient norm before clipping, a float32 scalar on the device, which is not waited for.
        """
        if not self._parameters:
            self.steps += 1
            return torch.zeros(())
        adamw = self._adamw or self._create()
        for name, parameter in self._parameters.items():
            self._masters[name].grad = None if parameter.grad is None else parameter.grad.float()
        norm = torch.nn.utils.clip_grad_norm_(self._masters.values(), self._settings.largest_norm, foreach=False)
        adamw.step()
        for name, parameter in self._parameters.items():
            parameter.copy_(self._masters[name])
            self._masters[name].grad = None
        self.clear_gradients()
        self.steps += 1
        return norm

    def _create(self) -> torch.optim.AdamW:
        self._masters = {
            name: parameter.detach().to(torch.float32, copy=True) for name, parameter in self._parameters.items()
        }
        settings = self._settings
        self._adamw = torch.optim.AdamW(
            self._masters.values(),
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            foreach=False,
        )
        return self._adamw

    def state(self) -> dict[str, torch.Tensor]:
        """Return host copies of parameters and, once they exist, masters, moments and step counts, by stable name."""
        found = {f"parameter/{name}": value.detach() for name, value in self._parameters.items()}
        if self._adamw is not None:
            for name, master in self._masters.items():
                found[f"master/{name}"] = master
                for part, value in self._adamw.state[master].items():
                    found[f"{part}/{name}"] = value
        return {name: value.to("cpu", copy=True).contiguous() for name, value in found.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor], steps: int) -> None:
        """Take over what ``state()`` returned after ``steps`` steps.

        Raises CheckpointError when names or shapes differ.
        """
        self.check(state, steps)
        for name, parameter in self._parameters.items():
            parameter.copy_(state[f"parameter/{name}"])
        self._masters, self._adamw, self.steps = {}, None, steps
        if steps == 0:
            return
        adamw = self._create()
        for name, master in self._masters.items():
            master.copy_(state[f"master/{name}"])
            adamw.state[master] = {
                "step": state[f"step/{name}"].clone(),
                "exp_avg": state[f"exp_avg/{name}"].to(master.device, copy=True),
                "exp_avg_sq": state[f"exp_avg_sq/{name}"].to(master.device, copy=True),
            }

    def check(self, state: Mapping[str, torch.Tensor], steps: int) -> None:
        """Raise CheckpointError when names or shapes of ``state`` are not this slot's; changes nothing."""
        parts = ["parameter"] if steps == 0 else ["parameter", "master", "exp_avg", "exp_avg_sq"]
        shapes = {f"{part}/{name}": value.shape for part in parts for name, value in self._parameters.items()}
        if steps:
            shapes |= {f"step/{name}": torch.Size(()) for name in self._parameters}
        if odd := sorted(shapes.keys() ^ state.keys()):
            raise CheckpointError(
                f"checkpoint and adapter differ in {odd[0]}; load it into the model it was saved from"
            )
        for name, shape in shapes.items():
            if state[name].shape != shape:
                raise CheckpointError(
                    f"checkpoint holds {name} of shape {tuple(state[name].shape)}, the adapter {tuple(shape)}; "
                    "load it into the model it was saved from"
                )
