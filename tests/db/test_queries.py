"""The questions people ask, on both databases, by function and by SQL view."""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import Connection, text

from db import queries, views
from db.engine import reading
from qualification.approvals import NEVER
from qualification.records import Approval, Criterion, Ground, Lease, ReceiptStatus, Verdict
from qualification.reporting.difference import differences
from qualification.reporting.lines import Filter
from qualification.reporting.text import console, detail_tables
from tests.recorded import COMMIT, CRITERIA, OTHER_COMMIT, RECEIPT, SOURCE, Recorded


def figure(name: str, measured: int | str | None, verdict: Verdict = Verdict.PASSED) -> Criterion:
    return msgspec.structs.replace(CRITERIA[0], name=name, measured=measured, verdict=verdict)


@pytest.fixture
def book(recorded: Recorded) -> Recorded:
    """Four runs: two of a pull request, one of which failed on another card; one without a figure; a rehearsal."""
    asked = msgspec.structs.replace(SOURCE, reference="refs/pull/128/head")
    later = msgspec.structs.replace(SOURCE, commit=OTHER_COMMIT)
    first = recorded.result()
    recorded.run("run-1", source=asked, criteria=(figure("speed", "0.98"),), started_at="2026-11-28T10:00:00Z")
    recorded.run(
        "run-2",
        source=asked,
        verdict=Verdict.FAILED,
        criteria=(figure("speed", "0.41", Verdict.FAILED),),
        card="NVIDIA H100",
        leases=(Lease(resource="gpu-1", token=9),),
        started_at="2026-11-29T10:00:00.250000Z",
        receipt=msgspec.structs.replace(RECEIPT, status=ReceiptStatus.DIRTY, reason="pid 7 is alive"),
    )
    recorded.run("run-3", source=later, criteria=(figure("speed", None, Verdict.INCOMPLETE),), artifacts=())
    other = msgspec.structs.replace(first.policy, name="none", sha256=recorded.blob(b"another policy"))
    recorded.run("run-4", source=later, ground=Ground.REHEARSAL, policy=other)
    recorded.append(recorded.examine("run-4").decision(), source=later)
    return recorded


@pytest.fixture
def connection(book: Recorded) -> Iterator[Connection]:
    with reading(book.workplace.engine) as opened:
        yield opened


def names(connection: Connection, **wanted: object) -> list[str]:
    return [line.run for line in queries.list_runs(connection, msgspec.convert(wanted, Filter))]


def test_runs_are_found_by_everything_people_know_of_them(connection: Connection, book: Recorded) -> None:
    digest = book.result().policy.sha256
    log = book.result().artifacts[0].sha256
    assert names(connection) == ["run-4", "run-3", "run-2", "run-1"]
    assert names(connection, commit=COMMIT) == ["run-2", "run-1"]
    assert names(connection, pull_request=128) == ["run-2", "run-1"]
    assert names(connection, pull_request=12) == []
    assert names(connection, policy="none") == ["run-4"]
    assert names(connection, policy=digest) == ["run-3", "run-2", "run-1"]
    assert names(connection, ground="rehearsal") == ["run-4"]
    assert names(connection, workload="full_step") == ["run-4", "run-3", "run-2", "run-1"]
    assert names(connection, workload="pressure") == []
    assert names(connection, verdict="FAILED") == ["run-2"]
    assert names(connection, card="NVIDIA H100") == ["run-2"]
    assert names(connection, card="NVIDIA H200", verdict="PASSED", pull_request=128) == ["run-1"]
    assert names(connection, artifact=log) == ["run-4", "run-2", "run-1"]
    assert names(connection, artifact="0" * 64) == []


def test_times_are_compared_as_times_with_and_without_fractions(connection: Connection) -> None:
    assert names(connection, since="2026-11-29T10:00:00Z", until="2026-11-29T10:00:01Z") == ["run-2"]
    assert names(connection, until="2026-11-29T10:00:00Z") == ["run-1"]
    assert names(connection, since="2026-11-29", verdict="FAILED") == ["run-2"]


