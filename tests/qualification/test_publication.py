"""Commit statuses against an API that behaves as GitHub's does."""

from collections.abc import Iterator

import msgspec
import pytest

from qualification.errors import ConfigurationError
from qualification.gate import decide
from qualification.publication import Status, StatusApi, repository_of, status_of
from tests.qualification.test_gate import GOOD, spoil
from tests.statuses import Statuses, statuses_api

COMMIT = "c" * 40
HELD = Status(context="qualify/forecast", state="pending", description="held: 0 of 1 approvals")
TOKEN = "token-that-must-not-be-seen"


@pytest.fixture
def statuses() -> Iterator[Statuses]:
    with statuses_api() as held:
        yield held


def api(held: Statuses, waits: list[float] | None = None) -> StatusApi:
    return StatusApi(held.address, "example/trainer", TOKEN, sleep=(waits if waits is not None else []).append)


@pytest.mark.parametrize(
    ("rows", "state", "start"),
    [
        ((), "success", "adopted: "),
        (("unapproved",), "pending", "held: 0 of 1 approvals"),
        (("workload_failed",), "failure", "rejected: full_step FAILED"),
        (("tampered",), "error", "held: entry 3 does not hash"),
    ],
)
def test_each_decision_has_its_state(rows: tuple[str, ...], state: str, start: str) -> None:
    inputs = spoil(*rows)
    status = status_of(inputs, decide(inputs))
    assert (status.state, status.context) == (state, "qualify/forecast")
    assert status.description.startswith(start)


def test_a_long_reason_is_cut_to_what_the_api_takes() -> None:
    inputs = msgspec.structs.replace(GOOD, rejected_by=("n" * 500,))
    assert len(status_of(inputs, decide(inputs)).description) == 140


def test_equal_content_is_posted_once_and_other_content_again(statuses: Statuses) -> None:
    assert api(statuses).publish(COMMIT, HELD) == (True, True, None)
    for _ in range(9):
        assert api(statuses).publish(COMMIT, HELD) == (True, False, None)
    adopted = msgspec.structs.replace(HELD, state="success", description="adopted: every condition is met")
    assert api(statuses).publish(COMMIT, adopted) == (True, True, None)
    assert api(statuses).publish(COMMIT, HELD) == (True, True, None)
    assert [one["state"] for one in statuses.posted[COMMIT]] == ["pending", "success", "pending"]


def test_a_status_goes_to_exactly_its_commit(statuses: Statuses) -> None:
    api(statuses).publish("d" * 40, HELD)
    assert list(statuses.posted) == ["d" * 40]
    assert statuses.asked[-1][:2] == ("POST", f"/repos/example/trainer/statuses/{'d' * 40}")


def test_the_limit_of_the_api_is_not_published_and_no_error(statuses: Statuses) -> None:
    statuses.limit = 0
    assert api(statuses).publish(COMMIT, HELD) == (False, False, "the API answered 422 to POST")


@pytest.mark.parametrize(
    ("script", "published", "waits"),
    [
        ([(500, {})], True, [1.0]),
        ([(500, {}), (502, {})], False, [1.0]),
        ([(403, {"Retry-After": "2"})], True, [2.0]),
        ([(403, {"Retry-After": "3600"})], False, []),
        ([(403, {})], False, []),
        ([(401, {})], False, []),
        ([(404, {})], False, []),
        ([(302, {"Location": "http://127.0.0.1:1/elsewhere"})], False, []),
    ],
)
def test_what_the_api_does_is_an_outcome(
    statuses: Statuses, script: list[tuple[int, dict[str, str]]], published: bool, waits: list[float]
) -> None:
    waited: list[float] = []
    statuses.script = list(script)
    outcome = api(statuses, waited).publish(COMMIT, HELD)
    assert (outcome.published, waited) == (published, waits)
    assert TOKEN not in str(outcome)
    if not published:
        assert outcome.reason == f"the API answered {script[-1][0]} to GET"


def test_an_api_that_is_not_there_is_an_outcome() -> None:
    outcome = StatusApi("http://127.0.0.1:9", "example/trainer", TOKEN).publish(COMMIT, HELD)
    assert outcome == (False, False, "the API could not be used: ConnectionRefusedError")


@pytest.mark.parametrize("base", ["http://api.example.org", "ftp://127.0.0.1", "file:///etc/passwd", ""])
def test_a_token_is_sent_by_https_only(base: str) -> None:
    with pytest.raises(ConfigurationError, match="must be reached by https"):
        StatusApi(base, "example/trainer", TOKEN)


def test_the_repository_is_taken_from_the_label_of_a_source_on_github() -> None:
    assert repository_of("github.com/example/trainer.git") == "example/trainer"
    for label in ("local:trainer", "gitlab.com/example/trainer", "github.com/example", "github.com/a/b/c"):
        with pytest.raises(ConfigurationError, match="name the repository with --repository"):
            repository_of(label)
