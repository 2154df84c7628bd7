"""Packing keeps every request exactly once, under its original index, in balanced slot-aware cuts."""

import time
from array import array

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer_rank.errors import InvalidInputError
from trainer_rank.packing import Work, balanced, layouts, slot_groups, units
from trainer_rank.prefixes import Prefixes, find_prefixes
from trainer_rank.requests import Request, RequestShape, shapes_of


@st.composite
def _shapes(draw: st.DrawFn) -> tuple[RequestShape, ...]:
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(1, 5000), st.sampled_from(["policy", "adversary"]), st.booleans(),
                st.sampled_from([None, "a", "b"]),
            ),
            min_size=1, max_size=40,
        )
    )  # fmt: skip
    return tuple(RequestShape(index, *row) for index, row in enumerate(rows))


@given(_shapes())
def test_every_cut_holds_each_request_once_and_never_mixes_slots(shapes: tuple[RequestShape, ...]) -> None:
    groups = slot_groups(shapes)
    everything = list(range(len(shapes)))
    sizes = [len(groups)]
    for plan in Work(groups):
        assert sorted(index for part in plan for index in part.indices) == everything
        for part in plan:
            assert {(shape.slot, shape.gradients) for shape in part.requests} == {(part.key.slot, part.key.gradients)}
            assert list(part.indices) == sorted(part.indices)
        sizes.append(len(plan))
    assert sizes[-1] == len(shapes), "the finest cut runs one request at a time"
    assert sizes[1:] == sorted(set(sizes[1:])), "each cut is finer than the one before"


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40), st.data())
def test_a_balanced_cut_is_within_four_thirds_of_the_best_possible(lengths: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(lengths)))
    (group,) = slot_groups([RequestShape(index, length) for index, length in enumerate(lengths)])
    widest = max(part.packed_tokens for part in balanced(group, parts))
    ordered = sorted(lengths, reverse=True)
    at_best = max(ordered[0], -(-sum(lengths) // parts))
    if len(ordered) > parts:
        at_best = max(at_best, ordered[parts - 1] + ordered[parts])
    assert 3 * widest <= 4 * max(at_best, widest * 3 // 4)
    assert widest <= at_best + ordered[0]


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=12))
def test_every_cut_of_requests_that_share_holds_each_once_and_packs_no_less(sequences: list[list[int]]) -> None:
    shapes = [RequestShape(index, len(each)) for index, each in enumerate(sequences)]
    prefixes = find_prefixes({index: array("q", each).tobytes() for index, each in enumerate(sequences)}, 8, 1)
    (group,) = slot_groups(shapes, prefixes)
    for plan in Work([group]):
        assert sorted(index for part in plan for index in part.indices) == list(range(len(sequences)))
        assert sum(part.packed_tokens for part in plan) >= group.packed_tokens
        assert max(part.packed_tokens for part in plan) <= group.packed_tokens
    for parts in range(1, len(sequences) + 1):
        assert len(balanced(group, parts)) == parts


@given(_shapes())
def test_units_keep_groups_whole(shapes: tuple[RequestShape, ...]) -> None:
    found = units(shapes)
    assert sorted(shape.index for unit in found for shape in unit) == list(range(len(shapes)))
    for name in {shape.group for shape in shapes} - {None}:
        assert sum(any(shape.group == name for shape in unit) for unit in found) == 1
    assert all(len(unit) == 1 for unit in found if unit[0].group is None)


def test_ten_thousand_requests_pack_in_a_tenth_of_a_second() -> None:
    shapes = [
        RequestShape(index, 1 + index * 7919 % 4096, ("policy", "adversary")[index % 2]) for index in range(10_000)
    ]
    prefixes = Prefixes(tuple(range(10_000)), tuple(min(4, shape.length) * (shape.index % 8 > 0) for shape in shapes))
    seconds = []
    for _ in range(3):
        begun = time.process_time()
        assert len(Work(layouts(shapes, prefixes)[0])[1]) == 4
        units(shapes)
        seconds.append(time.process_time() - begun)
    assert min(seconds) < 0.1


def test_a_cut_into_more_parts_than_requests_is_refused() -> None:
    (group,) = slot_groups([RequestShape(0, 5)])
    with pytest.raises(InvalidInputError, match="1 requests cannot be cut into 2"):
        balanced(group, 2)


def _tokens(length: int) -> torch.Tensor:
    return torch.arange(length)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(_tokens(0), _tokens(0)), "length 0"),
        (Request(_tokens(3), _tokens(2)), "3 tokens but 2 targets"),
        (Request(_tokens(3).float(), _tokens(3)), "tokens are torch.float32"),
        (Request(_tokens(4).view(2, 2), _tokens(4)), "of 2 dimensions"),
        (Request(_tokens(3), _tokens(3), slot="critic"), "slot 'critic' does not exist; choose of adversary, policy"),
        (Request(_tokens(3).to("meta"), _tokens(3)), "tokens are on meta"),
    ],
)
def test_a_bad_request_is_named_by_its_index(request_: Request, message: str) -> None:
    with pytest.raises(InvalidInputError, match="request 1.*" + message):
        shapes_of([Request(_tokens(3), _tokens(3)), request_], ("policy", "adversary"))


def test_no_requests_is_an_error() -> None:
    with pytest.raises(InvalidInputError, match="no requests"):
        shapes_of([], ("policy",))


def test_shapes_keep_the_callers_order_and_options() -> None:
    first = Request(_tokens(3), _tokens(3), slot="adversary", gradients=False, group="pair", hidden=True)
    assert shapes_of([first, Request(_tokens(5), _tokens(5))], ("policy", "adversary")) == (
        RequestShape(0, 3, "adversary", False, "pair", True),
        RequestShape(1, 5),
    )
