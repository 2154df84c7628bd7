"""What a caller gets to work with: outputs of a micro-batch by original request index."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from trainer_rank.errors import InvalidInputError

if TYPE_CHECKING:
    import torch

    from trainer_rank.admission.planner import Choice
    from trainer_rank.execution import PlanRun
    from trainer_rank.forecasting import PlanForecaster


@dataclass(frozen=True, eq=False)
class RequestOutput:
    """Outputs of one request of n tokens. ``log_probabilities``: float32 (n,); ``hidden``: (n, H) or None."""

    log_probabilities: torch.Tensor
    hidden: torch.Tensor | None = None


class Admitted(NamedTuple):
    """What was admitted: the micro-batch's number, the choice, and what its forecasts were made with, if any were."""

    step: int
    choice: Choice
    forecaster: PlanForecaster | None


class MicroBatch:
    """Requests that ran together. Its outputs live until the next micro-batch is asked for, or ``release()``.

    ``step`` counts micro-batches of the rank from 0; ``choice`` says why it was admitted as it is. ``hold()`` keeps
    the outputs past the next admission, which then counts them as memory in use.
    """

    def __init__(self, admitted: Admitted, run: PlanRun) -> None:
        self.admitted = admitted
        self._run: PlanRun | None = run
        self._held = False
        self._consumed = False

    @property
    def step(self) -> int:
        """Its number."""
        return self.admitted.step

    @property
    def choice(self) -> Choice:
        """Why it was admitted as it is."""
        return self.admitted.choice

    @property
    def indices(self) -> tuple[int, ...]:
        """Original indices of its requests, ascending."""
        return tuple(sorted(self.outputs))

    @property
    def outputs(self) -> Mapping[int, RequestOutput]:
        """Outputs by original request index. Raises InvalidInputError once they were released."""
        return self._running("outputs").outputs

    @property
    def training_slots(self) -> frozenset[str]:
        """Slots of its requests that asked for gradients."""
        return self._running("requests").training_slots

    def hold(self) -> None:
        """Keep the outputs until ``release()``, past the next admission."""
        self._held = True

    def release(self) -> None:
        """Drop outputs and graphs."""
        if self._run is not None:
            self._run.drop()
        self._run = None

    def expire(self) -> None:
        """Drop outputs and graphs unless the caller holds them."""
        if not self._held:
            self.release()

    def check(self, loss: torch.Tensor) -> None:
        """Raise InvalidInputError when ``loss`` cannot be propagated, before anything is lost."""
        if self._consumed:
            raise InvalidInputError(f"micro-batch {self.step} was propagated before; run its requests again")
        if loss.dim() != 0 or not loss.requires_grad:
            raise InvalidInputError(
                f"the loss of micro-batch {self.step} has shape {tuple(loss.shape)} and "
                f"{'a' if loss.requires_grad else 'no'} gradient; give a scalar made from its outputs"
            )

    def consume(self, loss: torch.Tensor) -> None:
        """Propagate the caller's loss into the adapters' gradients, once; frees the graphs."""
        run = self._running("graphs")
        self._consumed = True
        run.backward(loss)

    def _running(self, what: str) -> PlanRun:
        if self._run is None:
            raise InvalidInputError(
                f"the {what} of micro-batch {self.step} were released; hold() it before asking for the next one"
            )
        return self._run
