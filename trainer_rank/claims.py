"""Named claims on physically free memory: what is kept free for whom, how large, how well known, from where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_rank.admission.budget import Status, Term
from trainer_rank.policies import Policy

if TYPE_CHECKING:
    from trainer_rank.devices.protocol import Device

# What the allocator may take beyond the bytes of a claim: one partly used segment of each pool.
_SEGMENT_SLACK = (2 << 20) + (20 << 20)


class Claims:
    """Knows what else will want memory of the card while a plan runs."""

    def __init__(self, device: Device, policy: Policy) -> None:
        self._device = device
        self._policy = policy
        self._libraries_met = False

    def libraries_met(self) -> None:
        """Note that a forward and a backward have run, so that libraries have taken what the card says they take."""
        self._libraries_met = True

    def now(self, optimizer_bytes: int) -> tuple[Term, ...]:
        """Return the present claims in bytes; ``optimizer_bytes`` is the state that the next step will create."""
        claims = [
            Term("reserve", self._policy.reserve_bytes, Status.BOUNDED, f"policy {self._policy.name}"),
            self._libraries(),
        ]
        if optimizer_bytes:
            size = optimizer_bytes + _SEGMENT_SLACK
            claims.append(
                Term("optimizer state", size, Status.BOUNDED, "adapter shapes, and a partly used segment each")
            )
        return tuple(claims)

    def _libraries(self) -> Term:
        if self._libraries_met:
            return Term("libraries", 0, Status.MEASURED, "the probes' backward has run: what it takes is taken")
        card = self._device.card
        due = card.held_outside("first_backward") - card.context
        return Term("libraries", due, Status.MEASURED, f"card {card.name}: from context to first_backward")
