"""On a real card: out of memory is sampled before unwinding and explained; what leaves the card comes back exactly.

A raw driver allocation holds the card while a pass runs, so that it is the driver which refuses. Takes about a minute.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.native.reference import GEOMETRY, PROBES
from qualification.workloads.driver_memory import DriverMemory
from trainer_rank.admission.ladder import ladder
from trainer_rank.allocator.rules import round_size, segment_size
from trainer_rank.devices.cuda import CudaDevice
from trainer_rank.hostheld import HostStore
from trainer_rank.hostmemory import available_host_memory
from trainer_rank.models.reference import build_reference
from trainer_rank.policies import load_policy
from trainer_rank.rank import TrainerRank
from trainer_rank.reports.replay import replay_report
from trainer_rank.reports.report import canonical
from trainer_rank.reports.spool import Spool
from trainer_rank.requests import Request

pytestmark = pytest.mark.gpu
MIB = 1 << 20
TOKENS = 16_384


class _Card:
    """A rank over the reference model on one card; a ballast narrows it while a pass runs."""

    def __init__(self, folder: Path) -> None:
        self.device = CudaDevice()
        self.model = build_reference(
            GEOMETRY, self.device, slots=("policy", "adversary"), rank=4, dropout=0.1, dtype=torch.bfloat16
        )
        self.driver = DriverMemory()
        self.events: list[dict[str, Any]] = []
        self.folder = folder
        policy = replace(load_policy("forecast"), probe_lengths=PROBES, reserve_bytes=64 * MIB)
        self.rank = TrainerRank(self.model, policy, on_event=self.events.append, spool=Spool(folder))

    def choose(self, *rungs: str) -> None:
        """Let the next plan be of these rungs."""
        self.rank._sampler._near = self.rank._sampler._rungs = ladder(rungs)

    @contextmanager
    def narrowed(self, keep: int) -> Iterator[None]:
        """Hold all but ``keep`` bytes of what the driver has free."""
        self.device.empty_cache()
        ballast = self.driver.take(self.device.memory_info().free - keep, "no ballast")
        try:
            yield
        finally:
            self.driver.give_back(ballast)

    @contextmanager
    def narrow_forward(self, keep: int) -> Iterator[None]:
        """Narrow the card while the model's own forward runs, after the plan was admitted."""
        plain = self.model.forward

        def forward(*arguments: Any, **options: Any) -> Any:
            with self.narrowed(keep):
                return plain(*arguments, **options)

        self.model.forward = forward  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self.model.forward  # type: ignore[method-assign]

    def report(self) -> dict[str, Any]:
        found = [event for event in self.events if event["event"] == "report"]
        document: dict[str, Any] = json.loads((self.folder / f"{found[-1]['id']}.report.json").read_bytes())
        return document

    def train(self, requests: list[Request], seed: int = 4) -> list[torch.Tensor]:
        """Run every micro-batch; outputs and gradients on the host, gradients zero again afterwards."""
        torch.manual_seed(seed)
        found = []
        for micro_batch in self.rank.forward_micro_batches(requests):
            found += [each.log_probabilities.detach().cpu() for _, each in sorted(micro_batch.outputs.items())]
            self.rank.backward(micro_batch, _loss(micro_batch.outputs))
        for slot in self.model.slots:
            parameters = self.model.adapter_parameters(slot).values()
            found += [each.grad.cpu() for each in parameters if each.grad is not None]
        self.rank.discard_gradients()
        return found


def _loss(outputs: Any) -> torch.Tensor:
    return torch.stack([each.log_probabilities.mean() for _, each in sorted(outputs.items())]).sum()


def _requests(lengths: list[int]) -> list[Request]:
    generator = torch.Generator().manual_seed(11)
    found = []
    for index, length in enumerate(lengths):
        tokens = torch.randint(0, GEOMETRY.vocabulary, (length + 1,), generator=generator)
        found.append(Request(tokens[:-1], tokens[1:], ("policy", "adversary")[index % 2], group="g"))
    return found


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Card]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; run on a GPU host")
    made = _Card(tmp_path_factory.mktemp("reports"))
    yield made
    made.rank.close()


