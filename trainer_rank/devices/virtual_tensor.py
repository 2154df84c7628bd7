"""Tensors of the virtual device: real CPU tensors behind wrappers that carry a device identity.

A :class:`VirtualTensor` says ``lazy:N`` (see :mod:`trainer_rank.devices.virtual`) and holds an ordinary CPU tensor.
Every operator runs on the CPU tensors; each storage that an operator brings to life on the device is handed to that
device's ledger, which watches for its death. What a kernel allocates and frees within one operator is not seen.

PyTorch's extension backend (``PrivateUse1``) would be the natural home, but torch 2.11 to 2.13 end the process when an
error is raised inside backward on a Python extension backend, and out of memory inside backward must be survivable.
"""

# ruff: noqa: ANN401 - operators and their arguments are of any type; PyTorch's own dispatch hook is untyped
from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from trainer_rank.errors import UnsupportedError

aten = torch.ops.aten
HOST = torch.device("cpu")
DEVICE_TYPE = "lazy"

# Operators that move data between devices, or that CUDA lets take host tensors beside device tensors.
_MIXED = {
    aten.copy_.default,
    aten._to_copy.default,
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
# Operators that change what a tensor refers to: the wrapper cannot follow them.
_REFUSED = {
    aten.resize_.default,
    aten.set_.source_Storage,
    aten.set_.source_Storage_storage_offset,
    aten.set_.source_Tensor,
    aten.set_.default,
}
# Operators that make a tensor of none: PyTorch builds the others (zeros, randn, full and so on) from them.
_FACTORIES = {
    "empty.memory_format": aten.empty.memory_format,
    "empty_strided": aten.empty_strided.default,
    "arange": aten.arange.default,
    "arange.start": aten.arange.start,
    "arange.start_step": aten.arange.start_step,
    "linspace": aten.linspace.default,
    "eye.m": aten.eye.m,
    "randperm.generator": aten.randperm.generator,
}
_HOST_REFUSED = re.compile(r"DefaultCPUAllocator: .*tried to allocate (\d+) bytes")
MATRIX_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "_grouped_mm", "mv", "addmv", "dot", "linear"}


class Ledger(Protocol):
    """What a device does with the births of storages and with the operators that run on it."""

    def birth(self, storage: torch.UntypedStorage) -> None:
        """Charge a storage that is new on this device; does nothing for one already known or of zero bytes."""

    def refused_by_host(self, size: int) -> None:
        """Explain that the host has no ``size`` bytes for a storage: raises what fits the card's state, always."""

    def operator(self, matrix_product: bool) -> None:
        """Note that an operator is about to run; called only while :attr:`watching`."""

    @property
    def watching(self) -> bool:
        """Whether :meth:`operator` wants to be called."""


class _Operator(NamedTuple):
    refused: bool
    mutates: bool
    mixed: bool
    matrix_product: bool


_ledgers: dict[int, Ledger] = {}
_operators: dict[Any, _Operator] = {}
_thread = threading.local()


def _describe(function: Any) -> _Operator:
    name = function._schema.name.removeprefix("aten::")
    described = _Operator(
        function in _REFUSED, function._schema.is_mutable, function in _MIXED, name in MATRIX_PRODUCTS
    )
    _operators[function] = described
    return described


class VirtualTensor(torch.Tensor):
    """A tensor of a virtual device; ``contents`` is the CPU tensor that holds its values."""

    contents: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator on the CPU tensors and wrap what it returns."""
        return _run(function, args, kwargs or {})

    def untyped_storage(self) -> torch.UntypedStorage:
        """Refuse: a storage of its own could be resized without the device seeing it."""
        raise UnsupportedError(
            f"the storage of a tensor on {self.device} cannot be handed out, since resizing it would go unseen; "
            "copy the tensor to the host first"
        )

    @property
    def data(self) -> torch.Tensor:
        """The same values without autograd; assigning makes this tensor stand for the other's values."""
        return super().data

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        if not isinstance(other, VirtualTensor):
            raise UnsupportedError(f"a tensor on {self.device} cannot take over one on {other.device}; copy it instead")
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.contents = other.contents

    def tolist(self) -> Any:
        """Return the values as nested lists of Python numbers, through a copy on the host."""
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{self.contents!r} on {self.device}"


