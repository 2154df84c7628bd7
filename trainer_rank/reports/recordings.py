"""Keep the allocator recording of every step as a file, by listening to a TrainerRank's events."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer_rank.allocator.trace import save_trace
from trainer_rank.devices.protocol import Device, Recording


class StepRecorder:
    """Records from a step's forecast to its observation into ``step-NNNN.trace.json.gz`` of ``folder``.

    ``record(name)`` and ``finish()`` do the same for anything else, one recording at a time.
    """

    def __init__(self, device: Device, folder: Path) -> None:
        self._device = device
        self._folder = folder
        self._name = ""
        self._context: AbstractContextManager[Recording] | None = None
        self._recording: Recording | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def event(self, event: Mapping[str, Any]) -> None:
        """Begin with a forecast, end with its observation."""
        if event["event"] == "forecast":
            self.record(f"step-{event['step']:04d}")
        elif event["event"] == "observed":
            self.finish()

    def record(self, name: str) -> None:
        """Begin a recording; one that is still running is finished first."""
        self.finish()
        self._name, self._context = name, self._device.record()
        self._recording = self._context.__enter__()

    def finish(self) -> None:
        """End the running recording, if any, and write its file."""
        if self._context is None or self._recording is None:
            return
        context, recording = self._context, self._recording
        self._context = self._recording = None
        context.__exit__(None, None, None)
        trace = replace(recording.trace(), source=self._name)
        save_trace(trace, self._folder / f"{self._name}.trace.json.gz")
