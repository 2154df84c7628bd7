"""Policies are documents: strictly read, known by digest, refused by name when not built."""

import hashlib
from importlib.resources import files

import pytest

from trainer_rank.admission.ladder import ladder
from trainer_rank.errors import InvalidInputError, UnsupportedError
from trainer_rank.policies import HandOff, load_policy, parse_policy, policy_names

FORECAST = files("trainer_rank.policies").joinpath("forecast.toml").read_bytes()


def test_every_shipped_policy_reads_and_is_known_by_the_digest_of_its_document() -> None:
    assert set(policy_names()) == {"none", "unconditional", "trigger-3-percent", "budgeted", "forecast"}
    for name in policy_names():
        policy = load_policy(name)
        document = files("trainer_rank.policies").joinpath(f"{name}.toml").read_bytes()
        assert (policy.name, policy.sha256) == (name, hashlib.sha256(document).hexdigest())
        ladder(policy.ladder)


def test_what_each_policy_does_is_in_its_document() -> None:
    assert load_policy("none").hand_off is HandOff.NEVER
    assert load_policy("unconditional").hand_off is HandOff.ALWAYS
    assert load_policy("trigger-3-percent").release_per_million == 50_000
    assert load_policy("budgeted").release_on_refusal
    assert load_policy("forecast").claims_libraries


@pytest.mark.parametrize("name", ["guess", "../forecast", "", "forecast.toml"])
def test_a_policy_that_is_not_built_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"policy '{name}' is not built; choose of budgeted, forecast"):
        load_policy(name)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"version = 1", b"version = 2", "version is 2; this version reads 1"),
        (b"reserve_bytes = 16777216", b"reserve_bytes = -1", "admission.reserve_bytes is -1"),
        (b"reserve_bytes = 16777216", b"reserve_bytes = 1.5", "admission.reserve_bytes is 1.5; give a int"),
        (b"reserve_bytes = 16777216", b"", "admission.reserve_bytes is missing"),
        (b"reserve_bytes", b"reserve_byte = 1\nreserve_bytes", "admission.reserve_byte is not known"),
        (b'hand_off = "coverage"', b'hand_off = "maybe"', "release.hand_off is 'maybe'"),
        (b"[[16],", b"[[0],", r"probing.lengths holds \[0\]"),
        (b"[probing]", b"[probing", "is not TOML"),
    ],
)
def test_a_malformed_document_is_refused_by_its_setting(old: bytes, new: bytes, message: str) -> None:
    assert old in FORECAST
    with pytest.raises(InvalidInputError, match=message):
        parse_policy(FORECAST.replace(old, new, 1))
