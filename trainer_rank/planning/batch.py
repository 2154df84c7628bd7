"""The batch to plan: lengths, groups and slots, from a named incident, a file or standard input. Pure."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from trainer_rank.errors import InvalidInputError
from trainer_rank.requests import RequestShape

_KEYS = frozenset({"lengths", "groups", "slots", "context"})


@dataclass(frozen=True)
class Batch:
    """What is to be run: ``groups`` of request shapes that no micro-batch divides, on ``context`` ranks.

    Lengths are rows really executed (packed); ``logical_tokens`` counts shared prefixes as often as they are asked for.
    """

    name: str
    groups: tuple[tuple[RequestShape, ...], ...]
    context: int
    logical_tokens: int
    note: str = ""

    @property
    def shapes(self) -> tuple[RequestShape, ...]:
        """Every request, group by group."""
        return tuple(shape for group in self.groups for shape in group)


def incident_names() -> tuple[str, ...]:
    """Return the batches that come with the package."""
    return tuple(sorted(item.name[:-5] for item in files(__package__).joinpath("incidents").iterdir()))


def load_incident(name: str) -> Batch:
    """Return a named incident's batch; its note says what the report left open."""
    path = files(__package__).joinpath("incidents").joinpath(f"{name}.toml")
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    lengths = document["lengths"]
    packed = _shared(lengths, document["packed_tokens"]) if "packed_tokens" in document else lengths
    slots = [document["slots"][index % len(document["slots"])] for index in range(len(lengths))]
    note = "; ".join(text for text in (document["source"], document["construction"]) if text)
    groups = _groups(packed, document["groups"], slots)
    return Batch(name, groups, document["context"], sum(lengths), note)


def parse_batches(text: bytes, source: str) -> tuple[Batch, ...]:
    """Read one batch as JSON, or one a line as JSON lines; InvalidInputError names the line and what is wrong."""
    try:
        decoded = text.decode()
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{source}: not text at byte {error.start}; give JSON") from None
    if not decoded.strip():
        raise InvalidInputError(f'{source}: empty; give {{"lengths": [...], "groups": [[index, ...], ...]}}')
    try:
        return (_batch(_parsed(decoded), source),)
    except json.JSONDecodeError as error:
        lines = [(number, line) for number, line in enumerate(decoded.splitlines(), 1) if line.strip()]
        if len(lines) < 2 or not error.msg.startswith("Extra data"):
            place = f"line {error.lineno} column {error.colno}"
            raise InvalidInputError(f"{source}: not JSON at {place} ({error.msg})") from None
        return tuple(_line(line, f"{source} line {number}") for number, line in lines)
    except (RecursionError, ValueError) as error:
        if isinstance(error, InvalidInputError):
            raise
        raise InvalidInputError(f"{source}: not readable as JSON ({error})") from None


def _parsed(text: str) -> object:
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} is given twice")
        found[key] = value
    return found


def _line(line: str, source: str) -> Batch:
    try:
        value = _parsed(line)
    except ValueError as error:
        raise InvalidInputError(f"{source}: not JSON ({error})") from None
    return _batch(value, source)


def _batch(value: object, source: str) -> Batch:
    if not isinstance(value, dict):
        raise InvalidInputError(f"{source}: a batch is an object with lengths and groups, not {type(value).__name__}")
    if unknown := sorted(value.keys() - _KEYS):
        raise InvalidInputError(f"{source}: unknown key {unknown[0]!r}; known are {', '.join(sorted(_KEYS))}")
    lengths = _lengths(value.get("lengths"), source)
    slots = value.get("slots", ["policy"] * len(lengths))
    if not isinstance(slots, list) or len(slots) != len(lengths) or not all(isinstance(s, str) and s for s in slots):
        raise InvalidInputError(f"{source}: slots must be one name per request")
    context = value.get("context", 1)
    if type(context) is not int or context < 1:
        raise InvalidInputError(f"{source}: context is {_shown(context)}; give the number of context-parallel ranks")
    indices = _indices(value.get("groups", [list(range(len(lengths)))]), len(lengths), source)
    return Batch(source, _groups(lengths, indices, slots), context, sum(lengths))


def _lengths(value: object, source: str) -> list[int]:
    if not isinstance(value, list) or not value:
        raise InvalidInputError(f"{source}: lengths must be a list of at least one request")
    for index, length in enumerate(value):
        if type(length) is not int or length < 1:
            raise InvalidInputError(f"{source}: request {index} has length {_shown(length)}; give at least one token")
    return value


def _indices(value: object, count: int, source: str) -> list[list[int]]:
    if not isinstance(value, list) or not all(isinstance(group, list) and group for group in value):
        raise InvalidInputError(f"{source}: groups must be lists of request indices, none of them empty")
    seen: set[int] = set()
    for number, group in enumerate(value):
        for index in group:
            if type(index) is not int or not 0 <= index < count:
                raise InvalidInputError(
                    f"{source}: group {number} holds {_shown(index)}; request indices go from 0 to {count - 1}"
                )
            if index in seen:
                raise InvalidInputError(f"{source}: request {index} is in the groups twice; name each exactly once")
            seen.add(index)
    if missing := sorted(set(range(count)) - seen):
        raise InvalidInputError(f"{source}: request {missing[0]} is in no group; name each exactly once")
    return value


def _groups(
    lengths: Sequence[int], indices: Sequence[Sequence[int]], slots: Sequence[str]
) -> tuple[tuple[RequestShape, ...], ...]:
    return tuple(
        tuple(RequestShape(index, lengths[index], slots[index], group=str(number)) for index in group)
        for number, group in enumerate(indices)
    )


def _shared(lengths: Sequence[int], packed: int) -> list[int]:
    """Cut every length in proportion, so that ``packed`` rows remain in all; the last request takes the rounding."""
    total = sum(lengths)
    ends = [packed * sum(lengths[: index + 1]) // total for index in range(len(lengths))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _shown(value: Any) -> str:  # noqa: ANN401 - whatever stood in the JSON
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
