"""Two whole ranks with virtual devices of their own train one model: they probe, plan, run and step as one."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import distributed

from tests.trainer_rank.models.ranked import as_ranks
from trainer_rank.admission.agree import Agreement
from trainer_rank.devices.cards import load_card
from trainer_rank.devices.virtual import VirtualDevice
from trainer_rank.errors import UnsupportedError
from trainer_rank.models.reference import TINY, build_reference
from trainer_rank.policies import load_policy
from trainer_rank.rank import TrainerRank
from trainer_rank.ranks import join
from trainer_rank.requests import Request

SLOTS = ("policy", "adversary")
LENGTHS = (64, 57, 130, 9)


def _requests() -> list[Request]:
    generator = torch.Generator().manual_seed(5)
    drawn = [torch.randint(TINY.vocabulary, (length + 1,), generator=generator) for length in LENGTHS]
    return [Request(each[:-1], each[1:], SLOTS[index % 2], group="all") for index, each in enumerate(drawn)]


def train(ranks: int, apart: bool = False) -> dict[str, Any]:
    """Make two updates; ``apart``: the second rank is given another adapter, and changes one of its own at the end."""
    group = distributed.group.WORLD
    assert group is not None
    events: list[Any] = []
    device = VirtualDevice(load_card("h200").among_peers(), group.rank())
    seed = 1 + (group.rank() if apart else 0)
    model = build_reference(TINY, device, slots=SLOTS, rank=2, seed=seed, group=group if ranks > 1 else None)
    agreement = Agreement(distributed.distributed_c10d._get_default_store(), distributed.new_group(backend="gloo"))
    rank = TrainerRank(model, load_policy("forecast"), on_event=events.append, agreement=agreement)
    found: dict[str, Any] = {"start": rank.replica_digests()}
    for _ in range(2):
        for micro_batch in rank.forward_micro_batches(_requests()):
            parts = [each.log_probabilities.mean() for each in micro_batch.outputs.values()]
            rank.backward(micro_batch, torch.stack(parts).mean())
        steps = rank.optim_step()
        found["norms"] = {slot: float(each.gradient_norm) for slot, each in steps.items()}
    found["end"] = rank.replica_digests()
    adapters = {slot: model.adapter_parameters(slot) for slot in SLOTS}
    found["adapters"] = {slot: {name: each.detach().cpu() for name, each in adapters[slot].items()} for slot in SLOTS}
    if apart and group.rank():
        with torch.no_grad():
            next(iter(adapters["policy"].values())).add_(1e-6)
    found["later"] = rank.replica_digests()
    found["steps"] = [each for each in events if each["event"] in ("forecast", "observed")]
    return found


def test_two_ranks_train_as_one() -> None:
    (alone,), ranks = as_ranks(train, 1, ranks=1), as_ranks(train, 2)
    for found in ranks:
        for slot in SLOTS:
            assert found["norms"][slot] == pytest.approx(alone["norms"][slot], rel=1e-4)
            for name, adapter in found["adapters"][slot].items():
                torch.testing.assert_close(adapter, alone["adapters"][slot][name], rtol=1e-3, atol=1e-5)
        for digests in (found["start"], found["end"]):
            assert {slot: len(set(each)) for slot, each in digests.items()} == dict.fromkeys(SLOTS, 1)
        assert found["start"] != found["end"]
        forecasts, observed = found["steps"][::2], found["steps"][1::2]
        assert [each["coverage"] for each in forecasts] == ["covered"] * 2
        for forecast, seen in zip(forecasts, observed, strict=True):
            assert 0.95 * forecast["peak_allocated"] <= seen["peak_allocated"] <= forecast["bound_allocated"]
    assert [each["plan_sha256"] for each in ranks[0]["steps"][::2]] == [
        each["plan_sha256"] for each in ranks[1]["steps"][::2]
    ]


def test_the_first_rank_s_adapters_count_and_a_rank_that_drifts_is_seen() -> None:
    for found in as_ranks(train, 2, True):
        assert {slot: len(set(each)) for slot, each in found["start"].items()} == dict.fromkeys(SLOTS, 1)
        assert {slot: len(set(each)) for slot, each in found["later"].items()} == {"policy": 2, "adversary": 1}


def fail(when: str, how: str) -> dict[str, Any]:
    """Let the second rank fail where it reaches the stage ``when``, in a probe or in training; say what each saw."""
    group = distributed.group.WORLD
    assert group is not None
    device = VirtualDevice(load_card("h200").among_peers(), group.rank())
    model = build_reference(TINY, device, slots=SLOTS, seed=1, group=group)
    agreement = Agreement(distributed.distributed_c10d._get_default_store(), distributed.new_group(backend="gloo"))
    rank = TrainerRank(model, load_policy("forecast"), agreement=agreement)
    mark, began = device.mark, []

    def strike(stage: str) -> None:
        if group.rank() == 1 and stage == when:
            began.append(time.monotonic())
            if len(began) > (0 if how == "probe" else 100):
                raise RuntimeError("no such kernel")
        mark(stage)

    device.mark = strike  # type: ignore[method-assign]
    try:
        _update(rank, began)
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error), "at": time.monotonic()}
    return {}


def _update(rank: TrainerRank, began: list[float]) -> None:
    for micro_batch in rank.forward_micro_batches(_requests()):
        began += [0.0] * 100  # the next one strikes
        parts = [each.log_probabilities.mean() for each in micro_batch.outputs.values()]
        rank.backward(micro_batch, torch.stack(parts).mean())
        rank.optim_step()


@pytest.mark.parametrize(("when", "how"), [("forward/layer/1", "probe"), ("backward/layer/1", "training")])
def test_a_rank_that_fails_amid_common_work_fails_its_peer_at_once_with_its_reason(when: str, how: str) -> None:
    peer, failed = as_ranks(fail, when, how)
    assert (failed["error"], failed["text"]) == ("RuntimeError", "no such kernel")
    assert peer["error"] == "PlanningError"
    assert "rank 1 failed in what all ranks do together: RuntimeError: no such kernel" in peer["text"]
    assert abs(peer["at"] - failed["at"]) < 1.0


def test_a_process_that_no_launcher_started_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UnsupportedError, match="2 ranks are needed and 1 was started; start them with torchrun"):
        join(2, "gloo")
