from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_rank.allocator.driver import ModelledDriver
from trainer_rank.allocator.model import CachingAllocator
from trainer_rank.allocator.outofmemory import OutOfMemory
from trainer_rank.allocator.replay import replay
from trainer_rank.allocator.rules import MIB
from trainer_rank.allocator.snapshot import PENDING, Block, Segment, Snapshot
from trainer_rank.allocator.trace import Event, Trace, load_trace

CASES = Path(__file__).parents[2] / "data" / "traces"
RECORDINGS = Path(str(files("trainer_rank.tapes").joinpath("recordings")))

EXACT = {
    "A02_tail_cut": (56623104, 56623104),
    "A03_baseline_100_plus_20": (125829120, 130023424),
    "A15_shrinking_T16384": (100663296, 100663296),
    "A15_shrinking_T4096": (75497472, 75497472),
    "A15_shrinking_T65536": (276824064, 289406976),
    "A16_zero_bytes": (4194304, 20971520),
    "A18_ends_in_oom": (314572800, 314572800),
    "A19_two_streams": (54525952, 58720256),
    "A20_release_inside": (440401920, 440401920),
}
STOPS = {
    "A02_history_started_late": (0, "unknown or wrong block", "0x7f0fe0000000"),
    "A02_ring_overwrote_middle": (2, "no segment_alloc", "a new segment of 25165824 B"),
    "A04_expandable": (0, "segment_map", "fixed segments"),
    "A04_max_split_128": (1, "a new segment of 96468992 B", "cached block 0x7f0ff7600000 reused"),
    "A04_roundup_power2": (1, "a segment of 805306368 B", "a segment of 538968064 B"),
    "A15_sixteen_EiB": (1, "18446744073709550592", "alloc"),
}


@pytest.mark.parametrize("path", sorted(RECORDINGS.glob("*.gz")), ids=lambda path: path.name)
def test_every_recording_of_a_real_card_is_exact_to_the_last_block(path: Path) -> None:
    trace = load_trace(path)
    result = replay(trace)
    assert result.exact, result.divergence
    assert (result.peak_allocated, result.peak_reserved) == (trace.peak_allocated, trace.peak_reserved)
    assert result.after == trace.after
    assert result.notes == ()
    assert result.events == len(trace.events)


def test_all_five_recordings_are_there() -> None:
    assert len(list(RECORDINGS.glob("*.gz"))) == 5


def test_every_case_has_an_expectation() -> None:
    assert {path.stem for path in CASES.glob("A*.json")} == EXACT.keys() | STOPS.keys()


@pytest.mark.parametrize("name", sorted(EXACT))
def test_cases_that_follow_the_rules_are_exact(name: str) -> None:
    result = replay(load_trace(CASES / f"{name}.json"))
    assert result.exact, result.divergence
    assert (result.peak_allocated, result.peak_reserved) == EXACT[name]
    assert result.partial == (name == "A18_ends_in_oom")


@pytest.mark.parametrize("name", sorted(STOPS))
def test_cases_that_do_not_stop_at_the_event_that_contradicts(name: str) -> None:
    event, got, expected = STOPS[name]
    result = replay(load_trace(CASES / f"{name}.json"))
    assert not result.exact
    assert result.divergence is not None
    assert result.divergence.event == event
    assert got in result.divergence.got
    assert expected in result.divergence.expected


def test_a_history_cut_before_a_free_completes_says_that_the_end_differs() -> None:
    result = replay(load_trace(CASES / "A02_tail_cut.json"))
    assert "active_pending_free against" in result.notes[0]


def base() -> Trace:
    return load_trace(CASES / "A20_release_inside.json")


def changed(trace: Trace, at: int, *rows: Event, drop: int = 0) -> Trace:
    return replace(trace, events=(*trace.events[:at], *rows, *trace.events[at + drop :]))


@pytest.mark.parametrize("name", ["allocated", "reserved"])
def test_a_peak_that_differs_is_a_divergence_without_event(name: str) -> None:
    peaks = {"allocated": 440401920, "reserved": 440401920} | {name: 440401921}
    result = replay(replace(base(), peak_allocated=peaks["allocated"], peak_reserved=peaks["reserved"]))
    assert not result.exact
    assert result.divergence is not None
    assert (result.divergence.event, result.divergence.got) == (None, f"peak {name} 440401921 B")


def test_reserved_above_the_card_is_reported() -> None:
    result = replay(replace(base(), memory_info=(0, 440401919)))
    assert result.exact
    assert "exceeds the card's 440401919 B" in result.notes[0]


def test_a_release_that_keeps_a_free_segment_is_not_the_native_allocators() -> None:
    result = replay(changed(base(), 10, drop=1))
    assert result.divergence is not None
    assert result.divergence.event == 11
    assert "0x7f1012e00000 released too" in result.divergence.expected


def test_a_release_of_a_segment_in_use_stops() -> None:
    trace = base()
    result = replay(changed(trace, 2, Event("segment_free", trace.events[0].address, trace.events[0].size, 0)))
    assert result.divergence is not None
    assert result.divergence.event == 2


