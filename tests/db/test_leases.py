import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from db import leases as module
from db.engine import writing
from db.leases import DatabaseLeaseStore
from qualification.errors import UnknownError
from qualification.execution.identity import myself
from qualification.execution.leases import LeaseLost, LeaseRequest, Waiting, assign
from qualification.records import Lease, ReceiptStatus
from tests.databases import Workplace

CLEAN, DIRTY = ReceiptStatus.CLEAN, ReceiptStatus.DIRTY


@pytest.fixture
def store(workplace: Workplace) -> DatabaseLeaseStore:
    return DatabaseLeaseStore(workplace.engine)


@pytest.fixture
def short_expiry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "EXPIRY_MS", 300)
    yield
    monkeypatch.undo()


def ask(run: str, *candidates: str, count: int = 1, priority: int = 0) -> LeaseRequest:
    return LeaseRequest(
        run=run,
        attempt=1,
        candidates=candidates or ("gpu",),
        count=count,
        folder=f"/runs/{run}/1",
        host="here",
        holder=myself(),
        priority=priority,
    )


def grant(store: DatabaseLeaseStore, request: LeaseRequest) -> tuple[Lease, ...]:
    answer = store.try_acquire(store.enqueue(request))
    assert isinstance(answer, tuple)
    return answer


def test_one_device_one_holder_and_a_rising_token(store: DatabaseLeaseStore) -> None:
    (first,) = grant(store, ask("a"))
    ticket = store.enqueue(ask("b"))
    waiting = store.try_acquire(ticket)
    assert isinstance(waiting, Waiting)
    assert "held by run a on here, whose lease is in force" in waiting.reason
    store.release(first, CLEAN)
    (second,) = store.try_acquire(ticket)  # type: ignore[misc]
    assert (first.token, second.token) == (1, 2)
    assert [holding.run for holding in store.holdings()] == ["b"]


def test_a_closed_or_superseded_lease_is_lost(store: DatabaseLeaseStore) -> None:
    (first,) = grant(store, ask("a"))
    store.heartbeat([first])
    store.check([first])
    store.release(first, CLEAN)
    for operation in (store.heartbeat, store.check):
        with pytest.raises(LeaseLost, match="gpu with token 1 is closed"):
            operation([first])
    with pytest.raises(LeaseLost):
        store.release(first, CLEAN)
    grant(store, ask("b"))
    with pytest.raises(LeaseLost, match="held under token 2"):
        store.heartbeat([first])


@pytest.mark.usefixtures("short_expiry")
def test_expiry_takes_authority_not_occupancy(store: DatabaseLeaseStore) -> None:
    (lease,) = grant(store, ask("a"))
    time.sleep(0.4)
    with pytest.raises(LeaseLost, match="expired"):
        store.heartbeat([lease])
    ticket = store.enqueue(ask("b"))
    answer = store.try_acquire(ticket)
    assert isinstance(answer, Waiting)
    assert [holding.run for holding in answer.expired] == ["a"]
    store.release(lease, CLEAN)  # the late holder may still close what it holds
    assert isinstance(store.try_acquire(ticket), tuple)


@pytest.mark.usefixtures("short_expiry")
def test_one_recoverer_adopts_an_expired_lease(store: DatabaseLeaseStore) -> None:
    (lease,) = grant(store, ask("a"))
    with pytest.raises(LeaseLost, match="in force"):
        store.adopt(lease, myself(), "here")
    time.sleep(0.4)
    adopted = store.adopt(lease, myself(), "here")
    assert adopted.token == lease.token + 1
    with pytest.raises(LeaseLost):
        store.adopt(lease, myself(), "here")
    with pytest.raises(LeaseLost):
        store.release(lease, CLEAN)
    store.release(adopted, CLEAN)