def wrap(inner: torch.Tensor, device: torch.device) -> VirtualTensor:
    """Put a CPU tensor on ``device``; its storage is charged when the device does not know it yet.

    Raises :class:`torch.OutOfMemoryError` when the card has no room for it.
    """
    ledger_of(device).birth(inner.untyped_storage())
    outer: VirtualTensor = torch.Tensor._make_wrapper_subclass(
        VirtualTensor,
        inner.size(),
        strides=inner.stride(),
        storage_offset=inner.storage_offset(),
        dtype=inner.dtype,
        device=device,
    )
    outer.contents = inner
    return outer


def ledger_of(device: torch.device) -> Ledger:
    """Return the ledger of an open device, or raise :class:`UnsupportedError`."""
    ledger = _ledgers.get(device.index or 0)
    if ledger is None:
        raise UnsupportedError(f"{device} is not open; open it with trainer_rank.devices.open_device first")
    return ledger


def attach(index: int, ledger: Ledger) -> None:
    """Make ``virtual:index`` usable, with ``ledger`` charged for its storages."""
    if index in _ledgers:
        raise UnsupportedError(f"virtual:{index} is already open in this process; close it first")
    _register_backend()
    _ledgers[index] = ledger


def detach(index: int) -> None:
    """Make ``virtual:index`` unusable for new tensors; living storages stay charged until they die."""
    _ledgers.pop(index, None)


class _Unwrapper:
    """Collects the CPU tensors of one operator's arguments and the device that they agree on."""

    __slots__ = ("device", "host", "inners", "outers")

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self.host = False
        self.outers: list[torch.Tensor] = []
        self.inners: list[torch.Tensor] = []

    def __call__(self, value: Any) -> Any:
        if isinstance(value, VirtualTensor):
            if self.device is None:
                self.device = value.device
            elif self.device != value.device:
                raise _different_devices(self.device, value.device)
            self.outers.append(value)
            self.inners.append(value.contents)
            return value.contents
        if isinstance(value, torch.Tensor):
            self.host = self.host or value.dim() > 0
            self.outers.append(value)
            self.inners.append(value)
            return value
        if isinstance(value, (list, tuple)):
            return [self(item) for item in value]
        return value


def _different_devices(first: torch.device, second: torch.device) -> RuntimeError:
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {first} and {second}!"
    )


