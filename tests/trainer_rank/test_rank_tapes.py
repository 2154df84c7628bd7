"""What one process recorded serves the next: no probing, the same forecasts; anything else is refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_rank.devices.cards import load_card
from trainer_rank.devices.virtual import VirtualDevice
from trainer_rank.devices.virtual_memory import LibraryDemand
from trainer_rank.errors import InvalidInputError, TapeError
from trainer_rank.models.reference import TINY, build_reference
from trainer_rank.policies import Policy, load_policy
from trainer_rank.rank import TrainerRank
from trainer_rank.requests import Request
from trainer_rank.tapes.storage import document, load_tape, save_tape

LENGTHS = ((4,), (40, 17), (150, 60, 31, 5), (64, 33, 2))
DEMAND = LibraryDemand("delta net kernels", "first_backward", 40_000_000)


def policy() -> Policy:
    return replace(load_policy("forecast"), probe_lengths=LENGTHS, ladder=("whole", "split", "rerun"))


class Bench:
    def __init__(self, tapes: Path | None = None, **options: Any) -> None:
        self.device = VirtualDevice(options.pop("card", "h200"), demands=[DEMAND])
        self.events: list[dict[str, Any]] = []
        geometry = options.pop("geometry", TINY)
        self.model = build_reference(geometry, self.device, seed=5, **options)
        try:
            self.rank = TrainerRank(
                self.model, policy(), on_event=lambda event: self.events.append(dict(event)), tapes=tapes
            )
        except TapeError:
            self.device.close()
            raise

    def step(self, length: int = 61) -> None:
        generator = torch.Generator().manual_seed(length)
        tokens = torch.randint(0, TINY.vocabulary, (length + 1,), generator=generator)
        for micro_batch in self.rank.forward_micro_batches([Request(tokens[:-1], tokens[1:], "policy")]):
            self.rank.backward(micro_batch, -micro_batch.outputs[0].log_probabilities.mean())

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    def claims(self) -> dict[str, int | None]:
        return {claim.name: claim.size for claim in self.rank._headroom.claims()}


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def close() -> None:
        while made:
            made[-1].rank.close()
            made.pop().device.close()

    def make(*arguments: Any, **options: Any) -> Bench:
        close()
        made.append(Bench(*arguments, **options))
        return made[-1]

    yield make
    close()


def main(mode: str, folder: str) -> None:
    """Run in a process of its own: step, and with ``save`` keep the tapes."""
    torch.set_num_threads(1)
    found = Bench(None if mode == "save" else Path(folder))
    claims = found.claims()
    found.step(61)
    found.step(120)
    if mode == "save":
        found.rank.save_tapes(folder)
    terms = ("peak_allocated", "peak_reserved", "bound_reserved", "required", "rung", "terms", "coverage", "cost_ns")
    forecasts = [{term: event[term] for term in terms} for event in found.of("forecast")]
    sys.stdout.write(json.dumps({"forecasts": forecasts, "probes": len(found.of("probe")), "claims": claims}))


def run(mode: str, folder: Path) -> dict[str, Any]:
    program = f"from tests.trainer_rank.test_rank_tapes import main; main({mode!r}, {str(folder)!r})"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_next_process_decides_without_probing_and_alike(tmp_path: Path) -> None:
    first, second = run("save", tmp_path), run("load", tmp_path)
    assert (first["probes"], second["probes"]) == (1, 0)
    assert second["forecasts"] == first["forecasts"]
    assert {each["coverage"] for each in second["forecasts"]} == {"covered"}
    assert second["claims"]["libraries of backward"] == first["claims"]["libraries of backward"] + DEMAND.size


def test_the_first_step_from_tapes_is_safe_where_libraries_take_more_than_the_card_says(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    found = bench()
    found.step()
    found.rank.save_tapes(tmp_path)
    card = load_card("h200")
    narrow = replace(card, capacity=card.held_outside("first_backward") + DEMAND.size + 96_000_000)
    following = bench(tmp_path, card=narrow)
    size = (following.device.memory_info().free - (1 << 20)) & -(2 << 20)
    torch.empty(size, dtype=torch.uint8, device=following.device.torch_device)
    following.step()
    assert following.device.library_bytes()[DEMAND.name] == DEMAND.size
    covered = [event for event in following.of("headroom") if event["before"] == "backward"]
    claims = {claim["name"]: claim for event in covered for claim in event["claims"]}
    assert claims["libraries of backward"]["status"] == "measured"
    assert claims["libraries of backward"]["source"].startswith("tape train-device-")
    assert not following.of("probe")


@pytest.fixture
def saved(bench: Callable[..., Bench], tmp_path: Path) -> Path:
    found = bench()
    found.step()
    (file,) = found.rank.save_tapes(tmp_path / "tapes")
    assert file.parent == tmp_path / "tapes"
    return file.parent


def test_tapes_of_anything_else_are_refused_by_name(bench: Callable[..., Bench], saved: Path) -> None:
    assert not bench(saved).of("probe")
    altered: dict[str, dict[str, Any]] = {
        "recorded for card h200, not h200-incident": {"card": "h200-incident"},
        "recorded for geometry name reference-tiny, layers 2, .* not name reference-tiny, layers 3": {
            "geometry": replace(TINY, layers=3)
        },
        "recorded for kernels model reference, precision float32, dropout 0.0,.* not .*dropout 0.1": {"dropout": 0.1},
        "recorded for adapters torch.float32, not torch.bfloat16": {"dtype": torch.bfloat16},
    }
    for message, options in altered.items():
        with pytest.raises(TapeError, match=message):
            bench(saved, **options)


def test_settings_of_pytorch_are_part_of_what_was_recorded(
    bench: Callable[..., Bench], saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with pytest.raises(TapeError, match=r"recorded for kernels .*cublas_workspace default, not .*:4096:8"):
        bench(saved)


def test_other_adapters_are_another_kind_of_pass_and_probed(bench: Callable[..., Bench], saved: Path) -> None:
    found = bench(saved, rank=4)
    found.step()
    assert len(found.of("probe")) == 1
    assert len(found.rank.save_tapes(saved)) == 2


def test_one_file_serves_and_a_folder_without_a_rank_s_tapes_does_not(
    bench: Callable[..., Bench], saved: Path, tmp_path: Path
) -> None:
    (file,) = saved.iterdir()
    found = bench(file)
    found.step()
    assert not found.of("probe")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TapeError, match="holds no tape"):
        bench(tmp_path / "empty")
    (saved / "copy.tape.json.gz").write_bytes(file.read_bytes())
    with pytest.raises(TapeError, match="of the same kind of pass"):
        bench(saved)
    tape = load_tape(file)
    save_tape(replace(tape, kind=None), tmp_path / "fitted.tape.json.gz")
    with pytest.raises(TapeError, match="names no kind of pass"):
        bench(tmp_path / "fitted.tape.json.gz")


def test_nothing_recorded_is_nothing_to_save(bench: Callable[..., Bench], tmp_path: Path) -> None:
    with pytest.raises(TapeError, match="nothing was recorded yet"):
        bench().rank.save_tapes(tmp_path)
    (tmp_path / "file").write_text("")
    found = bench()
    found.step()
    with pytest.raises(TapeError, match="is no folder"):
        found.rank.save_tapes(tmp_path / "file")
    found.rank.close()
    with pytest.raises(InvalidInputError, match="closed"):
        found.rank.save_tapes(tmp_path)


def test_a_tape_of_a_rank_comes_back_as_it_was_and_a_broken_one_does_not(saved: Path, tmp_path: Path) -> None:
    (file,) = saved.iterdir()
    tape = load_tape(file)
    save_tape(tape, tmp_path / "again.tape.json")
    assert load_tape(tmp_path / "again.tape.json") == tape
    content = document(tape)
    assert (content["version"], document(replace(tape, kind=None, claims=()))["version"]) == (2, 1)
    for change in ({"kind": content["kind"] | {"token_ns": -1}}, {"claims": [["backward", -1, "measured", "here"]]}):
        (tmp_path / "broken.tape.json").write_text(json.dumps(content | change))
        with pytest.raises(TapeError, match="not a tape"):
            load_tape(tmp_path / "broken.tape.json")
