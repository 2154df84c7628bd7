"""Follow where an execution is, and sample the device at the moment when its memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType

from trainer_rank.allocator.snapshot import Snapshot
from trainer_rank.devices.protocol import Device, Sighting


@dataclass(frozen=True)
class Scene:
    """The device at a failure: before unwinding where there is a ``sighting``, else as it was found afterwards.

    ``stage`` is the plan's, ``part`` what the model had begun inside it (``forward/layer/3``), ``position`` how many
    blocks the stage had been handed before, ``stream`` the one whose pools serve what is born then. Bytes; ``cap`` is
    what the allocator may reserve, None without a limit.
    """

    stage: str
    part: str | None
    position: int
    stream: int
    free: int
    allocated: int
    reserved: int
    cap: int | None
    snapshot: Snapshot
    sighting: Sighting | None = None


class Place:
    """Where the execution of a plan is."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._begun = 0
        self.stage = "start"

    def begin(self, stage: str) -> None:
        """Begin a stage of the plan."""
        self.stage, self._begun = stage, self._device.allocations()
        self._device.mark(stage)

    @property
    def part(self) -> str | None:
        """What the model has begun inside the stage."""
        marked = self._device.stage
        return None if marked == self.stage else marked

    def scene(self, sighting: Sighting | None = None) -> Scene:
        """Sample the device here and now."""
        device = self._device
        return Scene(
            stage=self.stage,
            part=self.part,
            position=device.allocations() - self._begun,
            stream=device.current_stream,
            free=device.memory_info().free if sighting is None else sighting.free,
            allocated=device.allocated() if sighting is None else sighting.allocated,
            reserved=device.reserved() if sighting is None else sighting.reserved,
            cap=device.cap(),
            snapshot=device.snapshot(),
            sighting=sighting,
        )


class Watch:
    """Samples every out of memory while it is open; ``failed`` is told when sampling itself fails."""

    def __init__(self, device: Device, place: Place, failed: Callable[[], None]) -> None:
        self._device = device
        self._place = place
        self._failed = failed
        self._before = 0
        self._open: AbstractContextManager[None] | None = None
        self.scenes: list[Scene] = []

    def __enter__(self) -> Watch:
        self._before = self._device.out_of_memory_count()
        self._open = self._device.watch_out_of_memory(self._sample)
        self._open.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open is not None:
            self._open.__exit__(kind, error, trace)
            self._open = None

    @property
    def counted(self) -> int:
        """How often the device's allocator ran out of memory since the watch was opened."""
        return self._device.out_of_memory_count() - self._before

    def scene(self) -> Scene:
        """Return the last out of memory, or, when none was seen, the device as it is now."""
        return self.scenes[-1] if self.scenes else self._place.scene()

    def _sample(self, sighting: Sighting) -> None:
        """Called by the allocator in the middle of a failing allocation: whatever goes wrong here stays here."""
        try:
            self.scenes.append(self._place.scene(sighting))
        except Exception:  # the failure that is being watched must not be replaced by one of the watch
            self._failed()
