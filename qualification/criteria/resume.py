"""Judge a continuation: the group was published whole, taken over complete, and continued by exactly one update.

States are compared tensor by tensor from the files of both processes, those of the first as they were hashed before the
second began. Counts of work rest on the replay of recordings and on the optimizers' own counts in the checkpoints.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping

from qualification.criteria.checkpoint import Tensors, differing, finite_tensors_of, optimizer_steps, tensors_of
from qualification.criteria.observation import Observation, StampedEvent
from qualification.criteria.releases import total
from qualification.criteria.thresholds import Measured, ended, exactly, left_after_close, none, some
from qualification.figures import Unreadable, read_object
from qualification.parameters import parameter
from qualification.records import Criterion

SLOTS = ("generator", "auxiliary")
DAMAGES = ("missing", "torn", "altered")
PUBLISHED, LOADED, CONTINUED = "v1/", "loaded/", "v2/"
_OPTIMIZER = ("master", "exp_avg", "exp_avg_sq", "step")
_SUFFIX = ".safetensors"
_OTHERS = ("random", "custom")
"""What a group holds beside its slots: generators, and the caller's own state."""


def judge(observation: Observation) -> list[Criterion]:
    """Return every criterion of the workload, in the order in which people read them."""
    first = observation.earlier
    if first is None:
        return [ended(observation, "publisher_exit_code"), exactly("continuations", 1, 0, "processes")]
    updates, batches = (parameter("resume", observation.parameters, name) for name in ("updates", "batches"))
    before, after = _slots(first, PUBLISHED), _slots(observation, CONTINUED)
    return [
        ended(first, "publisher_exit_code"),
        ended(observation),
        *_steps("published_steps", updates, before),
        _listed("published_files_wrong", _wrong_files(first), "files"),
        _listed("published_state_missing", _missing(first, before), "tensors"),
        exactly("damaged_groups_refused", len(DAMAGES), len(_refused(observation)), "groups"),
        some("tensors_compared", _compared(first), "tensors"),
        _listed("tensors_that_differ", _differences(first, observation), "tensors"),
        *_steps("optimizer_steps", updates + 1, after),
        _listed("slots_unchanged", _unchanged(before, after), "slots"),
        exactly("published_backwards", updates * batches, total(first, lambda found: found.backward), "backwards"),
        exactly("backwards", batches, total(observation, lambda found: found.backward), "backwards"),
        exactly("batches_drawn", batches, _digests(observation, len), "batches"),
        none("batches_repeated", _repeated(first, observation), "batches"),
        *(
            none(f"{name}{said}", figure, unit)
            for name, each in (("published_", first), ("", observation))
            for said, unit, figure in _safety(each)
        ),
    ]


def _slots(observation: Observation, group: str) -> dict[str, Tensors]:
    return {slot: finite_tensors_of(observation, f"{group}slot-{slot}{_SUFFIX}") for slot in SLOTS}


def _steps(name: str, wanted: int, states: Mapping[str, Tensors]) -> Iterator[Criterion]:
    for slot, tensors in states.items():
        yield exactly(f"{name}_{slot}", wanted, optimizer_steps(tensors, slot), "steps")


def _listed(name: str, found: list[str] | Unreadable, unit: str) -> Criterion:
    """Judge that a list is empty; its first entry is the reason."""
    if isinstance(found, Unreadable):
        return none(name, found, unit)
    return none(name, len(found), unit, found[0] if found else None)


def _wrong_files(first: Observation) -> list[str] | Unreadable:
    """Name the files of the published group that differ from its manifest, or that only one of them has."""
    manifest = first.artifacts.get(f"{PUBLISHED}manifest.json")
    if manifest is None:
        return Unreadable("is unknown: the group has no manifest")
    content = read_object(manifest.read_bytes())
    listed = content if isinstance(content, Unreadable) else content.get("files")
    if not isinstance(listed, Mapping):
        return Unreadable("is unknown: the manifest lists no files")
    files = {name.removeprefix(PUBLISHED): path for name, path in first.artifacts.items() if name.startswith(PUBLISHED)}
    hashes = {
        name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items() if name != "manifest.json"
    }
    stated = {name: entry.get("sha256") if isinstance(entry, Mapping) else None for name, entry in listed.items()}
    return [f"{name} is not what the manifest lists" for name in sorted(hashes.keys() | stated.keys())
            if hashes.get(name) != stated.get(name)]  # fmt: skip


