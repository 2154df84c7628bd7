"""The ballast workload on a real card, with a virtual one where the driver would be: one device serves every level."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from qualification.criteria import ballast as criteria
from qualification.criteria.observation import Observation
from qualification.errors import ConfigurationError
from qualification.execution.worker import Context, Job
from qualification.records import Ground, Verdict
from qualification.workloads import ballast
from qualification.workloads.recompute import replays
from tests.bench.modelled import Driver
from tests.qualification.criteria.stamping import stamp
from tests.qualification.workloads.modelled_card import Card, on_modelled_card
from trainer_rank import contract


def _run(folder: Path, capacity: int | None = None) -> Observation:
    card = on_modelled_card(capacity=capacity)
    made = card.construct

    def construct(**options: Any) -> contract.Subject:
        assert options["index"] == 0, "one device serves every level"
        subject: contract.Subject = made(**options)
        return subject

    card.construct = construct
    output, events = folder / "out", folder / "events"
    output.mkdir()
    job = Job(
        run="run-of-a-test", attempt=1, workload="ballast", ground=Ground.NATIVE, policy="forecast", subject=".",
        output=str(output), parameters={"levels": 2, "scale": 64, "most_free": 300_000_000},
    )  # fmt: skip
    descriptor = os.open(events, os.O_WRONLY | os.O_CREAT)
    try:
        ballast.run(Context(job, card, output, descriptor))
    finally:
        os.close(descriptor)
    files = {str(path.relative_to(output)): path for path in output.rglob("*") if path.is_file()}
    lines = stamp(events.read_text().splitlines(), folder)
    return Observation("ballast", Ground.NATIVE, 0, False, lines, files, replays(files))


def test_a_real_card_is_narrowed_by_driver_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ballast, "DriverMemory", lambda: Driver(Card.device))
    observation = _run(tmp_path)
    found = criteria.judge(observation)
    assert {each.name: each.reason for each in found if each.verdict is not Verdict.PASSED} == {}
    assert [event.whole("free") for event in observation.of("ballast")] == [
        ballast.AVAILABLE, 300_000_000, 40_000_000
    ]  # fmt: skip


def test_a_card_too_small_for_the_ballast_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ballast, "DriverMemory", lambda: Driver(Card.device))
    with pytest.raises(ConfigurationError, match=r"virtual:0 has \d+ B free and 68451041280 B are to be held"):
        _run(tmp_path, capacity=40_000_000_000)
    Card.device.close()
