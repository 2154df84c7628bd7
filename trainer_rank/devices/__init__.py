"""Devices that tensors live on, behind one protocol: a real card through torch.cuda, or a modelled one over the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer_rank.errors import InvalidInputError

if TYPE_CHECKING:
    from trainer_rank.devices.protocol import Device


def open_device(name: str, **settings: Any) -> Device:  # noqa: ANN401 - passed on to the implementation, which types them
    """Open ``virtual:N`` (settings of :class:`~trainer_rank.devices.virtual.VirtualDevice`, ``card`` needed) or
    ``cuda:N`` (settings of :class:`~trainer_rank.devices.cuda.CudaDevice`).
    """
    kind, _, index = name.partition(":")
    if not index.isdecimal():
        raise InvalidInputError(f"device {name!r} is not known; give virtual:N or cuda:N")
    if kind == "virtual":
        from trainer_rank.devices.virtual import VirtualDevice

        virtual: Device = VirtualDevice(index=int(index), **settings)
        return virtual
    if kind == "cuda":
        from trainer_rank.devices.cuda import CudaDevice

        cuda: Device = CudaDevice(index=int(index), **settings)
        return cuda
    raise InvalidInputError(f"device {name!r} is not known; give virtual:N or cuda:N")
