from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer_rank.tapes.programs import Step, record
from tests.trainer_rank.tapes.test_fit import PROBES, programs
from trainer_rank.tapes import fit
from trainer_rank.tapes.envelope import Envelope


def highest(steps: Sequence[Step], features: Mapping[str, int]) -> int:
    live: dict[str, int] = {}
    best = 0
    for step in steps:
        if step.birth is not None:
            live[step.birth] = step.size(features)
            best = max(best, sum(live.values()))
        elif step.death is not None:
            del live[step.death]
    return best


@settings(max_examples=80, deadline=None)
@given(programs(), st.lists(st.integers(257, 60_000), min_size=1, max_size=5))
def test_the_envelope_is_the_highest_sum_of_requests_at_every_size(program: list[Step], targets: list[int]) -> None:
    tape = fit([record(program, {"packed_tokens": n}) for n in PROBES])
    envelope = Envelope(tape, tape.parts[0].paths[0])
    for tokens in targets:
        grown = envelope.growth({"packed_tokens": tokens})
        assert grown is not None
        exact = highest(program, {"packed_tokens": tokens})
        assert exact - grown.rounding <= grown.requested <= exact
        assert grown.requested + grown.rounding >= exact


def test_a_feature_that_is_not_given_is_unknown() -> None:
    tape = fit([record([Step("a", lambda f: 8 * f["packed_tokens"])], {"packed_tokens": n}) for n in (5, 9)])
    assert Envelope(tape, tape.parts[0].paths[0]).growth({"tokens": 5}) is None
