"""Library memory is learned by phase, due again when it was given back, and never more than was measured."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer_rank.admission.budget import Status, Term
from trainer_rank.release.libraries import BACKWARD, COLLECTIVE, FORWARD, Libraries


def expected(**sizes: int) -> dict[str, Term]:
    return {phase: Term(phase, size, Status.BOUNDED, "this test") for phase, size in sizes.items()}


def due(libraries: Libraries, outside: int) -> dict[str, int | None]:
    return {term.name: term.size for term in libraries.due(outside)}


def test_a_phase_is_due_until_it_has_run() -> None:
    libraries = Libraries(expected(forward=5, backward=9, collective=3))
    assert due(libraries, 100) == {"forward": 5, "backward": 9, "collective": 3}
    libraries.ran(COLLECTIVE, 100, 102)
    libraries.ran(BACKWARD, 102, 130)
    assert due(libraries, 130) == {}
    assert libraries.sizes == {"collective": 2, "backward": 28}


def test_what_is_given_back_is_due_again_until_it_is_taken_again() -> None:
    libraries = Libraries({})
    libraries.ran(FORWARD, 100, 100)
    libraries.ran(COLLECTIVE, 100, 108)
    assert due(libraries, 100) == {"libraries again": 8}
    libraries.ran(FORWARD, 100, 100)
    assert due(libraries, 100) == {"libraries again": 8}
    libraries.ran(COLLECTIVE, 100, 108)
    assert due(libraries, 108) == {}


def test_a_fall_that_no_phase_explains_is_forgotten_after_all_have_run() -> None:
    libraries = Libraries({})
    libraries.ran(FORWARD, 1000, 1004)
    libraries.ran(BACKWARD, 1004, 1010)
    assert due(libraries, 400) == {"libraries again": 10}
    libraries.ran(FORWARD, 400, 400)
    libraries.ran(BACKWARD, 400, 400)
    assert due(libraries, 400) == {}


def test_growth_of_others_hides_nothing_that_was_seen_or_said() -> None:
    libraries = Libraries({})
    libraries.ran(BACKWARD, 100, 108)
    assert due(libraries, 100) == {"libraries again": 8}
    assert due(libraries, 9000) == {"libraries again": 8}
    libraries.ran(BACKWARD, 9000, 9008)
    assert due(libraries, 9008) == {}
    libraries.torn_down()
    assert due(libraries, 20_000) == {"libraries again": 8}


def test_a_neighbour_that_comes_and_goes_leaves_the_claims_as_they_were() -> None:
    libraries = Libraries({})
    libraries.ran(FORWARD, 100, 160)
    assert due(libraries, 1160) == {}
    libraries.ran(BACKWARD, 1160, 1170)
    assert due(libraries, 170) == {}, "the neighbour left; no library gave anything back"
    assert due(libraries, 140) == {"libraries again": 30}, "what falls beyond the neighbour's share is a library's"


readings = st.integers(0, 1000)


@given(
    st.lists(
        st.tuples(st.sampled_from([FORWARD, BACKWARD, COLLECTIVE, "look", "torn down"]), readings, readings),
        max_size=30,
    )
)
def test_never_more_is_due_than_was_measured(history: list[tuple[str, int, int]]) -> None:
    libraries = Libraries({})
    for what, before, after in history:
        if what == "look":
            libraries.due(before)
        elif what == "torn down":
            libraries.torn_down()
        else:
            libraries.ran(what, before, after)
        found = sum(term.size or 0 for term in libraries.due(after))
        assert 0 <= found <= sum(libraries.sizes.values())
