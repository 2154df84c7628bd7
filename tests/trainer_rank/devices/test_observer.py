"""The charges of a virtual device against an independent witness: PyTorch's own report of its CPU allocator."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import groupby

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.trainer_rank.models.batches import packed
from trainer_rank.devices.virtual import VirtualDevice
from trainer_rank.models.reference import TINY, build_reference

Change = tuple[int, int]
"""Real address and bytes: positive when allocated, negative when freed."""
NUMBER = 8
"""Bytes of a Python number that autograd keeps as a host scalar; on a CUDA device it stays on the host too."""


class Noted(VirtualDevice):
    """A virtual device that notes the real address of every storage that it charges and releases."""

    noted: list[Change]

    def birth(self, storage: torch.UntypedStorage) -> None:
        known = storage._cdata in self._lives
        super().birth(storage)
        if not known and storage.nbytes():
            self.addresses = getattr(self, "addresses", {})
            self.addresses[storage._cdata] = storage.data_ptr()
            self.noted.append((storage.data_ptr(), storage.nbytes()))

    def _death(self, life: weakref.ref[torch.UntypedStorage]) -> None:
        self.noted.append((self.addresses[life.key], -life.size))  # type: ignore[attr-defined]
        super()._death(life)


def allocations(observed: profile) -> list[Change]:
    """Every allocation and free that the CPU allocator reported, in the order of time."""
    found = []
    pending = list(observed.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        kind, details = event.typed
        if kind.name == "Allocation":
            found.append((event.start_time_ns, (details.ptr, details.alloc_size)))
    return [change for _, change in sorted(found)]


@pytest.fixture
def observed_step() -> tuple[list[Change], list[Change], list[int]]:
    """What the device noted, what the witness saw, and the sizes in the device's own recording, of one step."""
    device = Noted("h200")
    device.noted = []
    model = build_reference(TINY, device, rank=4)
    batch = packed([30, 17, 50, 1], TINY, device.torch_device)
    optimizer = torch.optim.AdamW(model.adapter_parameters("policy").values())

    def step() -> None:
        model.forward(batch, slot="policy", gradients=True).log_probabilities.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    device.noted.clear()
    with device.record() as recording, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as observed:
        step()
    signs = {"alloc": 1, "free_requested": -1}
    events = recording.trace().events
    device.close()
    return (
        list(device.noted),
        allocations(observed),
        [event.size * signs[event.action] for event in events if event.action in signs],
    )


def runs(noted: list[Change]) -> Iterator[list[Change]]:
    """Consecutive births together, each death alone: one operator's outputs are charged in the order of its results."""
    for born, changes in groupby(noted, key=lambda change: change[1] > 0):
        together = list(changes)
        yield from [together] if born else [[change] for change in together]


def uncharged(noted: list[Change], witnessed: list[Change]) -> list[tuple[int, Change]]:
    """What the witness saw beside the charges, each with the number of births charged before it.

    Fails when a charge has no real counterpart in its place.
    """
    others = []
    births = 0
    seen = iter(witnessed)
    for run in runs(noted):
        due = list(run)
        for change in seen:
            if change in due:
                due.remove(change)
                births += change[1] > 0
            else:
                others.append((births, change))
            if not due:
                break
        assert not due, f"charges {due} have no real counterpart in their place"
    return others + [(births, change) for change in seen]


def test_every_charge_is_a_real_allocation_or_free_in_its_place(
    observed_step: tuple[list[Change], list[Change], list[int]],
) -> None:
    noted, witnessed, recorded = observed_step
    assert [size for _, size in noted] == recorded
    assert len(noted) > 1000
    uncharged(noted, witnessed)


def test_what_is_not_charged_lives_within_one_operator_or_is_a_number_of_the_host(
    observed_step: tuple[list[Change], list[Change], list[int]],
) -> None:
    noted, witnessed, _ = observed_step
    born: dict[int, int] = {}
    for births, (address, size) in uncharged(noted, witnessed):
        if size > 0:
            born[address] = births
        else:
            kept_for = births - born.pop(address)
            assert kept_for <= 1 or -size == NUMBER, f"{-size} B outlived the operator that made them, uncharged"
    assert not born, "memory that the device never charged was left behind"