def _missing(first: Observation, slots: Mapping[str, Tensors]) -> list[str] | Unreadable:
    """Name what a complete canonical state lacks: masters, moments and counts of each parameter, generators, custom."""
    lacking: list[str] = []
    for slot, tensors in slots.items():
        if isinstance(tensors, Unreadable):
            return tensors
        names = [key.removeprefix("parameter/") for key in tensors if key.startswith("parameter/")]
        wanted = {f"{part}/{name}" for part in _OPTIMIZER for name in names} or {"parameter"}
        lacking += [f"slot {slot} has no {key}" for key in sorted(wanted - tensors.keys())]
    for name in _OTHERS:
        tensors = tensors_of(first, f"{PUBLISHED}{name}{_SUFFIX}")
        if isinstance(tensors, Unreadable) or not tensors:
            lacking.append(f"the group has no {name} state")
    return lacking


def _group_files(observation: Observation, group: str) -> set[str]:
    return {
        name.removeprefix(group) for name in observation.artifacts if name.startswith(group) and name.endswith(_SUFFIX)
    }


def _compared(first: Observation) -> Measured:
    """Count the tensors of the published group."""
    number = 0
    for file in _group_files(first, PUBLISHED):
        tensors = tensors_of(first, f"{PUBLISHED}{file}")
        if isinstance(tensors, Unreadable):
            return tensors
        number += len(tensors)
    return number


def _differences(first: Observation, second: Observation) -> list[str] | Unreadable:
    """Name every tensor that was not taken over as published: bit for bit, of the same type, none more, none less."""
    found: list[str] = []
    for file in sorted(_group_files(first, PUBLISHED) | _group_files(second, LOADED)):
        keys = differing(tensors_of(first, f"{PUBLISHED}{file}"), tensors_of(second, f"{LOADED}{file}"))
        if isinstance(keys, Unreadable):
            return keys
        found += [f"{key} of {file} differs" for key in keys]
    return found


def _unchanged(before: Mapping[str, Tensors], after: Mapping[str, Tensors]) -> list[str] | Unreadable:
    """Name the slots whose parameters the update left as they were."""
    still: list[str] = []
    for slot, tensors in before.items():
        later = after[slot]
        if isinstance(tensors, Unreadable):
            return tensors
        if isinstance(later, Unreadable):
            return later
        names = [key for key in tensors if key.startswith("parameter/")]
        if all(tensors[key] == later.get(key) for key in names):
            still.append(f"slot {slot} has the same parameters")
    return still


def _refused(observation: Observation) -> set[str]:
    """Return the damages that were refused by the name of the damaged file."""
    said = (event for event in observation.of("refused") if (event.text("file") or "?") in (event.text("text") or ""))
    return {damage for event in said if (damage := event.text("damage")) in DAMAGES}


def _digests(observation: Observation, figure: Callable[[list[str]], int]) -> Measured:
    digests = [_digest(event) for event in observation.of("batch")]
    known = [digest for digest in digests if digest]
    return figure(known) if len(known) == len(digests) else Unreadable("is unknown: a batch came without its digest")


def _digest(event: StampedEvent) -> str | None:
    return event.text("sha256")


def _repeated(first: Observation, second: Observation) -> Measured:
    """Count the batches of the continuation that were drawn before."""
    earlier = {_digest(event) for event in first.of("batch")}
    return _digests(second, lambda digests: sum(digest in earlier for digest in digests))


def _safety(observation: Observation) -> Iterator[tuple[str, str, Measured]]:
    yield "recordings_not_exact", "recordings", total(observation, lambda replay: int(not replay.exact))
    yield "out_of_memory_events", "events", total(observation, lambda replay: replay.out_of_memory)
    yield "allocated_after_close", "B", left_after_close(observation)
