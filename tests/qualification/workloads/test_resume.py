"""A continuation is judged from the files of two processes: what repeats, forgets or adds work fails by name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qualification.criteria import resume as criteria
from qualification.criteria.observation import Observation
from qualification.execution.worker import Context, Job
from qualification.records import Criterion, Ground, Verdict
from qualification.verdict import fold
from qualification.workloads import resume
from qualification.workloads.recompute import replays
from tests.qualification.criteria.stamping import stamp
from trainer_rank import contract
from trainer_rank.errors import UnsupportedError

ROOT = Path(__file__).parents[3]
SMALL: dict[str, int | str] = {"requests": 2, "shortest": 8, "longest": 16}


class _Contract:
    """The contract as a module, whose subjects are remembered."""

    def __init__(self, made: list[contract.Subject]) -> None:
        self._made = made

    def __getattr__(self, name: str) -> Any:
        return getattr(contract, name)

    def construct(self, **named: Any) -> contract.Subject:
        self._made.append(contract.construct(**named))
        return self._made[-1]


def perform(folder: Path, process: str, earlier: Path | None = None) -> Observation:
    """Run one process's part here and return what trusted code would see of it; a failure is an exit code of 1."""
    output = folder / process
    output.mkdir(parents=True)
    lines = os.open(folder / f"{process}.jsonl", os.O_RDWR | os.O_CREAT)
    job = Job(
        run="run-of-a-test",
        attempt=1,
        workload="resume",
        ground=Ground.REHEARSAL,
        policy="none",
        subject=str(ROOT),
        output=str(output),
        parameters=SMALL,
        process=process,
        earlier=None if earlier is None else str(earlier),
    )
    made: list[contract.Subject] = []
    context = Context(job, _Contract(made), output, lines)
    code = 0
    try:
        resume.run(context)
    except Exception as error:
        context.emit("failure", type=type(error).__name__, text=str(error))
        code = 1
    finally:
        os.close(lines)
        for subject in made:  # what the end of a process does
            subject.device.close()  # type: ignore[attr-defined]
    files = {str(path.relative_to(output)): path for path in output.rglob("*") if path.is_file()}
    return Observation(
        workload="resume",
        ground=Ground.REHEARSAL,
        exit_code=code,
        timed_out=False,
        events=stamp((folder / f"{process}.jsonl").read_text().splitlines(), folder),
        artifacts=files,
        replays=replays(files),
        parameters=SMALL,
    )


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Observation]:
    folder = tmp_path_factory.mktemp("published")
    observation = perform(folder, "publish")
    assert observation.exit_code == 0
    return folder / "publish", observation


@pytest.fixture(scope="module")
def continued(published: tuple[Path, Observation], tmp_path_factory: pytest.TempPathFactory) -> Observation:
    return perform(tmp_path_factory.mktemp("continued"), "continue", published[0])


def judged(first: Observation, second: Observation) -> dict[str, Criterion]:
    return {one.name: one for one in criteria.judge(replace(second, earlier=first))}


def failures(found: dict[str, Criterion]) -> dict[str, str | None]:
    return {name: one.reason for name, one in found.items() if one.verdict is not Verdict.PASSED}


def test_a_continuation_by_one_update_passes(published: tuple[Path, Observation], continued: Observation) -> None:
    found = judged(published[1], continued)
    assert failures(found) == {}
    assert fold(found.values()) is Verdict.PASSED
    assert found["optimizer_steps_generator"].measured == 3
    assert found["damaged_groups_refused"].measured == 3
    assert int(str(found["tensors_compared"].measured)) > 2 * 5 * 12


@pytest.mark.parametrize(
    ("damage", "words"), [("missing", "cannot be read"), ("torn", "differs from its manifest"), ("altered", "differs")]
)
def test_a_damaged_group_fails_by_name_and_the_one_before_stays_loadable(
    published: tuple[Path, Observation], tmp_path: Path, damage: str, words: str
) -> None:
    newer = tmp_path / "newer"
    shutil.copytree(published[0], newer)
    file = newer / "v1" / "slot-generator.safetensors"
    left = resume.DAMAGES[damage](file.read_bytes())
    file.unlink()
    if left is not None:
        file.write_bytes(left)
    second = perform(tmp_path, "continue", newer)
    found = judged(published[1], second)
    assert found["exit_code"].verdict is Verdict.FAILED
    assert fold(found.values()) is Verdict.FAILED
    (said,) = [event.text("text") for event in second.of("failure")]
    assert said is not None and "slot-generator.safetensors" in said and words in said
    with _subject() as subject:
        state = contract.load(subject, published[0] / "v1")
    assert int(state["batches"]) == 4


