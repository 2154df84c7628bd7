"""What the release workloads do on a real card, in order, with a modelled card where the driver would be."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest

from qualification.criteria.observation import Observation
from qualification.errors import ConfigurationError
from qualification.execution.worker import Context, Job
from qualification.records import Criterion, Ground, Verdict
from qualification.workloads import library_demand
from qualification.workloads.recompute import replays
from tests.bench.modelled import Driver
from tests.qualification.criteria.stamping import stamp
from tests.qualification.workloads.modelled_card import Card, on_modelled_card
from tests.qualification.workloads.test_releases import SMALLER


@pytest.fixture
def native(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Criterion]]]:
    monkeypatch.setattr(library_demand, "DriverMemory", lambda: Driver(Card.device))
    card = on_modelled_card(capacity=None, demands=())
    events, output = tmp_path / "events", tmp_path / "out"
    output.mkdir()

    def qualify(workload: str, policy: str, **parameters: int) -> list[Criterion]:
        job = Job(
            run="run-of-a-test", attempt=1, workload=workload, ground=Ground.NATIVE, policy=policy, subject=".",
            output=str(output), parameters=parameters,
        )  # fmt: skip
        descriptor = os.open(events, os.O_WRONLY | os.O_CREAT)
        context, failed = Context(job, card, output, descriptor), False
        try:
            import_module(f"qualification.workloads.{workload}").run(context)
            context.emit("end")
        except RuntimeError as error:
            failed = True
            context.emit("failure", type=type(error).__name__, text=str(error))
        finally:
            os.close(descriptor)
        files = {str(path.relative_to(output)): path for path in output.rglob("*") if path.is_file()}
        found = Observation(
            workload, Ground.NATIVE, int(failed), False, stamp(events.read_text().splitlines(), tmp_path), files,
            replays(files),
        )  # fmt: skip
        criteria: list[Criterion] = import_module(f"qualification.criteria.{workload}").judge(found)
        return criteria

    yield qualify
    Card.device.close()


def unmet(criteria: list[Criterion]) -> dict[str, str | None]:
    return {each.name: each.reason for each in criteria if each.verdict is not Verdict.PASSED}


@pytest.mark.parametrize("policy", ["unconditional", "budgeted", "forecast"])
def test_a_narrowed_card_passes_with_releases(native: Callable[..., list[Criterion]], policy: str) -> None:
    assert unmet(native("pressure", policy, **SMALLER)) == {}


def test_without_releases_the_handle_finds_no_memory(native: Callable[..., list[Criterion]]) -> None:
    found = unmet(native("pressure", "none", **SMALLER))
    assert "CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`" in (found["library_failures"] or "")


def test_arms_on_one_card_match_until_the_release(native: Callable[..., list[Criterion]]) -> None:
    assert unmet(native("release_vs_observe", "forecast", **SMALLER)) == {}


def test_a_card_without_room_for_the_ballast_is_refused(native: Callable[..., list[Criterion]]) -> None:
    with pytest.raises(ConfigurationError, match=r"virtual:0 has \d+ of \d+ B free; it cannot be narrowed to"):
        native("pressure", "none", capacity=150_109_880_320)
