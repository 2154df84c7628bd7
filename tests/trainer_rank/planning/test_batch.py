from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_rank.errors import InvalidInputError
from trainer_rank.planning.batch import incident_names, load_incident, parse_batches


def test_the_incidents_hold_what_the_reports_state() -> None:
    assert incident_names() == ("incident-a", "incident-b")
    one, two = load_incident("incident-a"), load_incident("incident-b")
    assert (len(one.shapes), one.logical_tokens, sum(s.length for s in one.shapes)) == (19, 1_073_093, 359_965)
    assert (len(two.shapes), two.logical_tokens, sum(s.length for s in two.shapes)) == (19, 1_073_093, 1_073_093)
    assert (one.context, two.context) == (1, 2)
    assert [sum(s.length for s in group) for group in two.groups] == [779_067, 294_026]
    slots = {slot: sum(s.length for s in two.groups[0] if s.slot == slot) for slot in ("policy", "adversary")}
    assert slots == {"policy": 400_511, "adversary": 378_556}
    assert "construction" not in one.note and "prefix tree" in one.note


def parse(**keys: Any) -> None:
    parse_batches(json.dumps(keys).encode(), "here")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "lengths"),
        ({"lengths": []}, "at least one request"),
        ({"lengths": "many"}, "lengths"),
        ({"lengths": [4, 0]}, "request 1 has length 0"),
        ({"lengths": [-7]}, "request 0 has length -7"),
        ({"lengths": [True]}, "length True"),
        ({"lengths": [1.0]}, "length 1.0"),
        ({"lengths": [float("nan")]}, "length nan"),
        ({"lengths": [float("inf")]}, "length inf"),
        ({"lengths": [None]}, "length None"),
        ({"lengths": [1, 2], "groups": [[0]]}, "request 1 is in no group"),
        ({"lengths": [1, 2], "groups": [[0, 1], [1]]}, "request 1 is in the groups twice"),
        ({"lengths": [1, 2], "groups": [[0, 2], [1]]}, "group 0 holds 2"),
        ({"lengths": [1, 2], "groups": [[0, -1]]}, "group 0 holds -1"),
        ({"lengths": [1, 2], "groups": [[0, 1], []]}, "none of them empty"),
        ({"lengths": [1, 2], "groups": [[0, "1"]]}, "group 0 holds '1'"),
        ({"lengths": [1, 2], "groups": [0, 1]}, "lists of request indices"),
        ({"lengths": [1, 2], "groups": []}, "request 0 is in no group"),
        ({"lengths": [1], "slots": []}, "one name per request"),
        ({"lengths": [1], "context": 0}, "context is 0"),
        ({"lengths": [1], "context": 1.5}, "context is 1.5"),
        ({"lengths": [1], "length": [1]}, "unknown key 'length'"),
    ],
)
def test_what_is_wrong_in_a_batch_is_named(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words) as caught:
        parse(**keys)
    assert str(caught.value).startswith("here")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"\xff", "byte 0"),
        (b'{"lengths": [1', "line 1 column"),
        (b'{"lengths": [1]}\n{"lengths": [', "line 2"),
        (b'{"lengths": [1]}\n{"lengths": [0]}', "line 2: request 0 has length 0"),
        (b"[" * 100_000, "not readable"),
        (b'{"lengths": [' + b"9" * 5000 + b"]}", "not readable"),
        (b"7", "not int"),
    ],
)
def test_text_that_is_no_batch_names_the_place(text: bytes, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        parse_batches(text, "here")


def test_json_lines_are_several_batches() -> None:
    one, two = parse_batches(b'{"lengths": [4, 5]}\n\n{"lengths": [6], "context": 2, "slots": ["a"]}\n', "here")
    assert (one.name, two.name) == ("here line 1", "here line 3")
    assert [shape.length for shape in one.shapes] == [4, 5]
    assert (two.context, two.shapes[0].slot) == (2, "a")


@given(st.lists(st.integers(1, 2**70), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_every_request_keeps_its_index_and_exact_length(lengths: list[int], random: Any) -> None:
    order = list(range(len(lengths)))
    random.shuffle(order)
    cut = random.randint(0, len(order))
    groups = [group for group in (order[:cut], order[cut:]) if group]
    (batch,) = parse_batches(json.dumps({"lengths": lengths, "groups": groups}).encode(), "here")
    assert [[shape.index for shape in group] for group in batch.groups] == groups
    assert {shape.index: shape.length for shape in batch.shapes} == dict(enumerate(lengths))
    assert batch.logical_tokens == sum(lengths)
