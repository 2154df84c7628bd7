"""A full-step run passes only on readable figures; each bad one makes its own criterion INCOMPLETE or FAILED."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qualification.criteria.full_step import judge
from qualification.criteria.observation import Observation, Replay
from qualification.figures import Unreadable
from qualification.records import Criterion, Ground, Verdict
from qualification.verdict import fold
from tests.qualification.criteria.stamping import stamp

GOOD = Replay(True, 1000, 2000, 500, 0, 0, ("forward/0", "caller", "backward/0", "after"))


def _lines() -> list[str]:
    lines = [json.dumps({"event": "start"})]
    for step in range(18):
        figures = {"peak_allocated": 1001, "peak_reserved": 2000, "bound_allocated": 1010, "bound_reserved": 2000}
        lines.append(json.dumps({"event": "forecast", "step": step, **figures}))
        lines.append(json.dumps({"event": "observed", "step": step, "peak_allocated": 1000}))
        lines.append(json.dumps({"event": "loss", "step": step, "value": -0.25 * step}))
    return lines


def _checkpoint(folder: Path, steps: float = 3.0) -> dict[str, Path]:
    found = {}
    for slot in ("policy", "adversary"):
        path = folder / f"slot-{slot}.safetensors"
        save_file({"step/a": torch.tensor(steps), "exp_avg/a": torch.ones(3), "parameter/a": torch.zeros(3)}, path)
        found[f"checkpoint/slot-{slot}.safetensors"] = path
    return found


@pytest.fixture
def good(tmp_path: Path) -> Observation:
    return Observation(
        workload="full_step",
        ground=Ground.REHEARSAL,
        exit_code=0,
        timed_out=False,
        events=stamp(_lines(), tmp_path),
        artifacts=_checkpoint(tmp_path),
        replays={f"step-{step:04d}": GOOD for step in range(18)} | {"close": replace(GOOD, allocated_after=0)},
    )


def _criterion(observation: Observation, name: str) -> Criterion:
    (found,) = [each for each in judge(observation) if each.name == name]
    return found


def test_a_complete_run_passes(good: Observation) -> None:
    criteria = judge(good)
    assert {each.name: each.verdict for each in criteria if each.verdict is not Verdict.PASSED} == {}
    assert fold(criteria) is Verdict.PASSED
    assert _criterion(good, "allocated_worst_error").measured == "0.100"


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "null", '"12"', "true"])
def test_a_loss_that_is_no_number_is_incomplete_and_nothing_else_is_lost(
    good: Observation, value: str, tmp_path: Path
) -> None:
    lines = _lines()
    lines[3] = '{"event":"loss","step":0,"value":' + value + "}"
    observation = replace(good, events=stamp(lines, tmp_path))
    wrong = [each for each in judge(observation) if each.verdict is not Verdict.PASSED]
    assert [(each.name, each.verdict) for each in wrong] == [("finite_losses", Verdict.INCOMPLETE)]
    assert "the loss in event 3" in (wrong[0].reason or "")


@pytest.mark.parametrize(
    "line",
    [
        '{"event":"loss","step":0}',
        '{"event":"loss","step":0,"value":1,"value":2}',
    ],
)
def test_a_missing_or_doubled_loss_is_incomplete(good: Observation, line: str, tmp_path: Path) -> None:
    lines = _lines()
    lines[3] = line
    assert _criterion(replace(good, events=stamp(lines, tmp_path)), "finite_losses").verdict is Verdict.INCOMPLETE


@pytest.mark.parametrize("value", ["NaN", "1e999", "null", '"12"', "true", "1.5"])
def test_a_bound_that_is_no_number_is_incomplete(good: Observation, value: str, tmp_path: Path) -> None:
    lines = _lines()
    lines[4] = lines[4].replace('"bound_allocated": 1010', f'"bound_allocated": {value}')
    found = _criterion(replace(good, events=stamp(lines, tmp_path)), "allocated_above_bound")
    assert found.verdict is Verdict.INCOMPLETE
    assert "bound_allocated of step-0001" in (found.reason or "")


def test_a_forecast_that_comes_after_its_step_fails(good: Observation, tmp_path: Path) -> None:
    lines = _lines()
    lines[1], lines[2] = lines[2], lines[1]
    found = _criterion(replace(good, events=stamp(lines, tmp_path)), "steps_without_forecast_before")
    assert (found.verdict, found.measured) == (Verdict.FAILED, 1)


def test_work_that_was_not_recorded_does_not_count(good: Observation) -> None:
    idle = replace(GOOD, stages=("forward/0",))
    for replays in ({}, {name: idle for name in good.replays}, dict(list(good.replays.items())[1:])):
        found = _criterion(replace(good, replays=replays), "backwards")
        assert found.verdict is Verdict.INCOMPLETE
        assert fold(judge(replace(good, replays=replays))) is not Verdict.PASSED


def test_an_unreadable_recording_makes_what_rests_on_it_incomplete(good: Observation) -> None:
    broken = replace(good, replays={**good.replays, "step-0003": Unreadable("cannot be replayed: byte 7")})
    verdicts = {each.name: each.verdict for each in judge(broken)}
    assert verdicts["allocated_above_bound"] is Verdict.INCOMPLETE
    assert verdicts["out_of_memory_events"] is Verdict.INCOMPLETE
    assert verdicts["finite_losses"] is Verdict.PASSED


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("allocated_above_bound", {"peak_allocated": 1011}),
        ("reserved_above_bound", {"peak_reserved": 2001}),
        ("allocated_worst_error", {"peak_allocated": 900}),
        ("out_of_memory_events", {"out_of_memory": 1}),
        ("allocator_retries", {"segments_freed": 2}),
        ("recordings_not_exact", {"exact": False}),
    ],
)
def test_each_replayed_figure_can_fail(good: Observation, name: str, change: dict[str, int]) -> None:
    replays = {**good.replays, "step-0017": replace(GOOD, **change)}
    assert _criterion(replace(good, replays=replays), name).verdict is Verdict.FAILED


def test_what_is_left_after_close_fails_and_a_missing_close_is_incomplete(good: Observation) -> None:
    assert _criterion(replace(good, replays={**good.replays, "close": GOOD}), "allocated_after_close").measured == 500
    without = {name: found for name, found in good.replays.items() if name != "close"}
    assert _criterion(replace(good, replays=without), "allocated_after_close").verdict is Verdict.INCOMPLETE


def test_optimizer_steps_come_from_the_checkpoint(good: Observation, tmp_path: Path) -> None:
    two = replace(good, artifacts=_checkpoint(tmp_path, steps=2.0))
    assert _criterion(two, "optimizer_steps_policy").verdict is Verdict.INCOMPLETE
    unknown = replace(good, artifacts=_checkpoint(tmp_path, steps=float("nan")))
    assert _criterion(unknown, "optimizer_steps_policy").verdict is not Verdict.PASSED
    assert _criterion(replace(good, artifacts={}), "optimizer_steps_policy").verdict is Verdict.INCOMPLETE
    torn = _checkpoint(tmp_path)
    path = torn["checkpoint/slot-policy.safetensors"]
    path.write_bytes(path.read_bytes()[:20])
    assert _criterion(replace(good, artifacts=torn), "optimizer_steps_policy").verdict is Verdict.INCOMPLETE


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["exp_avg/a", "exp_avg_sq/a", "parameter/a"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_saved_tensor_that_is_not_finite_is_incomplete_by_name(
    good: Observation, tmp_path: Path, name: str, value: float, dtype: torch.dtype
) -> None:
    files = _checkpoint(tmp_path)
    path = files["checkpoint/slot-policy.safetensors"]
    tensors = {"step/a": torch.tensor(3.0), "exp_avg/a": torch.ones(3), "exp_avg_sq/a": torch.ones(3)}
    save_file({**tensors, name: torch.tensor([1.0, value, 2.0], dtype=dtype)}, path)
    found = _criterion(replace(good, artifacts=files), "optimizer_steps_policy")
    assert found.verdict is Verdict.INCOMPLETE
    assert f"{name} of checkpoint/slot-policy.safetensors holds {value}" in (found.reason or "")
    assert _criterion(replace(good, artifacts=files), "optimizer_steps_adversary").verdict is Verdict.PASSED


def test_moments_of_a_type_that_is_not_read_or_that_are_all_zero_are_incomplete(
    good: Observation, tmp_path: Path
) -> None:
    path = tmp_path / "slot-policy.safetensors"
    files = {**_checkpoint(tmp_path), "checkpoint/slot-policy.safetensors": path}
    for moment, said in (
        (torch.ones(3).to(torch.float8_e4m3fn), "F8_E4M3"),
        (-torch.zeros(3), "no moment other than zero"),
    ):
        save_file({"step/a": torch.tensor(3.0), "exp_avg/a": moment}, path)
        found = _criterion(replace(good, artifacts=files), "optimizer_steps_policy")
        assert (found.verdict, said in (found.reason or "")) == (Verdict.INCOMPLETE, True)


def test_a_bad_exit_fails(good: Observation) -> None:
    assert _criterion(replace(good, exit_code=1), "exit_code").verdict is Verdict.FAILED
    assert _criterion(replace(good, exit_code=None), "exit_code").verdict is Verdict.INCOMPLETE
    late = _criterion(replace(good, exit_code=-15, timed_out=True), "exit_code")
    assert (late.verdict, "ran out of time" in (late.reason or "")) == (Verdict.FAILED, True)


def test_no_events_and_no_files_pass_nothing_but_the_exit_code() -> None:
    empty = Observation("full_step", Ground.REHEARSAL, 0, False, ())
    assert {each.name for each in judge(empty) if each.verdict is Verdict.PASSED} == {"exit_code"}


def test_a_frozen_slot_must_have_no_optimizer_state(good: Observation, tmp_path: Path) -> None:
    frozen = replace(good, parameters={"frozen": 1})
    assert _criterion(frozen, "optimizer_tensors_adversary").verdict is Verdict.FAILED
    path = tmp_path / "slot-adversary.safetensors"
    save_file({"parameter/a": torch.zeros(3)}, path)
    assert _criterion(frozen, "optimizer_tensors_adversary").verdict is Verdict.PASSED
