"""A memory failure is recognised behind any wrapper, reported, and leaves the device as it was before."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer_rank.test_rank import WIDE, _Bench, _loss, _requests
from trainer_rank.errors import InvalidInputError
from trainer_rank.outofmemory import FailureKind, chain, failure_kind
from trainer_rank.reports.replay import replay_report


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
    with pytest.raises((RuntimeError, ExceptionGroup)) as caught:
        next(bench.rank.forward_micro_batches(_requests([20, 900], slots=both), allow_oversize=True))
    assert bench.device.allocated() == before
    document = _report(bench, tmp_path)
    failure = document["failure"]
    assert (document["kind"], failure["kind"], document["caller_step"]) == ("out_of_memory", kind.value, "step 12")
    assert document["decision"]["outcome"] == "admitted_oversized"
    assert document["decision"]["shortfall"] > 0
    assert (failure["requests"], failure["slot"], failure["stage"]) == ([1], "adversary", "forward/subforward/1")
    assert failure["sampled_before_unwinding"] is True
    assert failure["asked"] > 0
    assert failure["free"] < 2 << 20, "less than the smallest segment"
    assert document["observed"] is None
    assert failure["partial_peak_allocated"] > before
    assert replay_report(document).same is True
    assert any("requests [1]" in note for note in caught.value.__notes__)
    bench.device.give_back_raw(ballast)
    bench.train(_requests([1]))


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


def _first(bench: _Bench) -> list[Any]:
    iterator = bench.rank.forward_micro_batches(_requests([20]))
    bench.iterator = iterator  # type: ignore[attr-defined]
    return [next(iterator)]


def _fail(_: torch.Tensor) -> None:
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
