"""Tensors of a virtual device compute what CPU tensors compute, and never change place unseen."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name that everyone uses
from torch.utils.checkpoint import checkpoint

from trainer_rank.devices.virtual import VirtualDevice
from trainer_rank.devices.virtual_tensor import VirtualTensor
from trainer_rank.errors import UnsupportedError

MAKERS = {
    "empty": lambda device: torch.empty(3, device=device).fill_(2),
    "zeros": lambda device: torch.zeros(2, 3, device=device),
    "full": lambda device: torch.full((4,), 7, device=device),
    "tensor": lambda device: torch.tensor([[1, 2], [3, 4]], device=device),
    "arange": lambda device: torch.arange(5, device=device),
    "arange_step": lambda device: torch.arange(1, 9, 2, device=device),
    "linspace": lambda device: torch.linspace(0, 1, 5, device=device),
    "eye": lambda device: torch.eye(3, device=device),
    "randn": lambda device: torch.randn(5, device=device),
    "randperm": lambda device: torch.randperm(9, device=device),
    "strided": lambda device: torch.empty_strided((2, 2), (1, 2), device=device).fill_(1),
    "host": lambda device: torch.ones(3).to(device),
    "like": lambda device: torch.zeros_like(torch.ones(3), device=device),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_every_way_of_making_a_tensor_makes_it_on_the_device(maker: str, virtual: VirtualDevice) -> None:
    torch.manual_seed(5)
    made = MAKERS[maker](virtual.torch_device)
    torch.manual_seed(5)
    expected = MAKERS[maker](torch.device("cpu"))
    assert isinstance(made, VirtualTensor)
    assert made.device == virtual.torch_device
    assert torch.equal(made.cpu(), expected)
    assert made.tolist() == expected.tolist()


def test_a_training_step_equals_the_host_bit_for_bit(virtual: VirtualDevice) -> None:
    def train(device: torch.device) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=device.type != "cpu")
        inputs = torch.randn(20, 16).to(device)
        for _ in range(3):
            loss = checkpoint(model, inputs, use_reentrant=False).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    for ours, expected in zip(train(virtual.torch_device), train(torch.device("cpu")), strict=True):
        assert torch.equal(ours, expected)


def test_views_share_and_in_place_changes_show_through_them(virtual: VirtualDevice) -> None:
    base = torch.zeros(4, 6, device=virtual.torch_device)
    before = virtual.allocated()
    base.t()[2, 1:3] += 5
    base[0].copy_(torch.arange(6.0))
    view = base.view(24)[6:]
    view.mul_(2)
    assert virtual.allocated() == before
    assert base.tolist() == [[0, 1, 2, 3, 4, 5], [0, 0, 10, 0, 0, 0], [0, 0, 10, 0, 0, 0], [0, 0, 0, 0, 0, 0]]


def test_gradients_through_in_place_changes_of_views(virtual: VirtualDevice) -> None:
    def gradient(device: torch.device) -> list[float]:
        leaf = torch.arange(6.0, device=device, requires_grad=True)
        whole = leaf * 2
        whole[1:3].mul_(leaf.detach()[3:5])
        whole.square().sum().backward()
        assert leaf.grad is not None
        return leaf.grad.tolist()

    assert gradient(virtual.torch_device) == gradient(torch.device("cpu"))


def test_a_copy_to_the_host_leaves_the_device_and_is_not_charged(virtual: VirtualDevice) -> None:
    tensor = torch.arange(1000.0, device=virtual.torch_device)
    charged = virtual.allocated()
    host = tensor.cpu()
    assert type(host) is torch.Tensor
    assert host.device.type == "cpu"
    assert virtual.allocated() == charged
    host.zero_()
    assert tensor.sum().item() == 499_500
    del tensor
    assert virtual.allocated() == 0


def test_two_devices_hold_their_own_and_copies_move_between_them(virtual: VirtualDevice, second: VirtualDevice) -> None:
    tensor = torch.ones(1000, device=virtual.torch_device)
    copy = tensor.to(second.torch_device)
    assert (virtual.allocated(), second.allocated()) == (4096, 4096)
    copy.mul_(3)
    assert tensor.sum().item() == 1000
    tensor.copy_(copy)
    assert tensor.sum().item() == 3000
    del tensor
    assert (virtual.allocated(), second.allocated()) == (0, 4096)


def test_gradients_flow_between_two_devices_and_the_host(virtual: VirtualDevice, second: VirtualDevice) -> None:
    leaf = torch.ones(10, device=virtual.torch_device, requires_grad=True)
    ((leaf * 2).to(second.torch_device) * 3).cpu().sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.device == virtual.torch_device
    assert leaf.grad.tolist() == [6] * 10
    leaf.grad = None
    del leaf
    assert (virtual.allocated(), second.allocated()) == (0, 0)


def test_saved_tensors_held_on_the_host_leave_the_device_until_backward(virtual: VirtualDevice) -> None:
    leaf = torch.randn(1000, device=virtual.torch_device, requires_grad=True)
    before = virtual.allocated()
    with torch.autograd.graph.save_on_cpu():
        result = leaf.sin().exp().sum()
    assert virtual.allocated() - before == 512
    result.backward()
    host = leaf.detach().cpu()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad.cpu(), host.sin().exp() * host.cos())


def test_host_and_device_tensors_do_not_mix_except_scalars(virtual: VirtualDevice, second: VirtualDevice) -> None:
    ours = torch.ones(3, device=virtual.torch_device)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        ours + torch.ones(3)
    with pytest.raises(RuntimeError, match="lazy:0 and lazy:1"):
        ours + torch.ones(3, device=second.torch_device)
    assert (ours + torch.tensor(2.0)).tolist() == [3, 3, 3]
    assert ours[torch.tensor([2, 0])].tolist() == [1, 1]


def test_what_would_go_unseen_is_refused_by_name(virtual: VirtualDevice) -> None:
    tensor = torch.ones(4, device=virtual.torch_device)
    with pytest.raises(UnsupportedError, match=r"aten\.resize_"):
        tensor.resize_(8)
    with pytest.raises(UnsupportedError, match="storage"):
        tensor.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedError, match=r"aten\.set_"):
        tensor.set_(torch.ones(9, device=virtual.torch_device))
    with pytest.raises(UnsupportedError, match="shape"):
        tensor.unsqueeze_(0)
    with pytest.raises(UnsupportedError, match="cannot take over"):
        tensor.data = torch.ones(4)
    with pytest.raises(UnsupportedError, match="lazy:7 is not open"):
        torch.ones(1, device="lazy:7")


def test_a_module_moves_between_devices_with_its_values(virtual: VirtualDevice, second: VirtualDevice) -> None:
    module = torch.nn.Linear(8, 4)
    expected = module.weight.detach().clone()
    module.to(virtual.torch_device).to(second.torch_device)
    assert module.weight.device == second.torch_device
    assert torch.equal(module.weight.detach().cpu(), expected)
    assert virtual.allocated() == 0
    assert second.allocated() == 1024


def test_attention_takes_no_memory_quadratic_in_the_length(virtual: VirtualDevice) -> None:
    query = torch.randn(1, 2, 1500, 16, device=virtual.torch_device, requires_grad=True)
    virtual.reset_peaks()
    before = virtual.allocated()
    output = F.scaled_dot_product_attention(query, query, query, is_causal=True)
    output.sum().backward()
    scores = 2 * 1500 * 1500 * 4
    assert virtual.peak_allocated() - before < scores / 8
    host = query.detach().cpu()
    assert torch.equal(output.detach().cpu(), F.scaled_dot_product_attention(host, host, host, is_causal=True))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_an_empty_tensor_owns_nothing_and_survives_everything(shape: tuple[int, ...], virtual: VirtualDevice) -> None:
    with virtual.record() as recording:
        empty = torch.empty(shape, device=virtual.torch_device, requires_grad=True)
        joined = checkpoint(lambda x: (x * 2).view(-1), empty, use_reentrant=False)
        joined.split(1)
        joined.backward(torch.empty_like(joined))
        del empty, joined
    assert virtual.allocated() == 0
    assert recording.trace().events == ()
