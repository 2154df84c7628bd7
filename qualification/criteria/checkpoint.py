"""Read the checkpoints that a worker published, as they were hashed after it had ended."""

from __future__ import annotations

from collections.abc import Mapping

from qualification.criteria.observation import Observation
from qualification.criteria.tensors import StoredTensor, read_tensors
from qualification.criteria.thresholds import Measured
from qualification.figures import Unreadable

Tensors = Mapping[str, StoredTensor] | Unreadable


def tensors_of(observation: Observation, name: str) -> Tensors:
    """Return the tensors of an artifact, or why they cannot be read."""
    if name not in observation.artifacts:
        return Unreadable(f"is unknown: {name} is missing")
    tensors = read_tensors(observation.artifacts[name])
    return Unreadable(f"is unknown: {name} {tensors.reason}") if isinstance(tensors, Unreadable) else tensors


def differing(one: Tensors, other: Tensors) -> list[str] | Unreadable:
    """Name the tensors that are not the same, bit for bit, in two files."""
    if isinstance(one, Unreadable):
        return one
    if isinstance(other, Unreadable):
        return other
    return [key for key in sorted(one.keys() | other.keys()) if one.get(key) != other.get(key)]


def finite_tensors_of(observation: Observation, name: str) -> Tensors:
    """Return the tensors of an artifact if every element of them is a finite number."""
    tensors = tensors_of(observation, name)
    if isinstance(tensors, Unreadable):
        return tensors
    flaws = ((key, tensor.flaw()) for key, tensor in tensors.items())
    flawed = next((f"{key} of {name} {flaw}" for key, flaw in flaws if flaw), None)
    return Unreadable(f"is unknown: {flawed}") if flawed else tensors


def optimizer_steps(tensors: Tensors, slot: str) -> Measured:
    """Return how often a slot's optimizer stepped, by its own counts; it must have moments other than zero."""
    if isinstance(tensors, Unreadable):
        return tensors
    counts = [tensor.scalar() for key, tensor in tensors.items() if key.startswith("step/")]
    moments = [tensor.values() for key, tensor in tensors.items() if key.startswith("exp_avg/")]
    if not counts or len(set(map(str, counts))) != 1 or isinstance(counts[0], Unreadable):
        return Unreadable(f"is unknown: the checkpoint of slot {slot} holds no single step count")
    if not any(any(values) for values in moments if not isinstance(values, Unreadable)):
        return Unreadable(f"is unknown: the checkpoint of slot {slot} holds no moment other than zero")
    return int(counts[0]) if counts[0].is_integer() else Unreadable(f"is {counts[0]}")
