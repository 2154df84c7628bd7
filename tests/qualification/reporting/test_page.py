"""The page of a run: everything recorded, nothing from outside, shown by a real browser."""

import json
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from qualification.reporting.lines import (
    ArtifactLine,
    CriterionLine,
    DecisionLine,
    ReceiptLine,
    ResultDetail,
    ResultLine,
    RunDetail,
    RunLine,
    WordLine,
)
from qualification.reporting.page import page
from qualification.reporting.plots import memory_plot, thresholds_plot

STARTED = "2026-11-30T11:00:00Z"
HOSTILE = "<script>document.title = 'taken'</script> & \"quoted\""
CRITERIA = (
    CriterionLine("allocated_worst_error", "PASSED", "recomputed", "0.125", "5", "at_most", "%", None),
    CriterionLine("backwards", "FAILED", "recomputed", "17", "18", "equal", "backwards", HOSTILE),
    CriterionLine("loss", "INCOMPLETE", "recomputed", None, "3", "at_most", "nats", "loss is NaN"),
    CriterionLine("left", "PASSED", "recomputed", "0", "0", "equal", "B", None),
)
RESULT = ResultLine(
    4, "run-1", 1, "full_step", "c" * 40, "native", "h200", "forecast", "a" * 64, "FAILED", STARTED, 1500, 0, None
)
DECISION = DecisionLine(6, "run-1", "c" * 40, "rejected", "workload_failed", "e" * 64, "b" * 64, 5, STARTED, (HOSTILE,))
RUN = RunLine(
    4,
    "run-1",
    "c" * 40,
    "d" * 40,
    "example.org/training",
    "refs/pull/3/head",
    3,
    False,
    "native",
    "forecast",
    "a" * 64,
    "b" * 64,
    STARTED,
    (RESULT,),
    (ReceiptLine(5, "run-1", 1, "CLEAN", 0, False, False, STARTED, None),),
    DECISION,
)
DETAIL = RunDetail(
    RUN,
    (ResultDetail(RESULT, CRITERIA, (ArtifactLine("log.txt", "f" * 64, 12, "text/plain", False, None),)),),
    (DECISION,),
    (WordLine(7, "hold", "ada", "approver", "c" * 40, "forecast", None, None, STARTED, STARTED, HOSTILE),),
)


def events(*bodies: dict[str, object]) -> bytes:
    return b"\n".join(
        json.dumps({"sequence": number, "monotonic_ns": number, "rank": 0, "event": body}).encode()
        for number, body in enumerate(bodies)
    )


STEPS = events(
    *(
        {"event": kind, "step": step, "peak_allocated": (step + 1) << 24, "peak_reserved": (step + 2) << 24, **more}
        for step in range(3)
        for kind, more in (("forecast", {"bound_allocated": 1 << 27, "bound_reserved": 1 << 27}), ("observed", {}))
    )
)


class Outside(HTMLParser):
    """Collects everything that would make a browser fetch something."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag in {"script", "link", "iframe", "img", "image", "object", "embed"}:
            self.fetched.append(tag)
        for name, value in attributes:
            if name in {"src", "href", "xlink:href", "srcset", "data"} and not (value or "").startswith("#"):
                self.fetched.append(f"{tag} {name}={value}")


def test_the_page_holds_what_was_recorded_and_fetches_nothing() -> None:
    made = page(DETAIL, {4: STEPS})
    for part in ("rejected", "workload_failed", "0.125", "loss is NaN", "c" * 40, "f" * 64, "ada", "refs/pull/3/head"):
        assert part in made
    outside = Outside()
    outside.feed(made)
    assert outside.fetched == []
    assert "url(http" not in made
    assert "@import" not in made
    assert "default-src 'none'" in made


def test_what_people_and_workers_wrote_is_text_and_never_markup() -> None:
    made = page(DETAIL, {})
    assert "<script" not in made
    assert made.count("&lt;script&gt;") == 4


def test_the_page_is_the_same_every_time() -> None:
    assert page(DETAIL, {4: STEPS}) == page(DETAIL, {4: STEPS})


@pytest.mark.browser
def test_a_browser_shows_the_page_with_its_plots(tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    path.write_text(page(DETAIL, {4: STEPS}))
    shown = subprocess.run(
        [
            *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *(f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=2000", "--dump-dom", path.as_uri()),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    assert "<title>Run run-1</title>" in shown
    assert shown.count("<svg") == 2
    assert re.search(r"<td>allocated_worst_error</td>", shown)


def test_an_unreadable_value_is_counted_and_not_drawn_as_zero() -> None:
    plot = memory_plot(
        events(
            {"event": "observed", "step": 0, "peak_allocated": 1 << 24, "peak_reserved": float("nan")},
            {"event": "observed", "step": 1, "peak_allocated": "many", "peak_reserved": 1 << 24},
            {"event": "forecast", "step": None, "peak_allocated": 1},
        )
        + b"\nno json\n"
    )
    assert plot is not None
    assert "2 values could not be read" in plot.caption
    assert memory_plot(b"") is None
    assert memory_plot(b"no json") is None


def test_only_figures_with_a_threshold_other_than_zero_are_compared_in_a_plot() -> None:
    plot = thresholds_plot(CRITERIA)
    assert plot is not None
    assert "allocated_worst_error" in plot.svg
    assert "backwards" in plot.svg
    assert ">left<" not in plot.svg
    assert ">loss<" not in plot.svg
    assert thresholds_plot(CRITERIA[2:]) is None
