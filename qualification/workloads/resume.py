"""Publish two slots as one group, and continue from exactly that group in a fresh process by exactly one update.

The process ``publish`` trains generator and auxiliary and publishes them, with the place in the data, as ``v1``. Once
it is gone, and its files are hashed, the process ``continue`` meets damaged copies of the group, loads the group, saves
at once what it took over (``loaded``), makes one update on the next batches, and publishes ``v2``.

Parameters: ``updates`` before the publication (2), ``batches`` of each update (2), ``requests`` per batch (4),
``shortest`` (24) and ``longest`` (160) tokens of a request, ``seed`` (593015); ``layers``: 0 for the reference model
(0), else so many of the Megatron model, on ground native alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from qualification.errors import ConfigurationError
from qualification.execution.worker import Context
from qualification.records import Ground
from qualification.workloads.full_step import policy_loss, ragged_rows

SLOTS = ("generator", "auxiliary")


@dataclass
class Data:
    """The place in the data: the generator that draws the batches, and how many were drawn."""

    generator: torch.Generator
    batches: int = 0

    def state(self) -> dict[str, torch.Tensor]:
        """Return it as tensors, to be published with the slots."""
        return {"generator": self.generator.get_state(), "batches": torch.tensor(self.batches)}

    @classmethod
    def at(cls, state: Any) -> Data:  # noqa: ANN401 - tensors by name
        """Return the place that was published."""
        generator = torch.Generator()
        generator.set_state(state["generator"])
        return cls(generator, int(state["batches"]))


def run(context: Context) -> None:
    """Do this process's part."""
    if context.parameter("layers") and context.job.ground is not Ground.NATIVE:
        raise ConfigurationError("workload resume runs the Megatron model on ground native alone; give layers=0")
    parts: dict[str, Callable[[Context, Any], None]] = {"publish": _publish, "continue": _continue}
    subject = _construct(context)
    parts[context.job.process](context, subject)
    context.close(subject)


def _construct(context: Context) -> Any:  # noqa: ANN401 - the subject's object
    try:
        return context.contract.construct(
            ground=context.job.ground.value,
            policy=context.job.policy,
            seed=context.parameter("seed"),
            slots=SLOTS,
            layers=context.parameter("layers"),
            recordings=context.output,
            on_event=context.emit_event,
        )
    except Exception as error:
        if type(error).__name__ == "UnsupportedError":  # the host lacks what was asked for: no word on the policy
            raise ConfigurationError(str(error)) from error
        raise


def _publish(context: Context, subject: Any) -> None:  # noqa: ANN401 - the subject's object
    data = Data(torch.Generator().manual_seed(context.parameter("seed")))
    for update in range(context.parameter("updates")):
        train(context, subject, data, update)
    context.contract.save(subject, context.output / "v1", data.state())


def _continue(context: Context, subject: Any) -> None:  # noqa: ANN401
    assert context.job.earlier is not None
    published = Path(context.job.earlier) / "v1"
    for damage in DAMAGES:
        meet(context, subject, published, damage)
    state = context.contract.load(subject, published)
    context.contract.save(subject, context.output / "loaded", state)
    data = Data.at(state)
    train(context, subject, data, context.parameter("updates"))
    context.contract.save(subject, context.output / "v2", data.state())


def train(context: Context, subject: Any, data: Data, update: int) -> None:  # noqa: ANN401
    """Draw the next batches and make one update of both slots from them."""
    contract = context.contract
    for _ in range(context.parameter("batches")):
        rows = ragged_rows(context, subject.vocabulary, data.generator)
        data.batches += 1
        context.emit("batch", number=data.batches, sha256=_digest(rows))
        group = f"batch {data.batches}"
        requests = [
            contract.request(each[:-1], each[1:], slot=SLOTS[index % len(SLOTS)], group=group)
            for index, each in enumerate(rows)
        ]
        for micro_batch in contract.forward(subject, requests):
            loss = policy_loss(micro_batch.outputs)
            contract.backward(subject, micro_batch, loss)
            context.emit("loss", step=micro_batch.step, update=update, value=round(float(loss.detach()), 9))
    report = contract.step(subject)
    context.emit("optimizer", update=update, slots={name: each["step"] for name, each in report.items()})


def _digest(rows: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in rows)).hexdigest()


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda _: None,
    "torn": lambda content: content[: len(content) // 2],
    "altered": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
}
"""What is left of a file, by the name of what befell it."""


def meet(context: Context, subject: Any, published: Path, damage: str) -> None:  # noqa: ANN401
    """Load a copy of the group of which one file is damaged, and report the refusal or that there was none."""
    name = f"slot-{SLOTS[-1]}.safetensors"
    with _damaged(published, name, DAMAGES[damage]) as copy:
        try:
            context.contract.load(subject, copy)
        except Exception as error:
            context.emit("refused", damage=damage, file=name, type=type(error).__name__, text=str(error)[:1000])
        else:
            context.emit("accepted", damage=damage, file=name)


@contextmanager
def _damaged(published: Path, name: str, damage: Callable[[bytes], bytes | None]) -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        for path in published.iterdir():
            copy = Path(folder) / path.name
            if path.name != name:
                copy.symlink_to(path)
            elif (left := damage(path.read_bytes())) is not None:
                copy.write_bytes(left)
        yield Path(folder)
