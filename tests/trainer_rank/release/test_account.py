"""The release account charges whole episodes, credits forward work alone, and denies whatever it cannot trust."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_rank.errors import InvalidInputError
from trainer_rank.release.account import Account, Balance, Reason, fold, permit

FIVE_PERCENT = 50_000
amounts = st.one_of(st.integers(0, 10**12), st.floats(0, 1e12, allow_nan=False))
balances = st.builds(
    Balance,
    cost=amounts,
    dearest=st.none() | amounts,
    work=amounts,
    releases=st.integers(0, 5),
    need=st.booleans(),
    fault=st.none() | st.sampled_from([Reason.CLOCK, Reason.OWNER]),
)


def ticking(*times: float) -> Callable[[], float]:
    iterator: Iterator[float] = iter(times)
    return lambda: next(iterator)


@pytest.mark.parametrize(
    ("cost", "granted"),
    [(40.0, True), (40.5, False), (40, True), (math.nextafter(40.0, 41), False), (math.nextafter(40.0, 0), True)],
)
def test_the_worked_boundary(cost: float, granted: bool) -> None:
    permission = permit(Balance(cost, 10.0, 1000.0, releases=1), FIVE_PERCENT)
    assert permission.granted is granted
    assert permission.reason is (Reason.WITHIN if granted else Reason.OVER)


def test_the_first_necessary_release_is_free_but_charged() -> None:
    account = Account("rank", ticking(0, 7))
    assert permit(account.balance("rank", need=False), FIVE_PERCENT).reason is Reason.NOT_NEEDED
    with account.episode("rank") as episode:
        assert permit(account.balance("rank", need=True), FIVE_PERCENT).reason is Reason.FIRST
        episode.released = True
    assert account.balance("rank", need=True) == Balance(cost=7, dearest=7, releases=1)
    assert permit(account.balance("rank", need=True), FIVE_PERCENT).reason is Reason.OVER


def test_denied_and_failed_episodes_are_charged_whole() -> None:
    account = Account("rank", ticking(0, 3, 10, 15))
    with account.episode("rank"):
        pass
    with pytest.raises(RuntimeError, match="driver"), account.episode("rank"):
        raise RuntimeError("driver")
    assert account.balance("rank", need=True) == Balance(cost=8, dearest=5)
    assert permit(account.balance("rank", need=True), FIVE_PERCENT).reason is Reason.FIRST


def test_only_completed_forward_work_earns() -> None:
    account = Account("rank", ticking(0, 100, 500, 500))
    with account.work("rank"):
        pass
    with pytest.raises(MemoryError), account.work("rank"):
        raise MemoryError
    assert account.balance("rank", need=True).work == 100


def test_refill_raises_the_latest_episode_and_is_charged() -> None:
    account = Account("rank", ticking(0, 4, 10, 13))
    account.refill("rank", 5)
    assert account.balance("rank", need=True).cost == 0
    for _ in range(2):
        with account.episode("rank") as episode:
            episode.released = True
    account.refill("rank", 6)
    assert account.balance("rank", need=True) == Balance(cost=13, dearest=9, releases=2)
    account.refill("rank", math.inf)
    assert permit(account.balance("rank", need=True), None).reason is Reason.INVALID


@pytest.mark.parametrize(
    "clock",
    [ticking(5, 4), ticking(0, math.nan), ticking(math.inf, 1), ticking(0), ticking(True, 2), ticking("0", "1")],  # type: ignore[arg-type]
    ids=["goes back", "is nan", "is infinite", "fails", "is a bool", "is text"],
)
def test_an_invalid_clock_ends_all_releases(clock: Callable[[], float]) -> None:
    account = Account("rank", clock)
    with account.episode("rank") as episode:
        episode.released = True
    for per_million in (FIVE_PERCENT, None):
        permission = permit(account.balance("rank", need=True), per_million)
        assert (permission.granted, permission.reason) == (False, Reason.CLOCK)


def test_a_foreign_owner_gets_no_release_and_changes_nothing() -> None:
    account = Account("rank", ticking(0, 9, 20, 30))
    with account.episode("fork") as episode:
        episode.released = True
    with account.work("fork"):
        pass
    account.refill("fork", 5)
    assert permit(account.balance("fork", need=True), None).reason is Reason.OWNER
    assert account.balance("rank", need=True) == Balance()


def test_episodes_do_not_nest() -> None:
    account = Account("rank", ticking(*range(9)))
    with account.episode("rank"), pytest.raises(InvalidInputError, match="open already"), account.episode("rank"):
        pass


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0, -1, True])
@pytest.mark.parametrize("name", ["cost", "dearest", "work"])
def test_a_figure_that_cannot_be_denies(name: str, wrong: float) -> None:
    figures = {"cost": 1.0, "dearest": 1.0, "work": 1e9} | {name: wrong}
    for per_million in (FIVE_PERCENT, None):
        assert permit(Balance(**figures, releases=1), per_million).reason is Reason.INVALID


def test_a_later_release_needs_a_known_dearest_episode() -> None:
    assert permit(Balance(0, None, 1e9, releases=1), FIVE_PERCENT).reason is Reason.NO_DEAREST


@given(balances)
def test_a_later_release_never_exceeds_the_budget(balance: Balance) -> None:
    permission = permit(balance, FIVE_PERCENT)
    if permission.granted and balance.releases:
        assert balance.dearest is not None and balance.need and balance.fault is None
        assert Fraction(balance.cost) + Fraction(balance.dearest) <= Fraction(balance.work) / 20


@given(balances, amounts, amounts)
def test_more_work_never_denies_and_more_cost_never_grants(balance: Balance, work: float, cost: float) -> None:
    before = permit(balance, FIVE_PERCENT).granted
    richer = Balance(balance.cost, balance.dearest, max(balance.work, work), balance.releases, True, balance.fault)
    dearer = Balance(max(balance.cost, cost), balance.dearest, balance.work, balance.releases, True, balance.fault)
    assert permit(richer, FIVE_PERCENT).granted or not before
    assert not permit(dearer, FIVE_PERCENT).granted or before or not balance.need


@given(st.lists(balances, min_size=1, max_size=5), st.randoms())
def test_ranks_fold_by_sum_maximum_any_and_all_in_any_order(ranks: list[Balance], random: object) -> None:
    whole = [
        Balance(int(b.cost), None if b.dearest is None else int(b.dearest), b.work, b.releases, b.need, b.fault)
        for b in ranks
    ]
    folded = fold(whole)
    assert folded.cost == sum(each.cost for each in whole)
    assert folded.work == max(each.work for each in whole)
    assert folded.need == any(each.need for each in whole)
    assert (folded.fault is None) == all(each.fault is None for each in whole)
    assert (folded.dearest is None) == any(each.dearest is None for each in whole)
    again = fold(whole[::-1])
    assert (again.cost, again.dearest, again.work, again.need) == (
        folded.cost,
        folded.dearest,
        folded.work,
        folded.need,
    )


def test_no_rank_is_no_fold() -> None:
    with pytest.raises(InvalidInputError, match="one of each rank"):
        fold([])


@given(
    st.lists(st.tuples(st.sampled_from(["work", "look", "deny", "release", "fail"]), st.integers(0, 1000)), max_size=40)
)
def test_the_account_is_the_sum_of_what_happened(history: list[tuple[str, int]]) -> None:
    now = 0

    def clock() -> float:
        return now

    account = Account("rank", clock)
    costs, work, releases, looks = [], 0, 0, 0
    parts = {"work": account.work, "look": account.instrumentation}
    for kind, spent in history:
        try:
            with parts.get(kind, account.episode)("rank") as episode:
                now += spent
                if episode is not None:
                    episode.released = kind == "release"
                if kind == "fail":
                    raise RuntimeError
        except RuntimeError:
            pass
        if kind == "work":
            work += spent
        elif kind == "look":
            looks += spent
        else:
            costs.append(spent)
            releases += kind == "release"
    spent = sum(costs) + looks
    assert account.balance("rank", need=False) == Balance(spent, max(costs, default=None), work, releases, False)