def _run(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    described = _operators.get(function) or _describe(function)
    if described.refused:
        raise UnsupportedError(f"{function} is not supported on a virtual device; create a new tensor instead")
    if function is aten.copy_.default:
        return _copy(*args, **kwargs)
    unwrap = _Unwrapper()
    inner_args = [unwrap(value) for value in args]
    inner_kwargs = {name: unwrap(value) for name, value in kwargs.items()} if kwargs else {}
    device = unwrap.device
    if device is None:
        raise UnsupportedError(f"{function} reached the virtual device without a tensor of it")
    if unwrap.host and not described.mixed:
        raise _different_devices(device, HOST)
    target = inner_kwargs.get("device")
    if target is not None:
        device = with_index(torch.device(target))
        inner_kwargs["device"] = HOST
    if device.type == DEVICE_TYPE:
        ledger = ledger_of(device)
        if ledger.watching:
            ledger.operator(described.matrix_product)
    try:
        result = function(*inner_args, **inner_kwargs)
    except RuntimeError as error:
        _explain(error, device)
        raise
    if described.mutates:
        return _return_mutated(function, result, unwrap, device)
    return _wrap_all(result, device)


def _explain(error: RuntimeError, device: torch.device) -> None:
    """Raise in place of ``error`` where the host had no memory for what a card may have no room for either."""
    refused = _HOST_REFUSED.search(str(error))
    if refused and device.type == DEVICE_TYPE:
        ledger_of(device).refused_by_host(int(refused.group(1)))


def _wrap_all(result: Any, device: torch.device) -> Any:
    if isinstance(result, torch.Tensor):
        return wrap(result, device) if device.type == DEVICE_TYPE else result
    if isinstance(result, (list, tuple)):
        return type(result)(_wrap_all(item, device) for item in result)
    return result


def _return_mutated(function: Any, result: Any, unwrap: _Unwrapper, device: torch.device) -> Any:
    """Return the caller's own tensors for those that the operator changed in place, and wrap the others."""
    for outer, inner in zip(unwrap.outers, unwrap.inners, strict=True):
        if outer.size() != inner.size() or outer.stride() != inner.stride():
            raise UnsupportedError(f"{function} changed the shape of a tensor on {device} in place; use a new tensor")

    return _restore(result, unwrap, device)


def _restore(result: Any, unwrap: _Unwrapper, device: torch.device) -> Any:
    if isinstance(result, torch.Tensor):
        for outer, inner in zip(unwrap.outers, unwrap.inners, strict=True):
            if inner is result:
                return outer
        return _wrap_all(result, device)
    if isinstance(result, (list, tuple)):
        return type(result)(_restore(item, unwrap, device) for item in result)
    return result


def _copy(destination: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy between any two devices, as ``aten::copy_`` does."""
    _inner(destination).copy_(_inner(source), non_blocking)
    return destination


def _inner(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contents if isinstance(tensor, VirtualTensor) else tensor


def _copy_from(source: torch.Tensor, destination: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _copy(destination, source, non_blocking)
    return destination


def _factory(operator: Any) -> Callable[..., torch.Tensor]:
    """Return a kernel that makes a tensor on the host and puts it on the device asked for."""

    def make(*args: Any, device: torch.device | None = None, **options: Any) -> Any:
        place = with_index(device)
        try:
            made = operator(*args, device=HOST, **options)
        except RuntimeError as error:
            _explain(error, place)
            raise
        return wrap(made, place)

    return make


def _fused_on_the_host() -> list[str]:
    """Operators that the host runs as one and PyTorch takes apart on any other device.

    Left apart (the backward of silu is one) they would round differently from the host and allocate what neither the
    host nor a CUDA device allocates.
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = torch._C._dispatch_get_all_op_names()
    fused = [name for name in names if name.startswith("aten::") and has(name, "CompositeImplicitAutograd")]
    return sorted(name.removeprefix("aten::") for name in fused if has(name, "CPU"))


def _fused(name: str) -> Callable[..., Any]:
    """Return a kernel that runs the operator whole; its presence is what keeps PyTorch from taking it apart."""
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(aten, packet), overload or "default")
    return lambda *args, **kwargs: _run(operator, args, kwargs)


def with_index(device: torch.device | None) -> torch.device:
    """Fill in the calling thread's current device where no index is named; other kinds of device stay."""
    if device is None or (device.type == DEVICE_TYPE and device.index is None):
        return torch.device(DEVICE_TYPE, current_device())
    return device


def current_device() -> int:
    """Index of the calling thread's current virtual device."""
    return getattr(_thread, "current", 0)


def set_current_device(index: int) -> None:
    """Select the calling thread's current virtual device."""
    _thread.current = index


class _BackendModule:
    """What PyTorch looks up as ``torch.virtual``."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return bool(_ledgers)

    def current_device(self) -> int:
        return current_device()

    def device_count(self) -> int:
        return max(_ledgers, default=-1) + 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Nothing to do: the device draws from the host's generator, which the caller has just seeded."""


_libraries: list[torch.library.Library] = []


def _register_backend() -> None:
    if _libraries:
        return
    torch._register_device_module(DEVICE_TYPE, _BackendModule())  # type: ignore[no-untyped-call]
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name, operator in _FACTORIES.items():
        library.impl(name, _factory(operator), "Lazy")  # type: ignore[no-untyped-call]
    library.impl("_copy_from", _copy_from, "Lazy")  # type: ignore[no-untyped-call]
    for name in _fused_on_the_host():
        library.impl(name, _fused(name), "Lazy")  # type: ignore[no-untyped-call]
    library.impl("scaled_dot_product_attention", _attention, "AutogradLazy")  # type: ignore[no-untyped-call]
    _libraries.append(library)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attend with the CPU's fused kernel; left to itself PyTorch would form the whole score matrix here."""
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    output: torch.Tensor = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return output
