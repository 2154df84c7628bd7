"""The contract of a head whose subjects live on a virtual card where a real one, and its driver, would be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from trainer_rank import contract
from trainer_rank.devices.virtual import VirtualDevice


class Card:
    """The virtual card of the subject that lives, and how it is reached past PyTorch."""

    device: VirtualDevice


def on_modelled_card(**options: Any) -> SimpleNamespace:
    """Return the contract; ``options`` are how every subject is constructed, whatever the workload asks for."""

    def construct(**asked: Any) -> contract.Subject:
        subject = contract.construct(**asked | {"ground": "rehearsal"} | options)
        assert isinstance(subject.device, VirtualDevice)
        Card.device = subject.device
        return subject

    def close(subject: contract.Subject) -> dict[str, int]:
        report = contract.close(subject)
        Card.device.close()
        return report

    names = {name: getattr(contract, name) for name in dir(contract)}
    return SimpleNamespace(**names | {"construct": construct, "close": close})