def test_a_dirty_end_quarantines_until_lifted(store: DatabaseLeaseStore) -> None:
    (lease,) = grant(store, ask("a"))
    store.release(lease, DIRTY, "10 GB left")
    ticket = store.enqueue(ask("b"))
    answer = store.try_acquire(ticket)
    assert isinstance(answer, Waiting)
    assert [resource.name for resource in answer.quarantined] == ["gpu"]
    assert "run a ended DIRTY: 10 GB left" in answer.reason
    assert answer.quarantined[0].folders == ("/runs/a/1",)
    store.lift("gpu", 650)
    assert isinstance(store.try_acquire(ticket), tuple)
    assert store.resources()[0].baseline_bytes == 650


@pytest.mark.usefixtures("short_expiry")
def test_a_ticket_that_stops_asking_loses_its_place(store: DatabaseLeaseStore) -> None:
    grant(store, ask("a", "one"))
    gone = store.enqueue(ask("b", "two"))
    time.sleep(0.4)
    grant(store, ask("c", "two"))
    with pytest.raises(UnknownError, match="lapsed"):
        store.try_acquire(gone)


def test_the_queue_goes_by_priority_then_by_order(store: DatabaseLeaseStore) -> None:
    (held,) = grant(store, ask("a"))
    tickets = [store.enqueue(ask(str(index), priority=index // 2)) for index in range(4)]
    store.release(held, CLEAN)
    order = []
    while tickets:
        for ticket in tickets:
            answer = store.try_acquire(ticket)
            if isinstance(answer, tuple):
                order.append(next(holding.run for holding in store.holdings()))
                store.release(answer[0], CLEAN)
                tickets.remove(ticket)
                break
    assert order == ["2", "3", "0", "1"]


def test_the_database_itself_refuses_a_second_open_lease(store: DatabaseLeaseStore, workplace: Workplace) -> None:
    grant(store, ask("a"))
    columns = "resource, token, request, acquired_at_ms, expires_at_ms"
    with pytest.raises(IntegrityError), writing(workplace.engine) as connection:
        connection.execute(text(f"INSERT INTO leases ({columns}) VALUES ('gpu', 99, '{{}}', 0, 0)"))


def test_eight_at_once_never_share_a_device(store: DatabaseLeaseStore) -> None:
    held: Counter[str] = Counter()
    shared: list[str] = []
    guard = threading.Lock()

    def work(index: int) -> None:
        ticket = store.enqueue(ask(str(index), "one", "two"))
        while not isinstance(answer := store.try_acquire(ticket), tuple):
            time.sleep(0.01)
        name = answer[0].resource
        with guard:
            held[name] += 1
            shared.extend([name] if held[name] > 1 else [])
        time.sleep(0.02)
        with guard:
            held[name] -= 1
        store.release(answer[0], CLEAN)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not shared
    assert not store.holdings()
    assert sum(resource.token for resource in store.resources()) == 8


NAMES = ("a", "b", "c", "d")
TICKETS = st.lists(
    st.lists(st.sampled_from(NAMES), min_size=1, unique=True).flatmap(
        lambda names: st.tuples(st.just(tuple(names)), st.integers(1, len(names)))
    ),
    max_size=6,
)


@given(st.lists(st.sampled_from(NAMES), unique=True), TICKETS)
def test_assignment_is_whole_disjoint_and_never_lets_a_later_ticket_take_from_an_earlier(
    free: list[str], asked: list[tuple[tuple[str, ...], int]]
) -> None:
    tickets = [(number, names, count) for number, (names, count) in enumerate(asked)]
    granted = assign(free, tickets)
    given_out = [name for names in granted.values() for name in names]
    assert len(given_out) == len(set(given_out))
    assert set(given_out) <= set(free)
    for number, names, count in tickets:
        got = granted.get(number, ())
        assert len(got) in (0, count)
        assert set(got) <= set(names)
        if not got:
            reserved = set(free) - {name for earlier in range(number) for name in granted.get(earlier, ())}
            later = {name for other, mine in granted.items() if other > number for name in mine}
            waiting_before = {
                name for before, wanted, _ in tickets[:number] if before not in granted for name in wanted
            }
            assert not (later & set(names) & reserved - waiting_before)
