"""Record probes of the reference model, planned within a stated time, and fit a tape from them. Needs torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from qualification.errors import QualificationError
from qualification.subject import installed_checkout, subject_of_checkout
from trainer_rank.allocator.trace import Trace, save_trace
from trainer_rank.devices.protocol import Device
from trainer_rank.devices.virtual import VirtualDevice
from trainer_rank.errors import InvalidInputError, UnsupportedError
from trainer_rank.models.reference import SMALL, TINY, build_reference
from trainer_rank.recording import StepProbes

GEOMETRIES = {"small": SMALL, "tiny": TINY}


def record_probes(
    folder: Path, *, device: str, geometry: str, seconds: float, largest: int, sequences: int
) -> tuple[list[Trace], dict[str, str]]:
    """Record probes of whole steps into ``folder``; returns them with what is true of all of them."""
    if geometry not in GEOMETRIES:
        raise InvalidInputError(f"geometry {geometry!r} is not known; choose of {', '.join(GEOMETRIES)}")
    folder.mkdir(parents=True, exist_ok=True)
    with _opened(device) as opened:
        model = build_reference(GEOMETRIES[geometry], opened)
        try:
            traces = StepProbes(model).record_within(seconds, largest, sequences)
        finally:
            model.close()
        provenance = {
            "allocator": "native, default settings",
            "card": opened.card.name,
            "commit": _commit(),
            "device": opened.name,
            "geometry": model.geometry.name,
            "stack": f"torch {torch.__version__}",
            "topology": model.topology.label,
        }
    for trace in traces:
        save_trace(trace, folder / trace.source)
    return traces, provenance


def _commit() -> str:
    """Return the commit that recorded, or say that there is none to name."""
    try:
        subject = subject_of_checkout(installed_checkout())
    except QualificationError:
        return "installed package"
    return f"{subject.commit}{' with changes' if subject.dirty else ''}"


@contextmanager
def _opened(name: str) -> Iterator[Device]:
    kind, _, which = name.partition(":")
    if kind == "virtual":
        virtual = VirtualDevice(which or "h200")
        try:
            yield virtual
        finally:
            virtual.close()
    elif kind == "cuda":
        from trainer_rank.devices.cuda import CudaDevice

        yield CudaDevice(int(which or 0))
    else:
        raise UnsupportedError(f"device {name!r} does not exist; choose virtual:CARD or cuda:INDEX")
