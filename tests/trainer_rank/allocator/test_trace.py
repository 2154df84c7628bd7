from __future__ import annotations

import gzip
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from trainer_rank.allocator import trace as trace_module
from trainer_rank.allocator.trace import load_trace, parse_trace, save_trace
from trainer_rank.errors import TraceError

RECORDING = Path(str(files("trainer_rank.tapes").joinpath("recordings", "h200_cp2_L4_T4096.json.gz")))
SEGMENT: dict[str, Any] = {"a": 4096, "t": 1024, "k": "small", "st": 0, "b": [[4096, 1024, 0, "inactive"]]}


def parse(**keys: Any) -> None:
    document = {"before": [], "events": [["alloc", 1, 2, 3]], **keys}
    parse_trace(json.dumps({key: value for key, value in document.items() if value is not ...}).encode(), "t.json")


@pytest.mark.parametrize("name", ["copy.json", "copy.json.gz"])
def test_what_is_saved_is_loaded(tmp_path: Path, name: str) -> None:
    original = load_trace(RECORDING)
    save_trace(original, tmp_path / name)
    again = load_trace(tmp_path / name)
    for field in ("before", "events", "after", "peak_allocated", "peak_reserved", "memory_info", "features", "marks"):
        assert getattr(again, field) == getattr(original, field)
    assert original.features == {"tokens": 4096, "layers": 4, "context": 2}
    save_trace(again, tmp_path / f"second_{name}")
    assert (tmp_path / f"second_{name}").read_bytes() == (tmp_path / name).read_bytes()


def test_marks_and_features_travel(tmp_path: Path) -> None:
    text = json.dumps({"before": [SEGMENT], "events": [["alloc", 1, 2, 3]] * 3, "features": {"sequences": 2}, "T": 8,
                       "marks": [[0, "forward"], [2, "backward"]]})  # fmt: skip
    save_trace(parse_trace(text.encode(), "here"), tmp_path / "t.json")
    trace = load_trace(tmp_path / "t.json")
    assert trace.features == {"tokens": 8, "sequences": 2}
    assert trace.marks == ((0, "forward"), (2, "backward"))
    assert trace.before.segments[0].blocks[0].size == 1024


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"events": ...}, "'events' is missing"),
        ({"before": ...}, "'before' is missing"),
        ({"events": []}, "empty"),
        ({"events": {}}, "not a list"),
        ({"events": [["alloc", 1, 2, 3], ["alloc", 1, 2]]}, "event 1 "),
        ({"events": [[7, 1, 2, 3]]}, "event 0 "),
        ({"events": [["alloc", 1, 2.5, 3]]}, "event 0 .*size is 2.5"),
        ({"events": [["alloc", 1, -1, 3]]}, "event 0 .*size is -1"),
        ({"events": [["alloc", 1, float("nan"), 3]]}, "event 0 .*size is nan"),
        ({"events": [["alloc", True, 1, 3]]}, "event 0 .*address is True"),
        ({"events": [["alloc", 1, 1, None]]}, "event 0 .*stream is None"),
        ({"events": [["alloc", 1, 1 << 64, 0]]}, "event 0 .*size is 18446744073709551616"),
        ({"peak_alloc": -1}, "peak_alloc is -1"),
        ({"peak_res": 1.0}, "peak_res is 1.0"),
        ({"free_total": [1]}, "free_total"),
        ({"free_total": [1, "2"]}, "free_total total is '2'"),
        ({"T": "many"}, "T is 'many'"),
        ({"features": [1]}, "features"),
        ({"features": {"sequences": -1}}, "feature sequences is -1"),
        ({"marks": [[5, "late"]]}, "mark 0: event index is 5"),
        ({"marks": [[1, "a"], [0, "b"]]}, "order"),
        ({"marks": [["a", 0]]}, "mark 0"),
        ({"before": {}}, "list of segments"),
        ({"before": [1]}, "segment 0 is 1"),
        ({"before": [{"a": 1}]}, "segment 0 lacks b, k, st, t"),
        ({"before": [SEGMENT | {"k": "huge"}]}, "pool 'huge'"),
        ({"before": [SEGMENT | {"t": 2048}]}, "holds 2048 B but its blocks sum to 1024 B"),
        ({"before": [SEGMENT | {"b": []}]}, "no blocks"),
        ({"before": [SEGMENT | {"b": [[4096, 1024, 0]]}]}, "block 0 is"),
        ({"before": [SEGMENT | {"b": [[4096, 1024, 0, "gone"]]}]}, "state 'gone'"),
        ({"before": [SEGMENT | {"b": [[4096, 0, 0, "inactive"]]}]}, "block 0 is empty"),
        ({"before": [SEGMENT | {"b": [[4608, 1024, 0, "inactive"]]}]}, "block 0 starts at 0x1200; 0x1000 is next"),
        ({"before": [SEGMENT, SEGMENT | {"a": 4608, "b": [[4608, 1024, 0, "inactive"]]}]}, "overlap"),
        ({"after": 3}, "after: a list of segments"),
    ],
)
def test_a_field_that_cannot_be_read_is_named(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(TraceError, match=words) as caught:
        parse(**keys)
    assert str(caught.value).startswith("t.json: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty file, nothing to read at byte 0"),
        (b'{"before": [], "ev', "byte 15 of 18"),
        (b'{"before": "\xff"}', "byte 12"),
        (b"[" * 200_000, "nested too deep"),
        (b"[]", "a trace is an object"),
        (b'{"before":[],"events":[["alloc",1,' + b"9" * 5000 + b",0]]}", "event 0 .*size"),
        (b"\x1f\x8b", "byte 2 of the file"),
        (RECORDING.read_bytes()[:30_000], "byte 30000 of the file"),
        (RECORDING.read_bytes()[:-8] + bytes(8), "gzip data is cut or damaged"),
        (gzip.compress(b'{"before"'), "byte 9 of 9"),
    ],
)
def test_a_file_that_cannot_be_read_names_the_byte(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=words) as caught:
        load_trace(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(TraceError, match=str(path)):
            load_trace(path)


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_beyond_the_limit_is_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    monkeypatch.setattr(trace_module, "LARGEST_FILE", 1000)
    content = b" " * 10_000_000
    (tmp_path / "big").write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(TraceError, match="more than 1000 bytes"):
        load_trace(tmp_path / "big")