def _check(card: _Card, stage: str, part: str) -> dict[str, Any]:
    document = card.report()
    failure = document["failure"]
    summary = {name: value for name, value in failure.items() if name not in ("before", "after")}
    assert (document["kind"], failure["kind"], failure["stage"]) == ("out_of_memory", "out_of_memory", stage), summary
    assert failure["part"].startswith(part), summary
    assert failure["part"].endswith(f"layer/{failure['layer']}"), summary
    assert failure["sampled_before_unwinding"] is True
    assert failure["sightings"] == failure["out_of_memory_counted"] > 0, summary
    assert failure["asked"] > failure["free"], summary
    assert failure["requested"] is None, "a real card does not say"
    assert (failure["after"]["allocated"], failure["after"]["reserved"]) == (
        failure["allocated"], failure["reserved"]
    ), summary  # fmt: skip
    event = failure["event"]
    assert segment_size(round_size(event["size"])) == failure["asked"], summary
    assert abs(event["ordinal"] - failure["position"]) <= 2, summary
    assert document["observed"] is None
    assert len(canonical(document)) <= 64 << 10
    assert replay_report(document).same is True
    return failure


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_forward_that_the_driver_refuses_is_explained_and_leaves_nothing(card: _Card, wrapped: bool) -> None:
    card.choose("whole")
    card.train(_requests([1000, 300]))
    before, counted = card.device.allocated(), card.device.out_of_memory_count()
    plain = card.model.forward

    def wrapping(*arguments: Any, **options: Any) -> Any:
        try:
            return plain(*arguments, **options)
        except torch.OutOfMemoryError as error:
            if wrapped:
                raise ExceptionGroup("two", [ValueError("first"), error]) from None
            raise

    card.model.forward = wrapping  # type: ignore[method-assign]
    try:
        with card.narrow_forward(200 * MIB), pytest.raises((torch.OutOfMemoryError, ExceptionGroup)):
            next(card.rank.forward_micro_batches(_requests([TOKENS])))
    finally:
        vars(card.model).pop("forward", None)
    assert card.device.out_of_memory_count() > counted
    assert card.device.allocated() <= before
    failure = _check(card, "forward/subforward/0", "forward/layer/")
    assert failure["requests"] == [0]
    card.train(_requests([1000, 300]))


@pytest.mark.parametrize(
    ("rung", "part", "keep"), [("whole", "backward/layer/", 512 * MIB), ("rerun", "forward/layer/", 200 * MIB)]
)
def test_a_backward_that_the_driver_refuses_is_explained(card: _Card, rung: str, part: str, keep: int) -> None:
    card.choose(rung)
    iterator = card.rank.forward_micro_batches(_requests([TOKENS]))
    micro_batch = next(iterator)
    loss = _loss(micro_batch.outputs)
    with card.narrowed(keep), pytest.raises(torch.OutOfMemoryError):
        card.rank.backward(micro_batch, loss)
    _check(card, "backward/subforward/0", part)
    iterator.close()
    card.rank.discard_gradients()


def test_what_fails_at_the_callers_is_found_when_the_iterator_is_torn_down(card: _Card) -> None:
    card.choose("whole")

    def caller() -> None:
        for _ in card.rank.forward_micro_batches(_requests([300])):
            torch.empty(card.device.card.capacity, dtype=torch.uint8, device=card.device.torch_device)

    with pytest.raises(torch.OutOfMemoryError):
        caller()
    failure = card.report()["failure"]
    assert (failure["stage"], failure["kind"]) == ("caller", "out_of_memory_unnamed")
    assert failure["sampled_before_unwinding"] is True
    assert failure["asked"] >= card.device.card.capacity


def test_host_held_and_rerun_equal_whole_as_closely_as_whole_equals_itself(card: _Card) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        requests = _requests([900, 411, 77])
        card.choose("whole")
        first, again = card.train(requests), card.train(requests)
        spread = _difference(first, again)
        for rung in ("host-held", "rerun"):
            card.choose(rung)
            found = card.train(requests)
            assert [event["rung"] for event in card.events if event["event"] == "forecast"][-1] == rung
            assert _difference(first, found) <= spread, f"{rung} differs by more than whole from itself, {spread}"
    finally:
        torch.use_deterministic_algorithms(False)


def _difference(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    pairs = zip(first, second, strict=True)
    return max(float((a.float() - b.float()).abs().max()) for a, b in pairs)


def _pinned() -> int:
    """Bytes that PyTorch has pinned, in use or kept for reuse."""
    return int(torch.cuda.host_memory_stats()["allocated_bytes.current"])


def _chain(rows: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        rows = (rows * 1.5).sin().exp()
    return rows.sum()


def test_host_copies_are_exact_counted_and_never_waited_for(card: _Card) -> None:
    source = torch.randn(1500, 1000, device=card.device.torch_device)

    def gradient(store: HostStore | None) -> torch.Tensor:
        rows = source.clone().requires_grad_()
        if store is None:
            total = _chain(rows * 1)
        else:
            with store.hooks():
                total = _chain(rows * 1)
        total.backward()
        assert rows.grad is not None
        return rows.grad

    expected = gradient(None)
    gradient(HostStore())  # pins memory, which waits for the device; it is kept for the next time
    card.device.synchronize()
    store = HostStore()
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(1_000_000_000)
        found = gradient(store)
        done.record()  # type: ignore[no-untyped-call]
        assert not done.query(), "the host waited for the device"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, expected)


def test_what_is_pinned_lies_within_what_is_counted_and_available(card: _Card) -> None:
    rows = torch.randn(3000, 1000, device=card.device.torch_device, requires_grad=True)
    available, before, held = available_host_memory(), _pinned(), HostStore()
    with held.hooks():
        total = _chain(rows * 1)
    taken = _pinned() - before
    assert 0 < taken <= held.bytes <= 2 * taken, "blocks of 16 MiB for 12,000,000 B, a size that no test had before"
    assert available is not None
    assert available > taken
    total.backward()
