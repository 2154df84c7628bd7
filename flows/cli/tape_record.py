"""Record probes of the reference model, planned within a stated time, and fit a tape from them. Needs torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from qualification.errors import QualificationError
from qualification.subject import installed_checkout, subject_of_checkout
from trainer_rank.admission.budget import Status, Term
from trainer_rank.allocator.trace import save_trace
from trainer_rank.devices.protocol import Device
from trainer_rank.devices.steady import Steady
from trainer_rank.devices.virtual import VirtualDevice
from trainer_rank.errors import InvalidInputError, UnsupportedError
from trainer_rank.models.reference import SMALL, TINY, build_reference
from trainer_rank.recording import StepProbes
from trainer_rank.tapes import Tape, fit

GEOMETRIES = {"small": SMALL, "tiny": TINY}


def record_probes(
    folder: Path, *, device: str, geometry: str, seconds: float, largest: int, sequences: int
) -> tuple[list[Steady], Tape]:
    """Record probes of whole steps into ``folder``; returns them with the tape that they give."""
    if geometry not in GEOMETRIES:
        raise InvalidInputError(f"geometry {geometry!r} is not known; choose of {', '.join(GEOMETRIES)}")
    with _opened(device) as opened:
        model = build_reference(GEOMETRIES[geometry], opened)
        try:
            probes = StepProbes(model).record_within(seconds, largest, sequences)
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
    folder.mkdir(parents=True, exist_ok=True)
    for probe in probes:
        save_trace(probe.trace, folder / probe.trace.source)
    tape = fit([probe.trace for probe in probes], provenance)
    return probes, replace(tape, claims=_claims(probes, opened.name))


def _claims(probes: Sequence[Steady], device: str) -> tuple[Term, ...]:
    """Return what libraries took outside PyTorch's allocator in each phase when it first ran."""
    sizes: dict[str, int] = {}
    for probe in probes:
        for phase, size in probe.libraries:
            sizes[phase] = max(size, sizes.get(phase, 0))
    source = f"growth outside PyTorch on {device}"
    return tuple(Term(phase, size, Status.MEASURED, source) for phase, size in sizes.items())


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

        if not (which or "0").isdecimal():
            raise InvalidInputError(f"device {name!r} names no card; give cuda:INDEX, such as cuda:0")
        yield CudaDevice(int(which or 0))
    else:
        raise UnsupportedError(f"device {name!r} does not exist; choose virtual:CARD or cuda:INDEX")
