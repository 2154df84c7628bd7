"""Requests are validated inside the flow too, field by field, before anything is leased or recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows.request import parse_parameters, read_request, validate
from qualification.errors import ConfigurationError

HEAD = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"head": "0123456"}, "'0123456' is not a commit id"),
        ({"head": HEAD.upper()}, "in lower case"),
        ({"head": HEAD[:-1] + "g"}, "not a commit id"),
        ({"head": HEAD + "\n"}, "not a commit id"),
        ({"head": "--upload-pack=x"}, "not a commit id"),
        ({"head": 7}, "parameter head 7: Expected `str | null`, got `int`"),
        ({"head": HEAD, "repository": "file:///etc"}, "neither a local folder"),
        ({"repository": "."}, "without a head"),
        ({"reference": "main"}, "not a full name"),
        ({"reference": "refs/pull/-1/head; x"}, "not a full name"),
        ({"policy": None}, "parameter policy None: Expected `str`"),
        ({"ground": ""}, "parameter ground '': Invalid enum value"),
        ({"rules": ""}, "no gate rules are named ''"),
        ({"workloads": [""]}, "workload '' is not known"),
        ({"workloads": "full_step"}, "parameter workloads 'full_step': Expected `array`"),
        ({"parameters": {"updates": 1.5}}, "parameter parameters"),
        ({"parameters": {"updates": 0}}, "updates of workload full_step is 0; give a whole number of 1 to 1000"),
        ({"parameters": {"updates": "1"}}, "updates of workload full_step is '1'"),
        ({"parameters": {"card": "h200"}}, "parameter card is not known"),
        ({"timeout_seconds": 0}, "parameter timeout_seconds 0"),
        ({"timeout_seconds": "60"}, "parameter timeout_seconds '60'"),
        ({"run": "../../etc"}, "parameter run '../../etc'"),
        ({"once_a_day": "yes"}, "parameter once_a_day 'yes'"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_rule(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        validate(read_request(given))
    assert words in str(refused.value)


def test_what_is_left_out_is_filled_in() -> None:
    request, rules = validate(read_request({"head": None, "repository": None}))
    assert request.workloads == tuple(dict.fromkeys(required.name for required in rules.rules.workloads))
    assert request.requested_by


def test_the_flow_validates_for_itself(with_server: Path) -> None:
    from flows.qualify import qualify

    with pytest.raises(ConfigurationError, match="'0123456' is not a commit id"):
        qualify(head="0123456")
    assert not (with_server / "evidence.db").exists()


@pytest.mark.parametrize("pair", ["updates", "=1", "a b=1", "updates=", "1x=2"])
def test_a_parameter_is_a_name_and_a_value(pair: str) -> None:
    with pytest.raises(ConfigurationError, match="not NAME=VALUE"):
        parse_parameters([pair])


def test_a_parameter_is_given_once() -> None:
    with pytest.raises(ConfigurationError):
        parse_parameters(["updates=1", "updates=2"])
    assert parse_parameters(["updates=1", "card=h200", "shift=-3"]) == {"updates": 1, "card": "h200", "shift": -3}
