"""Recordings on whichever device there is: the same tests run on a virtual card and on a real one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer_rank.models.batches import packed
from trainer_rank.allocator.replay import replay
from trainer_rank.devices.protocol import Device, Recording
from trainer_rank.devices.recorder import TraceRecording
from trainer_rank.devices.steady import record_steady
from trainer_rank.devices.virtual import VirtualDevice
from trainer_rank.errors import TraceError, UnsupportedError
from trainer_rank.models.reference import TINY, ReferenceModel, build_reference

MIB = 1 << 20


@pytest.fixture
def reference(device: Device) -> ReferenceModel:
    dtype = torch.bfloat16 if device.torch_device.type == "cuda" else torch.float32
    return build_reference(TINY, device, rank=4, dtype=dtype)


def step(reference: ReferenceModel, recording: Recording, tokens: int = 300) -> None:
    batch = packed([tokens - 100, 100], TINY, reference.device.torch_device)
    loss = reference.forward(batch, slot="policy", gradients=True).log_probabilities.sum()
    loss.backward()
    recording.mark("optimizer")
    for parameter in reference.adapter_parameters("policy").values():
        parameter.grad = None


def test_a_recorded_step_replays_to_the_last_byte(device: Device, reference: ReferenceModel) -> None:
    steady = record_steady(device, lambda recording: step(reference, recording))
    result = replay(steady.trace)
    assert result.divergence is None
    assert result.exact
    assert result.peak_allocated == steady.trace.peak_allocated == device.peak_allocated()
    assert result.peak_reserved == steady.trace.peak_reserved == device.peak_reserved()
    assert result.notes == ()
    assert steady.trace.memory_info == device.memory_info()
    assert steady.trace.after == device.snapshot()


def test_marks_name_the_stage_of_every_event(device: Device, reference: ReferenceModel) -> None:
    trace = record_steady(device, lambda recording: step(reference, recording)).trace
    positions = [position for position, _ in trace.marks]
    assert [stage for _, stage in trace.marks] == [
        "forward/embedding", "forward/layer/0", "forward/layer/1", "forward/head/0",
        "backward/head/0", "backward/layer/1", "backward/layer/0", "optimizer",
    ]  # fmt: skip
    assert positions == sorted(positions)
    starts = dict((stage, position) for position, stage in trace.marks)
    head = trace.events[starts["forward/head/0"] : starts["backward/head/0"]]
    assert sum(event.action == "alloc" for event in head) > 3
    released = trace.events[starts["optimizer"] :]
    assert {event.action for event in released} == {"free_requested", "free_completed"}
    gradients, batch_and_loss = len(reference.adapter_parameters("policy")), 4
    assert sum(event.action == "free_requested" for event in released) == gradients + batch_and_loss


def test_a_mark_stands_between_the_allocations_before_and_after_it(device: Device) -> None:
    held = []
    with device.record() as recording:
        for number in range(4):
            recording.mark(f"stage/{number}")
            held.append(torch.empty((number + 1) * 3 * MIB, dtype=torch.uint8, device=device.torch_device))
    trace = recording.trace()
    allocated = [index for index, event in enumerate(trace.events) if event.action == "alloc"]
    assert [event.size for event in trace.events if event.action == "alloc"] == [n * 3 * MIB for n in range(1, 5)]
    assert [position for position, _ in trace.marks] == [0, *(index + 1 for index in allocated[:-1])]


def test_nothing_is_recorded_or_changed_while_off(device: Device) -> None:
    device.mark("nobody listens")
    before = device.snapshot()
    with device.record() as recording:
        pass
    torch.empty(5 * MIB, dtype=torch.uint8, device=device.torch_device)
    assert recording.trace().events == ()
    assert recording.trace().before == before == recording.trace().after


def test_recordings_do_not_nest_and_are_read_when_they_have_ended(device: Device) -> None:
    with device.record() as recording:
        with pytest.raises(TraceError, match="has not ended"):
            recording.trace()
        with pytest.raises(UnsupportedError, match="one recording at a time"), device.record():
            pass
    assert recording.trace().events == ()
    with device.record() as again:
        torch.empty(1, device=device.torch_device)
    assert again.trace().events


def test_a_failing_pass_still_ends_its_recording(device: Device) -> None:
    with pytest.raises(ZeroDivisionError), device.record() as recording:
        torch.empty(1, device=device.torch_device)
        raise ZeroDivisionError
    assert [event.action for event in recording.trace().events][-3:] == ["alloc", "free_requested", "free_completed"]
    with device.record():
        pass


def test_a_release_inside_a_recording_is_seen(device: Device) -> None:
    with device.record() as recording:
        torch.empty(30 * MIB, dtype=torch.uint8, device=device.torch_device)
        released = device.empty_cache()
    assert released >= 30 * MIB
    freed = [event for event in recording.trace().events if event.action == "segment_free"]
    assert sum(event.size for event in freed) == released
    assert replay(recording.trace()).exact


def test_a_steady_pass_is_taken_at_the_second_run(device: Device, reference: ReferenceModel) -> None:
    with device.record() as recording:
        step(reference, recording)
    steady = record_steady(device, lambda recording: step(reference, recording))
    assert steady.passes == 2
    assert steady.disturbances == ()


def test_a_cache_that_fills_is_named_and_recorded_again(device: Device) -> None:
    kept: list[torch.Tensor] = []

    def run(recording: Recording) -> None:
        recording.mark("forward")
        if len(kept) < 2:
            kept.append(torch.empty(3 * MIB, dtype=torch.uint8, device=device.torch_device))
        torch.empty(5 * MIB, dtype=torch.uint8, device=device.torch_device)

    steady = record_steady(device, run)
    assert steady.passes == 4
    assert steady.disturbances[0] == "pass 2: 3145728 B were left behind: a cache being filled, or a leak"
    assert steady.disturbances[1].startswith("pass 3: allocation event 0 is alloc of 5242880 B on stream ")


def test_a_pass_that_never_settles_gives_no_trace(device: Device) -> None:
    sizes = iter(range(1, 100))

    def run(recording: Recording) -> None:
        torch.empty(next(sizes) * MIB, dtype=torch.uint8, device=device.torch_device)

    with pytest.raises(TraceError, match=r"no two of 3 passes on .* agree: pass 2: .*; pass 3:"):
        record_steady(device, run, most_passes=3)


def test_library_memory_is_told_by_phase_and_disturbs_a_recording(virtual: VirtualDevice) -> None:
    card = virtual.card
    reference = build_reference(TINY, virtual, rank=4)
    with virtual.record() as recording:
        step(reference, recording)
    assert recording.outside == (
        ("start", card.context),
        ("forward", card.held_outside("first_forward")),
        ("backward", card.held_outside("first_backward")),
        ("optimizer", card.held_outside("first_backward")),
    )

    passes = 0

    def run(recording: Recording) -> None:
        nonlocal passes
        passes += 1
        recording.mark("forward")
        if passes == 2:
            virtual.take_raw(MIB)

    steady = record_steady(virtual, run)
    assert steady.passes == 3
    assert len(steady.disturbances) == 1
    assert "+1048576 B outside PyTorch's allocator in forward: a library was loaded" in steady.disturbances[0]
    assert steady.libraries == (("forward", MIB),)


def test_an_incomplete_history_is_refused_and_recorded_again(
    virtual: VirtualDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish, wrapped = TraceRecording.finish, [True]

    def lossy(recording: TraceRecording, *args: object, **kwargs: object) -> None:
        if wrapped.pop() if wrapped else False:
            recording.fail(TraceError("the buffer wrapped"))
        else:
            finish(recording, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(TraceRecording, "finish", lossy)
    steady = record_steady(virtual, lambda recording: None)
    assert steady.passes == 3
    assert steady.disturbances == ("pass 1: the buffer wrapped",)


@pytest.mark.gpu
def test_a_wrapped_buffer_of_the_real_allocator_is_noticed_and_enlarged() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; run on a GPU host")
    from trainer_rank.devices.cuda import CudaDevice

    device = CudaDevice(history_entries=20)

    def run(recording: Recording) -> None:
        for _ in range(100):
            torch.empty(1000, device=device.torch_device)

    with device.record() as recording:
        run(recording)
    with pytest.raises(TraceError, match="of 200 allocations and frees: the buffer of 20 entries wrapped"):
        recording.trace()
    steady = record_steady(device, run)
    assert sum(event.action == "alloc" for event in steady.trace.events) == 100


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40 * MIB), st.sampled_from([0, 3])), max_size=40))
def test_any_births_and_deaths_are_recorded_as_the_model_replays_them(work: list[tuple[int, int, int]]) -> None:
    device = VirtualDevice("h200")
    try:
        held: dict[int, torch.Tensor] = {}
        with device.record() as recording:
            for place, size, stream in work:
                held.pop(place, None)
                with device.stream(stream):
                    held[place] = torch.empty(size, dtype=torch.uint8, device=device.torch_device)
            held.clear()
        if recording.trace().events:
            assert replay(recording.trace()).exact
        assert device.allocated() == 0
    finally:
        device.close()
