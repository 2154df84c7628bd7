"""A memory failure is recognised behind any wrapper, reported, and leaves the device as it was before."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer_rank.test_rank import WIDE, _Bench, _loss, _requests
from trainer_rank.devices.virtual import VirtualDevice
from trainer_rank.errors import InvalidInputError
from trainer_rank.models.reference import TINY, build_reference
from trainer_rank.outofmemory import FailureKind, chain, failure_kind, forget_frames
from trainer_rank.policies import load_policy
from trainer_rank.rank import TrainerRank
from trainer_rank.reports.replay import replay_report
from trainer_rank.reports.report import bounded, canonical, projected


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[_Bench]:
    made = _Bench(7, room=1 << 30, spool=tmp_path / "spool", **WIDE)
    yield made
    made.rank.close()
    made.device.close()


def _named(error: BaseException) -> BaseException:
    failure = RuntimeError("api call failed at line 145")
    failure.__cause__ = error
    return failure


def _grouped(error: BaseException) -> BaseException:
    return ExceptionGroup("two", [ValueError("first"), error])  # type: ignore[list-item]


class _PartialError(RuntimeError):
    """A wrapper that keeps the inner error to itself, as that of the public report."""

    def __init__(self, inner: BaseException) -> None:
        super().__init__("partial execution")
        self.inner = inner


def _kept(error: BaseException) -> BaseException:
    failure = _PartialError(error)
    failure.__suppress_context__ = True
    return failure


def _torn_down(error: BaseException) -> BaseException:
    failure = GeneratorExit()
    failure.__context__ = error
    return failure


def _both(error: BaseException) -> BaseException:
    return BaseExceptionGroup("two", [KeyboardInterrupt(), error])


def _unnamed(_: BaseException) -> BaseException:
    failure = RuntimeError("api call failed at line 145")
    failure.__suppress_context__ = True
    return failure


def _wrapping(bench: _Bench, wrap: Callable[[BaseException], BaseException]) -> None:
    plain = bench.model.forward

    def forward(*arguments: Any, **options: Any) -> Any:
        failure = None
        try:
            return plain(*arguments, **options)
        except torch.OutOfMemoryError as error:
            failure = wrap(error)
        raise failure

    bench.model.forward = forward  # type: ignore[method-assign]


def _report(bench: _Bench, folder: Path) -> dict[str, Any]:
    (event,) = bench.of("report")
    found: dict[str, Any] = json.loads((folder / "spool" / f"{event['id']}.report.json").read_bytes())
    return found


@pytest.mark.parametrize(
    ("wrap", "kind"),
    [
        (lambda error: error, FailureKind.OUT_OF_MEMORY),
        (_named, FailureKind.OUT_OF_MEMORY),
        (_grouped, FailureKind.OUT_OF_MEMORY),
        (_both, FailureKind.OUT_OF_MEMORY),
        (_kept, FailureKind.OUT_OF_MEMORY),
        (_torn_down, FailureKind.OUT_OF_MEMORY),
        (_unnamed, FailureKind.UNNAMED_OUT_OF_MEMORY),
    ],
)
def test_an_oversized_plan_that_fails_is_recognised_reported_and_forgotten(
    bench: _Bench, tmp_path: Path, wrap: Callable[[BaseException], BaseException], kind: FailureKind
) -> None:
    both = ("policy", "adversary")
    bench.train(_requests([20, 20], slots=both))
    ballast = bench.device.memory_info().free - (3 << 20)
    bench.device.take_raw(ballast)
    before = bench.device.allocated()
    _wrapping(bench, wrap)
    bench.rank.caller_step = "step 12"
    with pytest.raises((RuntimeError, BaseExceptionGroup, GeneratorExit)) as caught:
        next(bench.rank.forward_micro_batches(_requests([20, 900], slots=both), allow_oversize=True))
    assert bench.device.allocated() == before
    document = _report(bench, tmp_path)
    failure = document["failure"]
    assert (document["kind"], failure["kind"], document["caller_step"]) == ("out_of_memory", kind.value, "step 12")
    assert document["origin"]["card"] == "h200"
    assert document["origin"]["model"] == "reference-tiny"
    assert not any(text.startswith(("/", "~")) or "/home/" in text for text in _texts(document)), "folders stay behind"
    assert document["decision"]["outcome"] == "admitted_oversized"
    assert document["decision"]["shortfall"] > 0
    assert (failure["requests"], failure["slot"], failure["stage"]) == ([1], "adversary", "forward/subforward/1")
    assert failure["sampled_before_unwinding"] is True
    assert failure["asked"] > failure["free"]
    assert failure["free"] < 2 << 20, "less than the smallest segment"
    _check_explained(document)
    assert document["observed"] is None
    assert failure["partial_peak_allocated"] > before
    assert replay_report(document).same is True
    assert any("requests [1]" in note for note in caught.value.__notes__)
    _check_projected(document)
    bench.device.give_back_raw(ballast)
    bench.train(_requests([1]))


def _check_explained(document: dict[str, Any]) -> None:
    """A failure names its layer, the tapes' event with its forecast, and both states of the allocator."""
    failure = document["failure"]
    event = failure["event"]
    assert failure["part"].endswith(f"layer/{failure['layer']}")
    assert (event["matched"], event["size"]) == ("position and size", failure["requested"])
    assert event["stream"] == failure["stream"] == 0
    assert event["ordinal"] == failure["position"] < event["count"]
    assert event["stage"].endswith(failure["part"])
    assert event["allocated"] >= failure["allocated"] + failure["requested"]
    assert event["rule"]
    assert (failure["sightings"], failure["out_of_memory_counted"]) == (1, 1)
    assert failure["after"]["allocated"] == failure["allocated"]
    assert failure["after"]["reserved"] == failure["reserved"]
    assert failure["after"]["allocated"] > failure["before"]["allocated"] > 0
    assert (
        sum(row[0] for row in failure["after"]["layout"]) + failure["after"]["left_out"]["reserved"]
        == (failure["after"]["reserved"])
    )
    assert len(canonical(document)) <= 64 << 10


