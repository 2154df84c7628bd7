"""TrainerRank on the virtual device with the reference model: real numbers, real memory pressure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_rank.devices.virtual import VirtualDevice
from trainer_rank.errors import AdmissionRefused, CheckpointError, InvalidInputError
from trainer_rank.models.reference import TINY, ReferenceModel, build_reference
from trainer_rank.policies import Policy, load_policy
from trainer_rank.rank import TrainerRank
from trainer_rank.reports.replay import replay_report
from trainer_rank.reports.spool import Spool
from trainer_rank.requests import Request

CONTEXT = 1_358_757_888  # what the h200 card's libraries hold from the first backward on


def _policy(**changes: Any) -> Policy:
    small = {
        "probe_lengths": ((4,), (40, 17), (150, 60, 31, 5), (64, 33, 2)),
        "reserve_bytes": 1 << 20,
        "collective_claim_bytes": 0,
        "ladder": ("whole", "split"),
    }
    return replace(load_policy("forecast"), **{**small, **changes})


class _Bench:
    """A rank with its device, model and events."""

    def __init__(
        self, index: int, room: int = 1 << 30, dropout: float = 0.0, spool: Path | None = None, **policy: Any
    ) -> None:
        self.events: list[dict[str, Any]] = []
        self.device = VirtualDevice("h200", index, capacity=CONTEXT + room)
        self.model: ReferenceModel = build_reference(
            TINY, self.device, slots=("policy", "adversary"), rank=2, dropout=dropout, seed=5
        )
        self.rank = TrainerRank(
            self.model, _policy(**policy), on_event=self.events.append, spool=None if spool is None else Spool(spool)
        )

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    def train(self, requests: list[Request]) -> list[torch.Tensor]:
        """Run every micro-batch forward and backward; returns the log-probabilities by request on the host."""
        found: dict[int, torch.Tensor] = {}
        for micro_batch in self.rank.forward_micro_batches(requests):
            self.rank.backward(micro_batch, _loss(micro_batch.outputs))
            found |= {index: each.log_probabilities.detach().cpu() for index, each in micro_batch.outputs.items()}
        return [found[index] for index in range(len(requests))]

    def gradients(self, slot: str = "policy") -> str:
        parameters = self.model.adapter_parameters(slot)
        content = [each.grad.cpu().numpy().tobytes() for each in parameters.values() if each.grad is not None]
        return hashlib.sha256(b"".join(content)).hexdigest()


def _loss(outputs: Any) -> torch.Tensor:
    return torch.stack([(1 + index) * each.log_probabilities.mean() for index, each in sorted(outputs.items())]).sum()


def _requests(lengths: list[int], group: str | None = "g", slots: tuple[str, ...] = ("policy",)) -> list[Request]:
    generator = torch.Generator().manual_seed(11)
    found = []
    for index, length in enumerate(lengths):
        tokens = torch.randint(0, TINY.vocabulary, (length + 1,), generator=generator)
        found.append(Request(tokens[:-1], tokens[1:], slots[index % len(slots)], group=group))
    return found


@pytest.fixture
def bench() -> Iterator[Callable[..., _Bench]]:
    made: list[_Bench] = []

    def make(*arguments: Any, **options: Any) -> _Bench:
        made.append(_Bench(len(made), *arguments, **options))
        return made[-1]

    yield make
    for each in made:
        each.rank.close()
        each.device.close()


def test_outputs_come_by_original_index_whatever_the_packing(bench: Callable[..., _Bench]) -> None:
    requests = _requests([30, 5, 61, 17], slots=("policy", "adversary"))
    together = bench().train(requests)
    alone = bench()
    for index, request in enumerate(requests):
        assert torch.allclose(alone.train([request])[0], together[index], atol=1e-5)
        assert together[index].shape == request.tokens.shape


def test_every_forecast_comes_before_its_step_and_bounds_it(bench: Callable[..., _Bench]) -> None:
    found = bench()
    for lengths in ([20, 60], [100, 31, 7], [150]):
        found.train(_requests(lengths, slots=("policy", "adversary")))
    kinds = [event["event"] for event in found.events if event["event"] not in ("probe", "headroom")]
    assert kinds == ["forecast", "observed"] * 3
    for forecast, observed in zip(found.of("forecast"), found.of("observed"), strict=True):
        assert observed["peak_allocated"] <= forecast["bound_allocated"]
        assert observed["peak_reserved"] <= forecast["bound_reserved"]
        assert observed["device_used"] <= forecast["bound_device_used"]
        assert abs(forecast["peak_allocated"] - observed["peak_allocated"]) < 0.01 * observed["peak_allocated"]
        assert forecast["coverage"] == "covered"
        assert {claim["name"] for claim in forecast["claims"]} == {
            "reserve",
            "first collective",
            "optimizer state",
        }


def test_probing_leaves_no_trace_in_weights_gradients_generators_or_optimizer(bench: Callable[..., _Bench]) -> None:
    found = bench(dropout=0.3)
    torch.manual_seed(99)
    random = torch.get_rng_state()
    weights = {name: value.detach().cpu() for name, value in found.model.adapter_parameters("policy").items()}
    iterator = found.rank.forward_micro_batches(_requests([9]))
    probed: list[torch.Tensor] = []
    found.rank._announcer._on_event = lambda event: probed.append(torch.get_rng_state())
    next(iterator)
    assert torch.equal(probed[0], random)
    for name, value in found.model.adapter_parameters("policy").items():
        assert torch.equal(value.detach().cpu(), weights[name])
        assert value.grad is not None
        assert not value.grad.any()
    assert all(each.grad is None for each in found.model.adapter_parameters("adversary").values())
    assert not found.rank._optimizers["policy"].exists


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_every_rung_equals_whole_bit_for_bit_and_leaves_the_same_random_state(
    bench: Callable[..., _Bench], dropout: float
) -> None:
    requests = _requests([30, 5, 61, 17], slots=("policy", "adversary"))
    seen = set()
    for ladder in (("whole",), ("host-held",), ("rerun",)):
        found = bench(dropout=dropout, ladder=ladder)
        torch.manual_seed(4)
        outputs = found.train(requests)
        assert found.of("forecast")[0]["rung"] == ladder[0]
        state = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
        values = hashlib.sha256(b"".join(each.numpy().tobytes() for each in outputs)).hexdigest()
        seen.add((found.gradients("policy"), found.gradients("adversary"), state, float(torch.rand(())), values))
    assert len(seen) == 1


def test_host_held_and_rerun_keep_no_graphs_on_the_device(bench: Callable[..., _Bench]) -> None:
    lengths = [40] * 5
    peaks = {}
    for ladder in (("whole",), ("split",), ("host-held",), ("rerun",)):
        found = bench(ladder=ladder, room=1 << 31)
        found.rank._sampler._near = found.rank._sampler._rungs = tuple(
            _Finest(rung) for rung in found.rank._sampler._rungs
        )
        found.train(_requests(lengths))
        peaks[ladder[0]] = found.of("observed")[0]["peak_allocated"]
        forecast = found.of("forecast")[0]
        assert abs(forecast["peak_allocated"] - peaks[ladder[0]]) < 0.01 * peaks[ladder[0]]
    assert max(peaks["rerun"], peaks["host-held"]) < peaks["split"] < peaks["whole"]


class _Finest:
    """The last plan of a rung alone."""

    def __init__(self, rung: Any) -> None:
        self.rung, self.name, self.retention = rung, rung.name, rung.retention

    def places(self, work: Any) -> range:
        return self.rung.places(work)[-1:]


WIDE = {"probe_lengths": ((8,), (300, 40), (300,) * 6, (200, 64, 9))}


def test_a_narrow_card_gives_narrower_micro_batches_without_retry(bench: Callable[..., _Bench]) -> None:
    requests, many = _requests([150] * 12, group=None), {"probe_lengths": ((8,), (300, 40), (150,) * 12, (200, 64, 9))}
    wide, narrow = bench(**many), bench(room=54 << 20, **many)
    assert len(narrow.train(requests)) == len(wide.train(requests)) == 12
    assert len(wide.of("forecast")) == 1
    assert 1 < len(narrow.of("forecast")) < 12
    assert narrow.device.allocator_retries() == 0
    assert narrow.device.out_of_memory_count() == 0


def test_a_refusal_names_shortfall_largest_term_and_two_remedies(bench: Callable[..., _Bench], tmp_path: Path) -> None:
    found = bench(room=50 << 20, spool=tmp_path, **WIDE)
    with pytest.raises(AdmissionRefused) as caught:
        found.train(_requests([300, 2000]))
    text = str(caught.value)
    for part in (
        "2 requests of 2300 tokens refused",
        "too few",
        "the largest term is",
        "free at least",
        "or give its first",
    ):
        assert part in text
    assert found.of("forecast") == []
    (report,) = found.of("report")
    document = json.loads((tmp_path / f"{report['id']}.report.json").read_bytes())
    replayed = replay_report(document)
    assert (document["kind"], replayed.same, replayed.missing) == ("refusal", True, ())
    assert "or give its first 1 requests (300 tokens) alone" in text
    found.train(_requests([300]))


def test_previous_outputs_are_released_before_the_next_admission_unless_held(bench: Callable[..., _Bench]) -> None:
    found = bench(room=54 << 20, **WIDE)
    requests = _requests([300] * 6, group=None)
    iterator = found.rank.forward_micro_batches(requests)
    first = next(iterator)
    first.hold()
    second = next(iterator)
    assert len(first.outputs) >= 1
    next(iterator)
    with pytest.raises(InvalidInputError, match="outputs of micro-batch 1 were released"):
        _ = second.outputs
    first.release()


def test_a_frozen_slot_has_no_gradients_and_no_optimizer_state(bench: Callable[..., _Bench]) -> None:
    found = bench()
    frozen = replace(_requests([30])[0], slot="adversary", gradients=False)
    found.train([_requests([20])[0], frozen])
    reports = found.rank.optim_step()
    assert list(reports) == ["policy"]
    assert reports["policy"].step == 1
    assert not found.rank._optimizers["adversary"].exists
    assert all(each.grad is None for each in found.model.adapter_parameters("adversary").values())


def test_only_frozen_requests_run_and_cannot_be_propagated(bench: Callable[..., _Bench]) -> None:
    found = bench()
    frozen = replace(_requests([30])[0], gradients=False)
    (micro_batch,) = list(found.rank.forward_micro_batches([frozen]))
    assert micro_batch.choice.decision.rung == "whole"
    with pytest.raises(InvalidInputError, match="and no gradient"):
        found.rank.backward(micro_batch, torch.zeros(()))


def test_a_checkpoint_continues_as_if_nothing_had_happened(bench: Callable[..., _Bench], tmp_path: Path) -> None:
    straight, stopped, resumed = bench(dropout=0.1), bench(dropout=0.1), bench(dropout=0.1)
    first, second = _requests([30, 12], slots=("policy", "adversary")), _requests([25, 40, 8])
    torch.manual_seed(1)
    for batch in (first, second):
        straight.train(batch)
        straight.rank.optim_step()
    torch.manual_seed(1)
    stopped.train(first)
    with pytest.raises(CheckpointError, match="gradients that were not stepped"):
        stopped.rank.save_checkpoint(tmp_path / "early")
    stopped.rank.optim_step()
    stopped.rank.save_checkpoint(tmp_path / "one")
    torch.manual_seed(77)
    resumed.rank.load_checkpoint(tmp_path / "one")
    resumed.train(second)
    resumed.rank.optim_step()
    for slot in ("policy", "adversary"):
        expected, got = (each.rank._optimizers[slot] for each in (straight, resumed))
        assert expected.steps == got.steps
        for name, value in expected.state().items():
            assert torch.equal(value, got.state()[name]), name


def test_a_checkpoint_of_other_slots_changes_nothing(bench: Callable[..., _Bench], tmp_path: Path) -> None:
    found = bench()
    found.rank.save_checkpoint(tmp_path / "one")
    manifest = json.loads((tmp_path / "one" / "manifest.json").read_text())
    manifest["metadata"]["slots"] = {"critic": 0}
    (tmp_path / "one" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="other slots than policy, adversary"):
        found.rank.load_checkpoint(tmp_path / "one")


def test_close_leaves_nothing_and_is_final(bench: Callable[..., _Bench]) -> None:
    found = bench()
    found.train(_requests([30]))
    found.rank.optim_step()
    assert found.rank.close() == {
        "allocated": 0, "reserved": 0, "micro_batches": 1, "backwards": 1, "observer_failures": 0
    }  # fmt: skip
    with pytest.raises(InvalidInputError, match="closed"):
        found.train(_requests([3]))


def test_a_failing_observer_changes_nothing(bench: Callable[..., _Bench]) -> None:
    quiet, loud = bench(), bench()

    def fail(event: object) -> None:
        raise RuntimeError("observer")

    loud.rank._announcer._on_event = fail
    requests = _requests([20, 9])
    assert all(torch.equal(*pair) for pair in zip(quiet.train(requests), loud.train(requests), strict=True))
    assert quiet.gradients() == loud.gradients()
    assert loud.rank.close()["observer_failures"] > 0


def test_passes_that_keep_graphs_elsewhere_are_probed_only_when_needed(bench: Callable[..., _Bench]) -> None:
    ladder = ("whole", "split", "host-held", "rerun")
    roomy, tight = bench(ladder=ladder, **WIDE), bench(ladder=ladder, room=30 << 20, **WIDE)
    requests = _requests([300] * 12)
    roomy.train(requests)
    assert {event["retention"] for event in roomy.of("probe")} == {"device"}
    outputs = tight.train(requests)
    assert len(outputs) == 12
    assert tight.of("forecast")[0]["rung"] in ("host-held", "rerun")
    assert [event["retention"] for event in tight.of("probe")] == ["device", "host", "rerun"]
    assert len(tight.of("probe")[1]["lengths"]) == 3, "the widest probe would not have fitted"
    assert tight.device.out_of_memory_count() == 0
