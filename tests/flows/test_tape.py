from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.cli.main import execute
from trainer_rank.devices.cards import load_card
from trainer_rank.tapes.shipped import RECORDINGS, shipped_tapes

CASES = Path(__file__).parents[1] / "data" / "traces"
SHIPPED = next(iter(shipped_tapes().values())).path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = execute(["tape", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def check(capsys: pytest.CaptureFixture[str], tape: Path, *traces: Path) -> tuple[int, list[dict[str, Any]]]:
    code, out, _ = run(capsys, "check", tape, *traces, "--json")
    return code, json.loads(out)["files"]


def test_recordings_are_forecast_within_the_stated_error(capsys: pytest.CaptureFixture[str]) -> None:
    code, files = check(capsys, SHIPPED, *sorted(RECORDINGS.glob("*.gz")))
    assert code == 0
    assert len(files) == 5
    for row in files:
        assert row.keys() >= {"file", "tokens", "allocated_error_pct", "reserved_error_pct", "bound_holds", "status"}
        assert abs(row["allocated_error_pct"]) <= 0.05 and abs(row["reserved_error_pct"]) <= 0.5
        assert row["bound_holds"] is True and row["status"] == "covered"


def test_a_shrinking_scratch_is_unknown_and_exits_4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tape = tmp_path / "n.tape"
    probes = [CASES / f"A15_shrinking_T{tokens}.json" for tokens in (4096, 16384)]
    assert run(capsys, "fit", *probes, "-o", tape)[0] == 0
    code, files = check(capsys, tape, CASES / "A15_shrinking_T65536.json")
    assert code == 4
    assert files[0]["status"] == "unknown" and files[0]["bound_holds"] is None
    assert files[0]["allocated_error_pct"] is None


def test_a_bound_that_fails_exits_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tape = tmp_path / "small.tape"
    assert run(capsys, "fit", CASES / "A16_zero_bytes.json", "-o", tape)[0] == 0
    code, files = check(capsys, tape, CASES / "A20_release_inside.json")
    assert (code, files[0]["bound_holds"]) == (3, False)


@pytest.mark.parametrize(
    ("trace", "text"),
    [
        ("A02_history_started_late", "event 0 frees"),
        ("A02_ring_overwrote_middle", "event 2 allocates"),
        ("A02_tail_cut", "incomplete"),
        ("A04_expandable", "segment_map"),
        ("A04_roundup_power2", "event 1: expected a segment of 538968064 B"),
        ("A04_max_split_128", "event 1: expected cached block"),
        ("A15_sixteen_EiB", "more than 1 EiB"),
        ("A18_ends_in_oom", "'oom'"),
    ],
)
def test_a_recording_that_cannot_be_trusted_makes_no_tape(
    trace: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "fit", CASES / f"{trace}.json", "-o", tmp_path / "t.tape")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert text in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("trace", "text"),
    [
        ("A02_ring_overwrote_middle", "event 2: expected"),
        ("A04_expandable", "event 0: expected"),
        ("A04_max_split_128", "event 1: expected cached block"),
        ("A18_ends_in_oom", "lower bounds"),
    ],
)
def test_a_recording_that_cannot_be_trusted_proves_nothing(
    trace: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its figures are compared with nothing, and the others of the same command are still checked."""
    tape, sound = tmp_path / "t.tape", CASES / "A16_zero_bytes.json"
    run(capsys, "fit", sound, "-o", tape)
    code, files = check(capsys, tape, CASES / f"{trace}.json", sound)
    doubtful, checked = files
    assert (code, doubtful["status"], doubtful["bound_holds"]) == (4, "unknown", None)
    assert doubtful["allocated_error_pct"] is None and doubtful["reserved_error_pct"] is None
    assert text in doubtful["uncovered"][0]
    assert (checked["status"], checked["bound_holds"]) == ("covered", True)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"cp": 0}, "context is 0"),
        ({"L": 0}, "layers is 0"),
        ({"T": None}, "T is None"),
        ({"T": 1 << 61}, "give 0 to"),
    ],
)
def test_what_a_recording_states_is_refused_with_its_name(
    changed: dict[str, int | None], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sound = CASES / "A16_zero_bytes.json"
    (tmp_path / "odd.json").write_text(json.dumps(json.loads(sound.read_text()) | changed))
    (tmp_path / "bare.json").write_text(
        json.dumps({k: v for k, v in json.loads(sound.read_text()).items() if k != "T"})
    )
    run(capsys, "fit", sound, "-o", tmp_path / "t.tape")
    for file, words in (("odd.json", text), ("bare.json", "states no number of tokens")):
        for command in (
            ["fit", tmp_path / file, "-o", tmp_path / "o.tape"],
            ["check", tmp_path / "t.tape", tmp_path / file],
        ):
            code, out, err = run(capsys, *command)
            assert (code, out, err.count("\n")) == (2, "", 1)
            assert file in err and words in err
    assert not (tmp_path / "o.tape").exists()


def test_streams_keep_their_own_pools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tape = tmp_path / "streams.tape"
    trace = CASES / "A19_two_streams.json"
    run(capsys, "fit", trace, "-o", tape)
    code, files = check(capsys, tape, trace)
    assert code == 0
    assert files[0]["expected"] == {"allocated": 54525952, "reserved": 58720256}
    assert files[0]["reserved_by_stream"] == {"0": 29360128, "1": 29360128}
    assert "reserved for stream 1: 29,360,128 B" in run(capsys, "check", tape, trace)[1]


def test_show_names_what_lived_before_the_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tape, plot = tmp_path / "before.tape", tmp_path / "before.png"
    run(capsys, "fit", CASES / "A03_baseline_100_plus_20.json", "-o", tape, "--provenance", "card=h200")
    code, out, _ = run(capsys, "show", tape, "--json", "--plot", plot)
    shown = json.loads(out)
    assert code == 0
    assert shown["provenance"] == {"card": "h200"}
    assert shown["composition"] == {"present at the start": 104857600, "step": 20971520}
    assert sum(shown["composition"].values()) == shown["peak_allocated"] == 125829120
    assert plot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "104,857,600 B  present at the start" in run(capsys, "show", tape)[1]


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_plot_without_a_name_is_drawn_beside_the_tape_s_name(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "show", SHIPPED, "--plot", *more)
    assert code == 0 and SHIPPED.name in err
    assert [each.name for each in tmp_path.iterdir()] == [f"{SHIPPED.name}.png"]
    assert not more or json.loads(out)["schema"] == "qualify.tape.show/1"


@pytest.mark.parametrize(("file", "text"), [("x.xyz", "no kind of picture"), ("x", ".png"), ("no/x.png", "written")])
def test_a_plot_that_cannot_be_drawn_is_refused(
    file: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "show", SHIPPED, "--plot", tmp_path / file)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert text in err and list(tmp_path.iterdir()) == []


def test_a_tape_for_something_else_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    trace = RECORDINGS / "h200_cp1_L4_T4096.json.gz"
    assert run(capsys, "check", SHIPPED, trace, "--target", "card=h200")[0] == 0
    code, _, err = run(capsys, "check", SHIPPED, trace, "--target", "card=a100")
    assert code == 2 and "recorded for card h200, not a100" in err


def test_usage_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "fit", CASES / "A16_zero_bytes.json", "-o", tmp_path / "t", "--provenance", "card")[0] == 2
    code, _, err = run(capsys, "show", SHIPPED, "--probe", "absent")
    assert code == 2 and "no recording 'absent'" in err
    assert run(capsys, "check", tmp_path / "absent", CASES / "A16_zero_bytes.json")[0] == 2


def test_probes_are_recorded_fitted_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    probes, tape = tmp_path / "probes", tmp_path / "reference.tape.json.gz"
    arguments = ("--geometry", "tiny", "--largest", 200, "--seconds", 5)
    code, out, err = run(capsys, "record", "-o", probes, "-t", tape, *arguments)
    assert (code, err) == (0, "")
    traces = sorted(probes.iterdir())
    assert len(traces) >= 3 and out.count("B allocated") == len(traces)
    card = load_card("h200")
    taken = card.held_outside("first_backward") - card.held_outside("first_forward")
    assert "recorded again, pass 2:" in out and f"{taken:,} B first taken in backward" in out
    code, files = check(capsys, tape, *traces)
    assert code == 0 and {row["status"] for row in files} == {"covered"}
    shown = json.loads(run(capsys, "show", tape, "--json")[1])
    assert {each["name"]: each["size"] for each in shown["claims"]}["backward"] == taken
    assert shown["provenance"]["card"] == "h200" and shown["provenance"]["geometry"] == "reference-tiny"
    assert run(capsys, "record", "-o", probes, "--device", "tpu:0")[0] == 2
    assert run(capsys, "record", "-o", probes, "--device", "cuda:x")[0] == 2
    assert run(capsys, "record", "-o", probes, "--geometry", "huge")[0] == 2
