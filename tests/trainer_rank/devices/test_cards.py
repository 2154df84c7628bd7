from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from trainer_rank.allocator.trace import load_trace
from trainer_rank.devices.cards import PHASES, Card, Outside, card_names, load_card
from trainer_rank.errors import InvalidInputError

RECORDINGS = Path(str(files("trainer_rank.tapes").joinpath("recordings")))


def test_the_h200_and_the_incidents_card_are_files_with_their_own_capacity() -> None:
    assert card_names() == ("h200", "h200-incident")
    assert load_card("h200").capacity == 150_109_880_320
    assert load_card("h200-incident").capacity == 150_121_021_440


@pytest.mark.parametrize("name", card_names())
def test_every_figure_has_a_source(name: str) -> None:
    card = load_card(name)
    assert card.capacity_source
    assert all(item.source for item in (*card.outside, *card.outside_with_peers))


@pytest.mark.parametrize("path", sorted(RECORDINGS.glob("*.gz")), ids=lambda path: path.name)
def test_no_recording_holds_more_outside_than_the_card_says(path: Path) -> None:
    trace = load_trace(path)
    assert trace.memory_info is not None and trace.after is not None
    free, total = trace.memory_info
    card = load_card("h200")
    assert total == card.capacity
    outside = card.held_outside("first_backward", peers=trace.features["context"] > 1)
    assert 0 <= outside - (total - free - trace.after.reserved) < 16 << 20


def test_what_is_held_outside_grows_from_phase_to_phase() -> None:
    card = load_card("h200")
    alone = [card.held_outside(phase) for phase in PHASES]
    grouped = [card.held_outside(phase, peers=True) for phase in PHASES]
    assert alone == sorted(alone) and card.context == alone[0] > 0
    assert all(one <= other for one, other in zip(alone, grouped, strict=True))


def test_among_peers_communicators_are_part_of_what_lies_outside() -> None:
    alone, peers = load_card("h200"), load_card("h200").among_peers()
    for phase in PHASES:
        assert peers.held_outside(phase) == alone.held_outside(phase, peers=True)
    assert peers.held_outside("first_backward") == 2_071_855_104


def test_an_unknown_card_or_phase_names_what_there_is() -> None:
    with pytest.raises(InvalidInputError, match="h200, h200-incident"):
        load_card("../h200")
    with pytest.raises(InvalidInputError, match="choose of context"):
        Card("x", "x", 100, "test", (Outside("lunch", 1, "test"),))


def test_impossible_cards_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="positive"):
        Card("x", "x", 0, "test", ())
    for first, later in ((5, 4), (-1, 4)):
        with pytest.raises(InvalidInputError, match="grow"):
            Card("x", "x", 100, "t", (Outside("context", first, "t"), Outside("first_forward", later, "t")))
