from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer_rank.tapes.programs import Step, record, rows
from trainer_rank.errors import InvalidInputError
from trainer_rank.tapes import fit
from trainer_rank.tapes.probing import Shape, candidate_lengths, disagreement, most_telling


@given(st.integers(64, 100_000), st.integers(2, 20))
def test_candidates_are_packs_within_the_limit_of_several_kinds(largest: int, sequences: int) -> None:
    packs = list(candidate_lengths(largest, sequences))
    assert all(sum(pack) > 0 and min(pack) > 0 for pack in packs)
    assert all(len(pack) == 1 or len(pack) == sequences for pack in packs)
    assert {len(pack) for pack in packs} == {1, sequences}
    assert max(sum(pack) for pack in packs if len(pack) == 1) <= largest


def test_limits_without_a_probe_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="give 64 and 2"):
        list(candidate_lengths(10, 8))


def pack(rows_: int, sequences: int, longest: int) -> dict[str, int]:
    return {"packed_tokens": rows_, "sequences": sequences, "longest_sequence": longest}


def test_the_probe_that_separates_two_explanations_is_asked_for() -> None:
    steps = [Step("rows", rows(100)), Step("per sequence", lambda f: 5000 * f["longest_sequence"])]
    together = [record(steps, pack(n, 1, n)) for n in (100, 300, 700)]
    apart, same = Shape((50,) * 8, pack(400, 8, 50)), Shape((500,), pack(500, 1, 500))
    tape = fit(together)
    assert disagreement(tape, same.features) == 0
    assert disagreement(tape, apart.features) > 0
    assert most_telling(tape, [same, apart]) is apart
    settled = fit([*together, record(steps, pack(400, 8, 50)), record(steps, pack(401, 3, 111))])
    assert most_telling(settled, [same, apart]) is None
