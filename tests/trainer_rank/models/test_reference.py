"""The reference model computes what it says, equally on every device, and cleans up after itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name that everyone uses

from tests.trainer_rank.models.batches import HOST, gradients, packed
from trainer_rank.devices.virtual import VirtualDevice
from trainer_rank.errors import InvalidInputError
from trainer_rank.models import head
from trainer_rank.models.reference import TINY, ReferenceModel, build_reference, model
from trainer_rank.models.reference.experts import mixture

LENGTHS = [30, 1, 17, 64]


@pytest.fixture
def virtual() -> Iterator[VirtualDevice]:
    device = VirtualDevice("h200")
    yield device
    device.close()


def train(reference: ReferenceModel, steps: int = 2, slot: str = "policy") -> list[float]:
    """Losses of a few steps."""
    optimizer = torch.optim.AdamW(reference.adapter_parameters(slot).values(), lr=1e-2, foreach=False)
    batch = packed(LENGTHS, reference.geometry, reference.device.torch_device)
    losses = []
    for _ in range(steps):
        loss = -reference.forward(batch, slot=slot, gradients=True).log_probabilities.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def log_probabilities(reference: ReferenceModel, lengths: list[int], seed: int = 1) -> torch.Tensor:
    batch = packed(lengths, reference.geometry, reference.device.torch_device, seed)
    return reference.forward(batch, slot="policy", gradients=False).log_probabilities


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_training_on_a_virtual_device_equals_the_host_bit_for_bit(dropout: float, virtual: VirtualDevice) -> None:
    losses = []
    for device in (HOST, virtual):
        torch.manual_seed(11)
        losses.append(train(build_reference(TINY, device, rank=4, dropout=dropout, seed=3)))
    assert losses[0] == losses[1]
    assert losses[0][1] < losses[0][0]


def test_equal_seeds_give_equal_models_and_other_seeds_others() -> None:
    first, again, other = (log_probabilities(build_reference(TINY, HOST, seed=seed), LENGTHS) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_sequences_do_not_see_each_other() -> None:
    reference = build_reference(TINY, HOST, rank=4)
    batch = packed(LENGTHS, TINY, torch.device("cpu"))
    together = reference.forward(batch, slot="policy", gradients=False).log_probabilities.split(LENGTHS)
    for index, length in enumerate(LENGTHS):
        start = sum(LENGTHS[:index])
        alone = replace(
            batch,
            tokens=batch.tokens[start : start + length],
            targets=batch.targets[start : start + length],
            lengths=(length,),
            boundaries=torch.tensor([0, length], dtype=torch.int32),
        )
        expected = reference.forward(alone, slot="policy", gradients=False).log_probabilities
        torch.testing.assert_close(together[index], expected, rtol=0, atol=1e-5)


def test_no_output_depends_on_a_later_token() -> None:
    reference = build_reference(TINY, HOST)
    batch = packed([40], TINY, torch.device("cpu"))
    before = reference.forward(batch, slot="policy", gradients=False).log_probabilities
    batch.tokens[25] += 1
    after = reference.forward(batch, slot="policy", gradients=False).log_probabilities
    torch.testing.assert_close(before[:25], after[:25], rtol=0, atol=1e-6)
    assert not torch.equal(before[25:], after[25:])


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 200])
def test_chunked_log_probabilities_equal_those_of_all_logits(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK_ROWS", 64)
    hidden = torch.randn(rows, 16, requires_grad=True)
    weight, targets = torch.randn(50, 16), torch.randint(50, (rows,))
    weights = torch.randn(rows)
    ours = head.target_log_probabilities(hidden, weight, targets, lambda _: None)
    (ours * weights).sum().backward()
    ours_gradient, hidden.grad = hidden.grad, None
    expected = -F.cross_entropy(hidden @ weight.t(), targets, reduction="none")
    (expected * weights).sum().backward()
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours_gradient, hidden.grad, rtol=1e-4, atol=1e-5)


def test_the_logits_of_all_rows_never_exist_at_once(virtual: VirtualDevice) -> None:
    geometry = replace(TINY, vocabulary=4096)
    reference = build_reference(geometry, virtual)
    before = virtual.allocated()
    virtual.reset_peaks()
    log_probabilities(reference, [3000])
    assert virtual.peak_allocated() - before < 3000 * 4096 * 4 / 2


def test_grouped_experts_equal_a_loop_over_them() -> None:
    reference = build_reference(TINY, HOST, rank=4)
    adapters, weights = reference._adapters["policy"], reference._layers[0]
    hidden = torch.randn(50, TINY.hidden)

    def adapted(name: str, expert: int) -> torch.Tensor:
        down, up = (side[f"layers.0.{name}"][expert] for side in (adapters.down, adapters.up))
        return weights[name][expert] + down.mT @ up * adapters.settings.scale

    shares, chosen = F.softmax(hidden @ weights["router"].t(), -1).topk(TINY.experts_per_token)
    expected = torch.zeros_like(hidden)
    for row in range(50):
        for share, expert in zip(shares[row] / shares[row].sum(), chosen[row].tolist(), strict=True):
            gate, value = (hidden[row] @ adapted("experts_in", expert)).chunk(2)
            expected[row] += share * (F.silu(gate) * value @ adapted("experts_out", expert))
    ours = mixture(hidden, weights, adapters, "layers.0", TINY.experts_per_token)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)


def test_no_work_is_added_by_more_experts_even_where_most_stay_empty(virtual: VirtualDevice) -> None:
    counts = []
    for experts in (8, 256):
        reference = build_reference(replace(TINY, experts=experts), virtual, rank=4)
        train(reference, 1)
        with virtual.record() as recording:
            loss = reference.forward(packed([3], TINY, virtual.torch_device), slot="policy", gradients=True)
            loss.log_probabilities.sum().backward()
        counts.append(sum(event.action == "alloc" for event in recording.trace().events))
        reference.close()
        del reference, loss
    assert counts[0] == counts[1]


def test_recompute_draws_the_same_random_numbers_as_the_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for recompute in (True, False):
        reference = build_reference(TINY, HOST, rank=4, dropout=0.3)
        if not recompute:
            monkeypatch.setattr(model, "checkpoint", lambda run, states, **_: run(states))
        torch.manual_seed(7)
        batch = packed(LENGTHS, TINY, torch.device("cpu"))
        reference.forward(batch, slot="policy", gradients=True).log_probabilities.sum().backward()
        found.append((gradients(reference), torch.get_rng_state()))
    for name, gradient in found[0][0].items():
        assert torch.equal(gradient, found[1][0][name]), name
    assert torch.equal(found[0][1], found[1][1])


def test_only_the_slot_that_ran_gets_gradients() -> None:
    reference = build_reference(TINY, HOST, slots=["policy", "adversary"], rank=4)
    batch = packed(LENGTHS, TINY, torch.device("cpu"))
    reference.forward(batch, slot="adversary", gradients=True).log_probabilities.sum().backward()
    assert reference.slots == ("policy", "adversary")
    assert gradients(reference, "policy") == {}
    assert set(gradients(reference, "adversary")) == set(reference.adapter_parameters("adversary"))
    assert all(gradient.abs().sum() > 0 for gradient in gradients(reference, "adversary").values())


@pytest.mark.parametrize("gradients_on", [True, False])
def test_a_forward_leaves_only_its_outputs_behind(gradients_on: bool, virtual: VirtualDevice) -> None:
    reference = build_reference(TINY, virtual, rank=4)
    batch = packed(LENGTHS, TINY, virtual.torch_device)
    before = virtual.allocated()
    outputs = reference.forward(batch, slot="policy", gradients=gradients_on, hidden=True)
    assert outputs.log_probabilities.requires_grad == gradients_on
    assert outputs.hidden is not None
    assert outputs.hidden.shape == (sum(LENGTHS), TINY.hidden)
    norms = outputs.hidden.detach().cpu().square().mean(-1)
    torch.testing.assert_close(norms, torch.ones(sum(LENGTHS)), rtol=0, atol=0.01)
    if not gradients_on:
        assert virtual.allocated() - before == 512 + sum(LENGTHS) * TINY.hidden * 4
    del outputs
    assert virtual.allocated() == before


def test_the_largest_log_probabilities_bound_those_of_the_targets(virtual: VirtualDevice) -> None:
    reference = build_reference(TINY, virtual)
    batch = packed(LENGTHS, TINY, virtual.torch_device)
    outputs = reference.forward(batch, slot="policy", gradients=False, top=3)
    assert outputs.top is not None
    values, tokens = (each.cpu() for each in outputs.top)
    chosen = outputs.log_probabilities.cpu()
    assert values.shape == tokens.shape == (sum(LENGTHS), 3)
    assert torch.all(values[:, :-1] >= values[:, 1:])
    assert torch.all(values[:, 0] >= chosen - 1e-6)
    hits = tokens[:, 0] == batch.targets.cpu()
    torch.testing.assert_close(values[hits, 0], chosen[hits])


@pytest.mark.parametrize("hidden", [True, False])
def test_closing_leaves_nothing_on_the_device(hidden: bool, virtual: VirtualDevice) -> None:
    reference = build_reference(TINY, virtual, rank=4)
    train(reference)
    reference.close()
    del reference
    assert virtual.allocated() == 0


def test_adapters_cost_what_they_cost(virtual: VirtualDevice) -> None:
    peaks = {}
    for name, rank in (("none", 0), ("rank 1", 1), ("rank 64", 64), ("frozen", 64)):
        reference = build_reference(TINY, virtual, rank=rank)
        if name == "frozen":
            for parameter in reference.adapter_parameters("policy").values():
                parameter.requires_grad_(False)
        batch = packed([500], TINY, virtual.torch_device)
        virtual.reset_peaks()
        before = virtual.allocated()
        outputs = reference.forward(batch, slot="policy", gradients=True).log_probabilities
        assert outputs.requires_grad == (name in ("rank 1", "rank 64"))
        if outputs.requires_grad:
            outputs.sum().backward()
        peaks[name] = virtual.peak_allocated() - before
        assert bool(gradients(reference)) == outputs.requires_grad
        reference.close()
        parameter = None
        del outputs, reference, batch
    assert len(set(peaks.values())) == 4
    assert peaks["none"] < peaks["rank 1"] < peaks["rank 64"]


def test_half_precision_runs_with_a_rank_that_no_kernel_is_aligned_for(virtual: VirtualDevice) -> None:
    reference = build_reference(TINY, virtual, rank=1, dtype=torch.bfloat16)
    losses = train(reference)
    assert losses[1] < losses[0]
    exact = train(build_reference(TINY, HOST, rank=1))
    assert losses[0] == pytest.approx(exact[0], rel=0.01)


def test_stages_are_marked_in_the_order_in_which_they_run(virtual: VirtualDevice) -> None:
    reference = build_reference(TINY, virtual, rank=4)
    batch = packed(LENGTHS, TINY, virtual.torch_device)
    with virtual.record() as recording:
        reference.forward(batch, slot="policy", gradients=True).log_probabilities.sum().backward()
    assert [stage for _, stage in recording.trace().marks] == [
        "forward/embedding", "forward/layer/0", "forward/layer/1", "forward/head/0",
        "backward/head/0", "backward/layer/1", "backward/layer/0",
    ]  # fmt: skip


def test_what_cannot_be_built_or_run_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="at least one"):
        build_reference(TINY, HOST, slots=[])
    with pytest.raises(InvalidInputError, match="each name once"):
        build_reference(TINY, HOST, slots=["policy", "policy"])
    with pytest.raises(InvalidInputError, match="rank"):
        build_reference(TINY, HOST, rank=-1)
    with pytest.raises(InvalidInputError, match="divide"):
        build_reference(replace(TINY, key_value_heads=3), HOST)
    with pytest.raises(InvalidInputError, match="'judge' does not exist; choose of policy"):
        build_reference(TINY, HOST).adapter_parameters("judge")


def test_a_card_too_small_for_the_model_says_so() -> None:
    device = VirtualDevice("h200", memory_fraction=1e-5)
    with pytest.raises(torch.OutOfMemoryError, match="allowed"):
        build_reference(replace(TINY, vocabulary=100_000), device)
    assert device.allocated() == 0
    device.close()
