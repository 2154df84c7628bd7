from __future__ import annotations

from functools import partial

import pytest

from bench import decisions
from trainer_rank.allocator.trace import load_trace
from trainer_rank.tapes.shipped import RECORDINGS


@pytest.mark.parametrize("parts", [1, 4])
def test_a_plan_is_cut_as_often_as_asked_for(parts: int, capsys: pytest.CaptureFixture[str]) -> None:
    bench = decisions._Bench(4, load_trace(RECORDINGS / decisions.START).before)
    batch = partial(bench.batch, 4096 * parts, parts)
    decisions._grown("so many subforwards", bench, batch, parts)
    choice = bench.decide(batch(), 10 * decisions.CARD)
    assert choice.plan is not None
    assert len(choice.plan.subforwards) == parts
    assert capsys.readouterr().out.startswith("so many subforwards")