def test_a_list_goes_on_below_its_last_line_without_gap_or_repeat(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    for few in (500, 1):
        monkeypatch.setattr(queries, "_FEW", few)
        for wanted in ({}, {"workload": "full_step"}):
            seen, before = [], None
            while page := queries.list_runs(connection, Filter(**wanted, before=before), limit=1):
                seen += [line.run for line in page]
                before = page[-1].sequence
            assert seen == ["run-4", "run-3", "run-2", "run-1"]


def test_a_line_carries_what_was_recorded_of_its_run(connection: Connection) -> None:
    newest, _, failed, _ = queries.list_runs(connection)
    assert newest.decision is not None
    assert (newest.decision.decision, newest.decision.row) == ("held", "rehearsal")
    assert newest.decision.reasons[0] == "full_step is rehearsal evidence, native is required"
    assert [one.verdict for one in failed.results] == ["FAILED"]
    assert [(one.status, one.reason) for one in failed.receipts] == [("DIRTY", "pid 7 is alive")]
    assert (failed.pull_request, failed.decision) == (128, None)


def test_the_newest_result_of_a_policy_and_workload(connection: Connection, book: Recorded) -> None:
    found = queries.latest_result(connection, "forecast", "full_step")
    assert found is not None
    assert found.run == "run-3"
    by_digest = queries.latest_result(connection, book.result().policy.sha256, "full_step")
    assert by_digest == found
    assert queries.latest_result(connection, "forecast", "pressure") is None


def test_a_trend_shows_a_missing_measurement_as_missing(connection: Connection) -> None:
    points = queries.metric_history(connection, "speed", workload="full_step", policy="forecast")
    assert [(point.run, point.measured, point.verdict) for point in points] == [
        ("run-3", None, "INCOMPLETE"),
        ("run-2", "0.41", "FAILED"),
        ("run-1", "0.98", "PASSED"),
    ]
    assert queries.metric_history(connection, "speed", policy="none") == []
    assert [point.run for point in queries.metric_history(connection, "speed", limit=1)] == ["run-3"]


def test_what_ran_on_a_device_since(connection: Connection) -> None:
    assert [use.run for use in queries.device_history(connection, "gpu-0")] == ["run-4", "run-3", "run-1"]
    assert [use.run for use in queries.device_history(connection, "gpu-0", since="2026-11-29")] == ["run-4", "run-3"]
    assert [(use.run, use.token) for use in queries.device_history(connection, "gpu-1")] == [("run-2", 9)]


def test_two_runs_differ_in_what_was_recorded_and_a_run_does_not_differ_from_itself(connection: Connection) -> None:
    first, second = (queries.run_detail(connection, queries.find_run(connection, name)) for name in ("run-1", "run-2"))
    assert differences(first, first) == []
    found = {one.what: (one.first, one.second) for one in differences(first, second)}
    assert found["full_step verdict"] == ("PASSED", "FAILED")
    assert found["full_step speed"] == ("0.98 backwards PASSED", "0.41 backwards FAILED")
    assert found["receipt of attempt 1"] == ("CLEAN", "DIRTY")
    assert "commit" not in found


def test_the_parameters_of_a_result_are_shown_and_compared(recorded: Recorded) -> None:
    recorded.run("run-1")
    recorded.run("run-2", parameters={"shortest": 1, "capacity": 0})
    with reading(recorded.workplace.engine) as connection:
        first, second = (
            queries.run_detail(connection, queries.find_run(connection, run)) for run in ("run-1", "run-2")
        )
    assert second.results[0].parameters == {"shortest": 1, "capacity": 0}
    found = {one.what: (one.first, one.second) for one in differences(first, second)}
    assert found["full_step parameters"] == ("none given", "capacity=0, shortest=1")
    screen = console()
    with screen.capture() as shown:
        screen.print(detail_tables(second))
    assert "parameters: capacity=0, shortest=1" in shown.get()


def test_which_approvals_expire_the_soonest_first(recorded: Recorded) -> None:
    recorded.run("run-1")
    about = recorded.examine().inputs
    given = Approval(
        action="approve",
        person="ada",
        role="approver",
        commit=about.commit,
        policy=about.policy,
        evidence_root=about.evidence_root,
        rules_sha256=about.rules_sha256,
        signed_at="2026-11-30T12:00:00Z",
        expires_at="2026-12-03T12:00:00Z",
    )
    recorded.say("ada", given)
    recorded.say("bo", msgspec.structs.replace(given, person="bo", expires_at="2026-12-02T12:00:00.5Z"))
    recorded.say("bo", msgspec.structs.replace(given, person="bo", action="hold", expires_at=NEVER))
    recorded.say("ada", msgspec.structs.replace(given, expires_at="2027-01-01T00:00:00Z"))
    with reading(recorded.workplace.engine) as connection:
        soon = queries.words(connection, expiring=("2026-12-01T00:00:00Z", "2026-12-04T00:00:00Z"))
        assert [line.person for line in soon] == ["bo", "ada"]
        assert [line.action for line in queries.words(connection, commit=COMMIT)] == [
            "approve",
            "hold",
            "approve",
            "approve",
        ]


ANSWERS = [
("SELECT run FROM latest_results WHERE policy = 'forecast' AND workload = 'full_step'", [("run-3",)]),
("SELECT run, decision FROM latest_decisions", [("run-4", "held")]),
("SELECT run, results, passed, receipts, clean, decision FROM run_overview WHERE run = 'run-2'",
 [("run-2", 1, 0, 1, 0, None)]),
("SELECT reason FROM why_held WHERE run = 'run-4' ORDER BY position LIMIT 1",
 [("full_step is rehearsal evidence, native is required",)]),
("SELECT run, measured FROM metric_history WHERE metric = 'speed' ORDER BY sequence",
 [("run-1", "0.98"), ("run-2", "0.41"), ("run-3", None)]),
("SELECT run, policy FROM device_history WHERE resource = 'gpu-1'", [("run-2", "forecast")]),
("SELECT DISTINCT name FROM artifact_uses", [("log.txt",)]),
("SELECT count(*) FROM approval_expiry", [(0,)]),
]  # fmt: skip


def test_the_views_answer_in_sql(connection: Connection) -> None:
    for question, answer in ANSWERS:
        assert [tuple(row) for row in connection.execute(text(question))] == answer, question


def test_every_view_is_there_and_none_names_a_column_like_the_chain_s(connection: Connection) -> None:
    assert views.missing(connection) == ()
    for name in views.VIEWS:
        columns = connection.execute(text(f"SELECT * FROM {name}")).keys()
        assert not [column for column in columns if column.startswith("prev")]


def test_the_documented_sql_and_python_work_as_they_are_printed(
    book: Recorded, connection: Connection, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "queries.md").read_text()
    for statements in re.findall(r"```sql\n(.*?)```", page, re.DOTALL):
        for statement in statements.split(";\n"):
            if statement.strip():
                connection.execute(text(statement)).all()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for name, value in book.workplace.environment.items():
        monkeypatch.setenv(name, value)
    exec(compile(program, "docs/queries.md", "exec"), {})
    assert capsys.readouterr().out.startswith(f"run-2 {COMMIT} ")
