from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.trainer_rank.tapes.programs import layered, record, rows
from trainer_rank.errors import TapeError
from trainer_rank.tapes import Tape, fit
from trainer_rank.tapes.storage import document, load_tape, save_tape


def tape() -> Tape:
    sizes = (rows(8192), lambda f: min(65536 * f["packed_tokens"], 50 << 20), rows(7, 13))
    probes = [record(layered(2, sizes, rows(4096)), {"packed_tokens": n, "layers": 2}) for n in (256, 1000, 5000)]
    return fit(probes, {"card": "h200", "geometry": "small"})


@pytest.mark.parametrize("name", ["model.tape.json", "model.tape.json.gz"])
def test_a_tape_comes_back_as_it_was(tmp_path: Path, name: str) -> None:
    save_tape(tape(), tmp_path / name)
    assert load_tape(tmp_path / name) == tape()
    assert (tmp_path / name).read_bytes()[:2] == (b"\x1f\x8b" if name.endswith("gz") else b'{"')
    first = (tmp_path / name).read_bytes()
    save_tape(tape(), tmp_path / name)
    assert (tmp_path / name).read_bytes() == first
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_a_tape_for_something_else_is_refused_with_the_reason(tmp_path: Path) -> None:
    save_tape(tape(), tmp_path / "t.json")
    assert load_tape(tmp_path / "t.json", target={"card": "h200"}).provenance["geometry"] == "small"
    with pytest.raises(TapeError, match="recorded for card h200, not a100"):
        load_tape(tmp_path / "t.json", target={"card": "a100"})
    with pytest.raises(TapeError, match="recorded for commit unstated, not 0123"):
        load_tape(tmp_path / "t.json", target={"commit": "0123"})


def broken(change: str) -> bytes:
    content = document(tape())
    path = content["parts"][0]["paths"][0]
    if change == "schema":
        content["schema"] = "other"
    elif change == "version":
        content["version"] = 99
    elif change == "index":
        path["allocations"][0] = 10_000
    elif change == "negative index":
        path["allocations"][0] = -1
    elif change == "subject":
        path["operations"][0][1] = 10_000
    elif change == "float":
        content["explanations"][0][1][1] = 1.5
    elif change == "feature":
        content["explanations"][0][1][0] = [["colour", 1, 3]]
    elif change == "probes":
        path["probes"] = []
    elif change == "missing":
        del path["stages"]
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    "change", ["schema", "version", "index", "negative index", "subject", "float", "feature", "probes", "missing"]
)
def test_a_file_that_is_no_tape_is_refused(tmp_path: Path, change: str) -> None:
    (tmp_path / "t.json").write_bytes(broken(change))
    with pytest.raises(TapeError, match=r"t\.json: not a tape"):
        load_tape(tmp_path / "t.json")


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b"\xff\xfe", gzip.compress(json.dumps(document(tape())).encode())[:200]]
)
def test_a_damaged_file_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "t.json.gz").write_bytes(data)
    with pytest.raises(TapeError, match=r"t\.json\.gz: not"):
        load_tape(tmp_path / "t.json.gz")


def test_a_file_that_cannot_be_read_or_written_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(TapeError, match="No such file"):
        load_tape(tmp_path / "absent.json")
    with pytest.raises(TapeError, match="cannot be written"):
        save_tape(tape(), tmp_path / "absent" / "t.json")
