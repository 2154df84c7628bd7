"""Read measured figures from raw JSON without letting an unreadable one pass, or take the others down with it.

JSON as written by measuring programs holds ``NaN``, ``Infinity``, ``1e999``, booleans, quoted numbers and keys given
twice. Each such value becomes an ``Unreadable`` that says why; every other value of the same document is kept.
"""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal

import msgspec

from qualification.records import Figure

_DECIMAL = re.compile(r"-?(0|[1-9]\d{0,38})(\.\d{1,18})?")


class Unreadable(msgspec.Struct, frozen=True):
    """A value that is there but says nothing; ``reason`` completes the sentence "it ...", for example "is NaN"."""

    reason: str


def read_object(text: bytes | str) -> dict[str, object] | Unreadable:
    """Parse one JSON object; a key given twice becomes ``Unreadable`` under that key, a broken document as a whole."""
    try:
        parsed = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        return Unreadable(f"is not JSON ({str(error).splitlines()[0]})")
    return parsed if isinstance(parsed, dict) else Unreadable("is not a JSON object")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    seen: dict[str, object] = {}
    for key, value in pairs:
        seen[key] = Unreadable("is given twice") if key in seen else value
    return seen


def read_figure(raw: object) -> int | str | Unreadable:
    """Return a raw JSON number as an integer or decimal string; anything else is ``Unreadable``.

    A float keeps its shortest exact decimal form. Booleans, quoted numbers, null and numbers that are not finite are no
    measurements, whatever they look like.
    """
    if isinstance(raw, Unreadable):
        return raw
    if raw is None:
        return Unreadable("is missing")
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        return Unreadable(f"is no number but {type(raw).__name__} {str(raw)[:40]!r}")
    if isinstance(raw, int):
        return raw if abs(raw) < 2**53 else Unreadable("is larger than 53 bits")
    if not math.isfinite(raw):
        return Unreadable("is NaN" if math.isnan(raw) else "is infinite")
    return _decimal_text(raw)


def _decimal_text(value: float) -> str | Unreadable:
    text = format(Decimal(repr(value)), "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return text if _DECIMAL.fullmatch(text) else Unreadable("has more digits than a decimal figure may")


def number(figure: Figure | Unreadable) -> Decimal | Unreadable:
    """Return a recorded figure as an exact number; a missing or malformed one is ``Unreadable``."""
    if isinstance(figure, Unreadable):
        return figure
    if figure is None:
        return Unreadable("was not measured")
    if isinstance(figure, bool):
        return Unreadable("is a boolean")
    if isinstance(figure, int):
        return Decimal(figure)
    if _DECIMAL.fullmatch(figure):
        return Decimal(figure)
    return Unreadable(f"is no decimal figure: {figure[:40]!r}")