def test_a_segment_that_nothing_needs_stops() -> None:
    trace = base()
    result = replay(changed(trace, 2, Event("segment_alloc", 0x7F00_0000_0000, 2 * MIB, 0)))
    assert result.divergence is not None
    assert result.divergence.event in (2, 3)


@pytest.mark.parametrize(
    ("at", "event"),
    [
        (6, Event("free_requested", 0x7F0FFFFFFE00, 314572800, 0)),
        (6, Event("free_requested", 0x7F1000000000, 314572801, 0)),
        (6, Event("free_requested", 0x7F1000000000, 314572800, 5)),
        (7, Event("free_completed", 0x7F1000000001, 314572800, 0)),
        (1, Event("alloc", 0x7F1000000200, 314572800, 0)),
        (1, Event("alloc", 0x7F1000000000, 314572800, 9)),
        (1, Event("alloc", 0x7F1000000000, 280000000, 0)),
    ],
)
def test_one_changed_row_stops_there(at: int, event: Event) -> None:
    trace = base()
    assert trace.events[at].action == event.action
    result = replay(changed(trace, at, event, drop=1))
    assert result.divergence is not None
    assert result.divergence.event == at


@pytest.mark.parametrize("at", [6, 7])
def test_a_doubled_free_row_stops_at_the_second(at: int) -> None:
    trace = base()
    result = replay(changed(trace, at, trace.events[at]))
    assert result.divergence is not None
    assert result.divergence.event == at + 1


def test_a_history_that_ends_between_a_segment_and_its_block_counts_the_segment() -> None:
    trace = replace(base(), events=base().events[:3], after=None, peak_allocated=314572800, peak_reserved=419430400)
    result = replay(trace)
    assert result.exact
    assert "ends between" in result.notes[0]


def test_a_block_whose_free_was_pending_before_the_recording_may_complete_in_it() -> None:
    block = Block(0x7F1000000000, 30 * MIB, 30 * MIB, PENDING)
    before = Snapshot((Segment(block.address, block.size, "large", 7, (block,)),))
    completes = Event("free_completed", block.address, block.size, 7)
    reuses = Event("alloc", block.address, 29 * MIB + 1, 7)
    assert replay(Trace(before, (completes, reuses), peak_allocated=30 * MIB, peak_reserved=30 * MIB)).exact
    result = replay(Trace(before, (reuses,)))
    assert result.divergence is not None and "a new segment" in result.divergence.expected
    result = replay(Trace(before, (completes._replace(action="free_requested"),)))
    assert result.divergence is not None and result.divergence.event == 0


def test_out_of_memory_that_a_cached_block_would_have_served_stops() -> None:
    trace = base()
    result = replay(changed(trace, 8, Event("oom", 1000, 30 * MIB, 0)))
    assert result.divergence is not None
    assert (result.divergence.event, result.divergence.got) == (8, "out of memory")


def test_peaks_of_an_interrupted_pass_are_lower_bounds() -> None:
    trace = load_trace(CASES / "A18_ends_in_oom.json")
    assert replay(replace(trace, peak_reserved=314572801)).exact
    assert not replay(replace(trace, peak_reserved=314572799)).exact


class _Recorder(ModelledDriver):
    """A driver that writes down the segment rows of a pass."""

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self.rows: list[Event] = []
        self.stream = 0

    def take(self, size: int) -> int | None:
        address = super().take(size)
        if address is not None:
            self.rows.append(Event("segment_alloc", address, size, self.stream))
        return address

    def give_back(self, address: int, size: int) -> None:
        super().give_back(address, size)
        self.rows.append(Event("segment_free", address, size, 0))


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40 * MIB), st.sampled_from([0, 3])), min_size=10, max_size=80)
)
@settings(max_examples=150, deadline=None)
def test_what_the_model_does_is_replayed_exactly(steps: list[tuple[int, int, int]]) -> None:
    """Retries and failures under a small card included; one stream is freed late, as by an event."""
    driver = _Recorder(120 * MIB)
    model = CachingAllocator(driver)
    live: list[tuple[int, int, int]] = []
    for kind, number, stream in steps:
        if kind == 1 and live:
            handle, size, owner = live.pop(number % len(live))
            address = model.address(handle)
            model.free(handle)
            driver.rows += [Event(f"free_{when}", address, size, owner) for when in ("requested", "completed")]
        elif kind == 2:
            model.empty_cache()
        else:
            driver.stream = stream
            try:
                handle = model.malloc(number, stream)
            except OutOfMemory as error:
                driver.rows.append(Event("oom", error.free, error.requested, stream))
                break
            driver.rows.append(Event("alloc", model.address(handle), number, stream))
            live.append((handle, number, stream))
    trace = Trace(
        Snapshot(), tuple(driver.rows), model.snapshot(), model.peak_allocated, model.peak_reserved, (0, 120 * MIB)
    )
    result = replay(trace)
    assert result.exact, result.divergence
    assert result.notes == ()
    assert result.after == trace.after