@contextmanager
def _subject() -> Iterator[contract.Subject]:
    subject = contract.construct(ground="rehearsal", policy="none", seed=593015, slots=resume.SLOTS)
    yield subject
    contract.close(subject)
    subject.device.close()  # type: ignore[attr-defined]


def test_what_was_altered_after_it_was_hashed_is_no_state_to_continue_from(
    published: tuple[Path, Observation], tmp_path: Path
) -> None:
    """The continuing process gets a whole, consistent group, but not the one that was published."""
    other = tmp_path / "other"
    with _subject() as subject:
        contract.load(subject, published[0] / "v1")
        contract.save(subject, other / "v1", {"generator": torch.Generator().get_state(), "batches": torch.tensor(4)})
    found = judged(published[1], perform(tmp_path, "continue", other))
    assert found["tensors_that_differ"].verdict is Verdict.FAILED
    assert "generator of custom.safetensors differs" in str(found["tensors_that_differ"].reason)


def test_a_second_update_fails(
    published: tuple[Path, Observation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = resume.train

    def twice(*given: Any) -> None:
        once(*given)
        once(*given)

    monkeypatch.setattr(resume, "train", twice)
    found = failures(judged(published[1], perform(tmp_path, "continue", published[0])))
    assert {"optimizer_steps_generator", "optimizer_steps_auxiliary", "backwards", "batches_drawn"} == found.keys()


def _starting_over(original: Callable[..., Any]) -> Callable[..., Any]:
    def load(subject: contract.Subject, path: Path) -> Any:
        if path.name != "v1":
            return original(subject, path)
        return {"generator": torch.Generator().manual_seed(593015).get_state(), "batches": torch.tensor(0)}

    return load


def test_a_process_that_does_the_earlier_work_again_fails(
    published: tuple[Path, Observation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes nothing over, trains from the start, and reaches the same step count in the end."""
    monkeypatch.setattr(contract, "load", _starting_over(contract.load))
    once = resume.train

    def thrice(context: Context, subject: Any, data: resume.Data, update: int) -> None:
        for number in range(update + 1):
            once(context, subject, data, number)

    monkeypatch.setattr(resume, "train", thrice)
    found = failures(judged(published[1], perform(tmp_path, "continue", published[0])))
    assert {"tensors_that_differ", "backwards", "batches_drawn", "batches_repeated"} == found.keys()


def test_a_group_that_lost_optimizer_state_or_its_manifest_is_not_whole(
    published: tuple[Path, Observation], continued: Observation
) -> None:
    first, second = published[1], continued
    bare = {
        name: path
        for name, path in first.artifacts.items()
        if name not in ("v1/custom.safetensors", "v1/manifest.json")
    }
    found = judged(replace(first, artifacts=bare), second)
    assert found["published_files_wrong"].verdict is Verdict.INCOMPLETE
    assert "the group has no custom state" in str(found["published_state_missing"].reason)
    swapped = dict(first.artifacts) | {"v1/slot-auxiliary.safetensors": first.artifacts["v1/random.safetensors"]}
    found = judged(replace(first, artifacts=swapped), second)
    assert "slot-auxiliary.safetensors is not what the manifest lists" in str(found["published_files_wrong"].reason)
    assert found["published_steps_auxiliary"].verdict is Verdict.INCOMPLETE


def test_a_host_that_lacks_what_was_asked_for_says_nothing_about_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def construct(**_: Any) -> contract.Subject:
        raise UnsupportedError("the Megatron model needs megatron.core, which cannot be imported")

    monkeypatch.setattr(contract, "construct", construct)
    (failure,) = perform(tmp_path, "publish").of("failure")
    assert failure.text("type") == "ConfigurationError"
    assert failure.text("text") == "the Megatron model needs megatron.core, which cannot be imported"


def test_a_publisher_that_failed_has_no_continuation(published: tuple[Path, Observation]) -> None:
    found = criteria.judge(replace(published[1], exit_code=1))
    assert {one.name: one.verdict for one in found} == {
        "publisher_exit_code": Verdict.FAILED,
        "continuations": Verdict.FAILED,
    }
