"""The hooks, on plain-torch modules with Megatron's names and calling convention (its own need a CUDA device)."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from trainer_rank.devices.virtual import VirtualDevice
from trainer_rank.errors import InvalidInputError
from trainer_rank.models.adapters import AdapterSettings
from trainer_rank.models.megatron import QWEN_36_35B_A3B, runtime
from trainer_rank.models.megatron.slots import AdapterSlots

HIDDEN, EXPERTS = 16, 3


@dataclass
class Packed:
    slot: str


class Linear(torch.nn.Module):
    zero_centered_gamma = True
    eps = 1e-6

    def __init__(self, normalised: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(HIDDEN, HIDDEN) / 4, requires_grad=False)
        self.layer_norm_weight = torch.nn.Parameter(torch.zeros(HIDDEN), requires_grad=False)
        self.normalised = normalised

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        if self.normalised:
            rows = torch.nn.functional.rms_norm(rows, (HIDDEN,), self.layer_norm_weight + 1, self.eps)
        return rows @ self.weight.T, None


class Grouped(torch.nn.Module):
    num_gemms = EXPERTS

    def __init__(self) -> None:
        super().__init__()
        for expert in range(EXPERTS):
            self.register_parameter(
                f"weight{expert}", torch.nn.Parameter(torch.randn(HIDDEN, HIDDEN) / 4, requires_grad=False)
            )

    def forward(self, rows: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, None]:
        parts = [part @ getattr(self, f"weight{index}").T for index, part in enumerate(rows.split(counts))]
        return torch.cat(parts), None


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attention = torch.nn.Module()
        self.self_attention.in_proj = Linear(normalised=True)
        self.self_attention.out_proj = Linear()
        self.mlp = torch.nn.Module()
        self.mlp.experts = torch.nn.Module()
        self.mlp.experts.linear_fc1 = Grouped()
        self.mlp.experts.linear_fc2 = Grouped()

    def forward(self, hidden_states: torch.Tensor, packed_seq_params: Packed) -> torch.Tensor:
        rows, _ = self.self_attention.in_proj(hidden_states)
        rows, _ = self.self_attention.out_proj(rows)
        counts = [2, 0, rows.shape[0] - 2]
        rows, _ = self.mlp.experts.linear_fc1(rows, counts)
        return self.mlp.experts.linear_fc2(torch.relu(rows), counts)[0] + hidden_states


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.ModuleList([Layer(), Layer()])

    def forward(self, rows: torch.Tensor, slot: str) -> torch.Tensor:
        packed = Packed(slot)
        for layer in self.layers:
            rows = checkpoint(
                lambda values, layer=layer: layer(hidden_states=values, packed_seq_params=packed),
                rows,
                use_reentrant=True,
            )
        return rows


stages: list[str] = []


def build() -> tuple[Block, AdapterSlots]:
    stages.clear()
    block = Block()
    return block, AdapterSlots(block, ["policy", "adversary"], AdapterSettings(2, 4.0), 7, stages.append)


def randomise(slots: AdapterSlots, slot: str) -> None:
    for name, parameter in slots.parameters_of(slot).items():
        if name.endswith("up"):
            torch.nn.init.normal_(parameter)


def test_zero_adapters_give_the_base_outputs_exactly() -> None:
    rows = torch.randn(6, HIDDEN)
    expected = Block()(rows, "none")
    block, _ = build()
    assert torch.equal(block(rows, "policy"), expected)
    assert torch.equal(block(rows, "adversary"), expected)


def test_every_adapted_map_has_named_parameters() -> None:
    _, slots = build()
    names = set(slots.parameters_of("policy"))
    assert len(names) == 2 * 4 * 2
    assert "layers.1.mlp.experts.linear_fc2.up" in names


def test_recompute_uses_the_slot_of_its_own_forward() -> None:
    block, slots = build()
    randomise(slots, "policy")
    randomise(slots, "adversary")
    first = block(torch.randn(6, HIDDEN, requires_grad=True), "policy")
    second = block(torch.randn(6, HIDDEN, requires_grad=True), "adversary")
    (first * first).sum().backward()
    assert all(parameter.grad is None for parameter in slots.parameters_of("adversary").values())
    assert all(parameter.grad is not None for parameter in slots.parameters_of("policy").values())
    (second * second).sum().backward()
    assert all(parameter.grad is not None for parameter in slots.parameters_of("adversary").values())


def test_stages_are_marked_forward_and_backward() -> None:
    block, _ = build()
    output = block(torch.randn(6, HIDDEN, requires_grad=True), "policy")
    (output * output).sum().backward()
    assert stages == ["forward/layer/0", "forward/layer/1", "backward/layer/1", "backward/layer/0"]


def test_unknown_and_repeated_slots_are_refused() -> None:
    block, slots = build()
    with pytest.raises(InvalidInputError, match="no adapter slot 'critic'"):
        slots.parameters_of("critic")
    with pytest.raises(InvalidInputError, match="each once"):
        AdapterSlots(block, ["policy", "policy"], AdapterSettings(1, 1.0), 0, print)


def test_a_model_may_be_closed_twice_and_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever built a model closes it, and the rank that trained it did already."""
    monkeypatch.setattr(runtime.megatron, "require_megatron", lambda: None)
    monkeypatch.setattr(runtime.megatron, "initialise_parallel", lambda _topology, _seed: None)
    monkeypatch.setattr(runtime.megatron, "Base", lambda *_: SimpleNamespace(block=Block()))
    device = VirtualDevice("h200")
    model = runtime.MegatronRuntime(QWEN_36_35B_A3B.with_layers(4), device, ["policy"])
    assert model.adapter_parameters("policy")
    before = device.allocated()
    model.close()
    assert device.allocated() < before
    model.close()
    with pytest.raises(RuntimeError, match="this Megatron model is closed"):
        model.adapter_parameters("policy")
    device.close()
