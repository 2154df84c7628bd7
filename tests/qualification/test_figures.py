import json
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qualification.figures import Unreadable, number, read_figure, read_object


@pytest.mark.parametrize(
    ("literal", "reason"),
    [
        ("NaN", "is NaN"),
        ("Infinity", "is infinite"),
        ("-Infinity", "is infinite"),
        ("1e999", "is infinite"),
        ("null", "is missing"),
        ('"12"', "is no number but str '12'"),
        ("true", "is no number but bool 'True'"),
        ("[1]", "is no number but list '[1]'"),
        ("9007199254740992", "is larger than 53 bits"),
        ("1e-300", "has more digits than a decimal figure may"),
    ],
)
def test_a_value_that_says_nothing_is_unreadable_and_keeps_its_neighbour(literal: str, reason: str) -> None:
    read = read_object(f'{{"loss": {literal}, "updates": 3}}')
    assert isinstance(read, dict)
    assert read_figure(read["loss"]) == Unreadable(reason)
    assert read_figure(read["updates"]) == 3


def test_a_key_given_twice_is_unreadable_under_that_key_only() -> None:
    read = read_object('{"loss": 1, "loss": 1, "updates": 3}')
    assert isinstance(read, dict)
    assert read_figure(read["loss"]) == Unreadable("is given twice")
    assert read_figure(read["updates"]) == 3


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", '{"a": }', "[" * 100_000, "1" * 5000])
def test_a_broken_document_is_unreadable_as_a_whole(text: str) -> None:
    assert isinstance(read_object(text), Unreadable)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_keeps_its_exact_shortest_value_or_is_refused(value: float) -> None:
    figure = read_figure(json.loads(json.dumps(value)))
    assert isinstance(figure, Unreadable) or (isinstance(figure, str) and float(figure) == value)


@given(st.integers(-(2**53) + 1, 2**53 - 1))
def test_integers_come_back_as_numbers(value: int) -> None:
    figure = read_figure(value)
    assert figure == value
    assert not isinstance(figure, Unreadable)
    assert number(figure) == Decimal(value)


@pytest.mark.parametrize("figure", [None, "NaN", "1e3", " 1", "1.", "", "Infinity", "0x1", "１"])
def test_a_recorded_figure_that_is_no_decimal_is_unreadable(figure: str | None) -> None:
    assert isinstance(number(figure), Unreadable)