def _texts(value: Any) -> Iterator[str]:
    """Every text of a document, keys too."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, str):
        yield value


def _check_projected(document: dict[str, Any]) -> None:
    """What may leave says the same without a name; what does not fit is left out in order, and listed."""
    projection = projected(document | {"failure": document["failure"] | {"generated": [GENERATED]}})
    assert projection["failure"]["slot"] in ("slot-0", "slot-1")
    assert projection["failure"]["generated"] == [{"size": 4, "sha256": "0" * 64}]
    assert replay_report(projection).same is True
    small = bounded(document, len(canonical(document)) - 1)
    assert small["omitted"] == ["layouts"]
    assert small["failure"]["after"]["layout"] == []
    assert small["failure"]["after"]["left_out"]["reserved"] == document["failure"]["reserved"]
    assert replay_report(small).same is True


GENERATED = {"name": "ab/cab.py", "size": 4, "sha256": "0" * 64}


def test_a_rerun_that_fails_in_backward_is_explained_by_the_tapes(tmp_path: Path) -> None:
    bench = _Bench(7, room=1 << 30, spool=tmp_path / "spool", **{**WIDE, "ladder": ("rerun",)})
    slots = ("policy", "adversary")
    bench.train(_requests([20, 20], slots=slots))
    digest = bench.rank.optim_step() and bench.rank.save_checkpoint(tmp_path / "saved")
    micro_batch = next(iterator := bench.rank.forward_micro_batches(_requests([20, 900], slots=slots)))
    loss = _loss(micro_batch.outputs)
    bench.device.empty_cache()
    bench.rank._headroom.uncap()
    bench.device.take_raw(ballast := bench.device.memory_info().free - (3 << 20))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        bench.rank.backward(micro_batch, loss)
    document = _report(bench, tmp_path)
    failure = document["failure"]
    assert (failure["stage"], failure["requests"]) == ("backward/subforward/1", [1])
    assert failure["part"].startswith("forward/layer/"), "the forward that runs again"
    assert failure["event"]["stage"] == f"backward/{failure['part']}"
    assert (failure["slot_steps"], failure["slot_checkpoint"]) == (1, digest)
    assert failure["asked"] > failure["free"]
    _check_explained(document)
    assert "at forward/layer/" in caught.value.__notes__[0]
    iterator.close()
    bench.device.give_back_raw(ballast)
    bench.rank.close()
    bench.device.close()


def test_what_fails_between_forward_and_backward_is_found_when_the_iterator_is_torn_down(
    bench: _Bench, tmp_path: Path
) -> None:
    def caller() -> None:
        for micro_batch in bench.rank.forward_micro_batches(_requests([20])):
            torch.empty(1 << 40, dtype=torch.uint8, device=bench.device.torch_device)
            bench.rank.backward(micro_batch, _loss(micro_batch.outputs))

    with pytest.raises(torch.OutOfMemoryError):
        caller()
    failure = (document := _report(bench, tmp_path))["failure"]
    assert (document["kind"], failure["kind"]) == ("out_of_memory", "out_of_memory_unnamed")
    assert (failure["stage"], failure["subforward"], failure["requested"]) == ("caller", None, 1 << 40)
    assert failure["sampled_before_unwinding"] is True
    assert document["observed"] is None
    bench.train(_requests([20]))
    assert len(bench.of("report")) == 1


def test_a_policy_without_forecasts_reports_its_failure_and_can_be_replayed(tmp_path: Path) -> None:
    bench = _Bench(8, room=24 << 20, spool=tmp_path / "spool", forecasts=False)
    with pytest.raises(torch.OutOfMemoryError):
        bench.train(_requests([3000] * 3))
    document = _report(bench, tmp_path)
    failure = document["failure"]
    assert (failure["event"], failure["before"]) == (None, None), "nothing was forecast"
    assert failure["reserved"] + failure["asked"] > failure["cap"], "what libraries will take was kept free"
    assert replay_report(document).same is True
    bench.rank.close()
    bench.device.close()


def test_a_spool_that_cannot_be_written_changes_nothing(bench: _Bench, tmp_path: Path) -> None:
    bench.train(_requests([20]))
    (tmp_path / "spool").rmdir()
    (tmp_path / "spool").write_text("no folder")
    handle = next(iter(bench.model.adapter_parameters("policy").values())).register_hook(_fail)
    with pytest.raises(RuntimeError, match="in the middle") as caught:
        bench.train(_requests([20]))
    handle.remove()
    assert "report not kept" in caught.value.__notes__[0]
    bench.rank.discard_gradients()
    bench.train(_requests([20]))
    assert bench.rank.close()["observer_failures"] == 1


def test_an_error_in_planning_is_reported_without_the_folders_in_its_words(
    bench: _Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("tape /home/someone/tapes/a.tape.json: 3 of forward/layer/1 are missing")

    monkeypatch.setattr(bench.rank._sampler, "_alone", broken)
    with pytest.raises(ValueError, match="someone"):
        bench.train(_requests([20]))
    document = _report(bench, tmp_path)
    assert document["kind"] == "planning_error"
    assert document["reason"] == "tape a.tape.json: 3 of forward/layer/1 are missing"
    assert replay_report(document).missing == ("device_or_modified_input",)


def test_a_plan_admitted_by_its_limits_alone_is_explained_without_the_blocks_that_nobody_read(
    bench: _Bench, tmp_path: Path
) -> None:
    bench.rank._sampler._exact_figures = False
    bench.train(_requests([20]))
    plain, ballast = bench.model.forward, []

    def forward(*arguments: Any, **options: Any) -> Any:
        bench.device.empty_cache()
        bench.device.take_raw(bench.device.memory_info().free - (3 << 20))
        ballast.append(True)
        return plain(*arguments, **options)

    bench.model.forward = forward  # type: ignore[method-assign]
    before = bench.device.allocated()
    with pytest.raises(torch.OutOfMemoryError):
        bench.train(_requests([900]))
    failure = (document := _report(bench, tmp_path))["failure"]
    event = failure["event"]
    assert replay_report(document).same is True
    assert ballast == [True]
    assert failure["before"] is None
    assert (event["matched"], event["size"], event["reserved"]) == ("position and size", failure["requested"], None)
    assert event["allocated"] >= before + event["size"]


def test_a_library_that_finds_no_memory_is_told_apart_and_sampled_afterwards(bench: _Bench, tmp_path: Path) -> None:
    bench.train(_requests([20]))
    (micro_batch,) = _first(bench)
    returned = bench.device.give_up("first_backward")
    bench.rank._headroom.uncap()
    bench.device.take_raw(ballast := bench.device.memory_info().free - returned // 2)
    with pytest.raises(RuntimeError, match="CUBLAS_STATUS_ALLOC_FAILED"):
        bench.rank.backward(micro_batch, _loss(micro_batch.outputs))
    document = _report(bench, tmp_path)
    failure = document["failure"]
    assert (document["kind"], failure["kind"]) == ("out_of_memory", "library_out_of_memory")
    assert (failure["sampled_before_unwinding"], failure["sightings"], failure["asked"]) == (False, 0, None)
    assert 0 < failure["free"] < returned, "as it was found once the failure had been caught"
    assert failure["after"]["reserved"] == failure["reserved"]
    bench.device.give_back_raw(ballast)


def test_an_out_of_memory_that_the_model_recovers_from_is_no_failure(bench: _Bench) -> None:
    bench.train(_requests([20]))
    plain = bench.model.forward

    def forward(*arguments: Any, **options: Any) -> Any:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 40, dtype=torch.uint8, device=bench.device.torch_device)
        return plain(*arguments, **options)

    bench.model.forward = forward  # type: ignore[method-assign]
    bench.train(_requests([20]))
    assert bench.of("report") == []
    assert bench.device.out_of_memory_count() == 1


def test_a_watch_that_fails_leaves_the_failure_as_it_was(bench: _Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.train(_requests([20]))
    plain = bench.model.forward

    def forward(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(bench.device, "snapshot", _fail)
        torch.empty(1 << 40, dtype=torch.uint8, device=bench.device.torch_device)
        return plain(*arguments, **options)

    bench.model.forward = forward  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        bench.train(_requests([20]))
    assert "report not kept" in caught.value.__notes__[0]
    assert bench.of("report") == []
    monkeypatch.undo()
    assert bench.rank.close()["observer_failures"] == 2, "one of the observer, one of the report"


@pytest.mark.parametrize(("factor", "sign"), [(2, -1), (0.5, 1)])
def test_a_step_far_from_its_forecast_is_reported_in_both_directions(
    bench: _Bench, tmp_path: Path, factor: float, sign: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.train(_requests([20]))
    assert bench.of("report") == []
    peak = bench.device.peak_allocated
    monkeypatch.setattr(bench.device, "peak_allocated", lambda: int(peak() * factor))
    bench.train(_requests([20]))
    document = _report(bench, tmp_path)
    assert document["kind"] == "miss"
    assert document["observed"]["allocated_error_per_million"] * sign > 400_000
    assert document["observed"]["reserved_error_per_million"] == 0
    assert replay_report(document).same is True
    assert document["failure"] is None


def test_a_backward_that_fails_blocks_the_step_until_its_gradients_are_discarded(bench: _Bench) -> None:
    (micro_batch,) = _first(bench)
    hooked = next(iter(bench.model.adapter_parameters("policy").values()))
    handle = hooked.register_hook(_fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        bench.rank.backward(micro_batch, _loss(micro_batch.outputs))
    handle.remove()
    with pytest.raises(InvalidInputError, match=r"backward of micro-batch 0 failed.*call discard_gradients first"):
        bench.rank.optim_step()
    bench.rank.discard_gradients()
    assert all(
        not each.grad.any() for each in bench.model.adapter_parameters("policy").values() if each.grad is not None
    )
    bench.train(_requests([8]))
    assert bench.rank.optim_step()["policy"].step == 1


def test_a_backward_that_runs_out_of_memory_anywhere_leaves_nothing_in_autograds_queue() -> None:
    device = VirtualDevice("h200", 21, magnification=1024)
    rank = TrainerRank(build_reference(TINY, device), load_policy("none"))
    requests, failed = _requests([70]), []

    def step() -> None:
        for micro_batch in rank.forward_micro_batches(requests):
            loss = _loss(micro_batch.outputs)
            device.empty_cache()
            device.set_cap(device.reserved() + room)
            rank.backward(micro_batch, loss)

    room = 1 << 40
    step()
    rank.discard_gradients()
    held = device.allocated()
    for room in range(0, 400 << 20, 40 << 20):
        try:
            step()
        except torch.OutOfMemoryError as error:
            failed.append(any(each.name == "recompute_fn" for each in traceback.extract_tb(error.__traceback__)))
            forget_frames(error)
        device.set_cap(None)
        rank.discard_gradients()
        assert device.allocated() == held, room
    assert set(failed) == {False, True}
    rank.close()
    device.close()


def _first(bench: _Bench) -> list[Any]:
    iterator = bench.rank.forward_micro_batches(_requests([20]))
    bench.iterator = iterator  # type: ignore[attr-defined]
    return [next(iterator)]


def _fail(*_: object) -> None:
    raise RuntimeError("in the middle")


def test_an_unusable_loss_loses_nothing(bench: _Bench) -> None:
    (micro_batch,) = _first(bench)
    with pytest.raises(InvalidInputError, match=r"shape \(20,\) and a gradient"):
        bench.rank.backward(micro_batch, micro_batch.outputs[0].log_probabilities)
    bench.rank.backward(micro_batch, _loss(micro_batch.outputs))
    with pytest.raises(InvalidInputError, match="was propagated before"):
        bench.rank.backward(micro_batch, _loss(micro_batch.outputs))
    assert bench.of("report") == []


def test_library_failures_are_told_apart_from_other_errors() -> None:
    library = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    assert failure_kind(_named(library), 0) is FailureKind.LIBRARY_OUT_OF_MEMORY
    assert failure_kind(ValueError("out of memory"), 0) is FailureKind.OTHER
    assert failure_kind(ValueError("anything"), 1) is FailureKind.UNNAMED_OUT_OF_MEMORY


def test_a_chain_that_runs_in_circles_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__context__, second.__cause__ = second, first
    assert list(chain(first)) == [first, second]
