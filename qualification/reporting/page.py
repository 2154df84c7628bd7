"""One run as a single HTML page: tables and plots, no script, no outside resource, everything escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

from qualification.reporting.lines import ResultDetail, RunDetail, RunLine
from qualification.reporting.plots import Plot, memory_plot, thresholds_plot

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #1c2430; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0; font-size: .9rem; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #e1e5ea; vertical-align: top; }
td { overflow-wrap: anywhere; } .good { color: #2d7a49; } .bad { color: #a62e24; } .open { color: #8a6a12; }
.answer { font-weight: 600; } figure { margin: 1rem 0; } figcaption { color: #5a6675; font-size: .85rem; }
svg { max-width: 100%; height: auto; }
"""
_GOOD, _BAD = {"PASSED", "CLEAN", "adopted", "approve"}, {"FAILED", "DIRTY", "rejected", "reject"}


def holds_events(artifact: str) -> bool:
    """Whether an artifact, by its name, holds stamped events, as the launcher keeps them of each process."""
    return artifact.startswith("launcher:") and artifact.endswith("events.jsonl")


def page(detail: RunDetail, events: Mapping[int, bytes]) -> str:
    """Return the page of a run; ``events`` are the stamped events of results, by their ledger sequence."""
    run = detail.run
    body = [
        f"<h1>Run {escape(run.run)}</h1>",
        _answer(run),
        _table(("", ""), [(name, escape(value)) for name, value in _about(run)]),
        *(part for one in detail.results for part in _result(one, events.get(one.result.sequence))),
        "<h2>Cleanup</h2>",
        _table(
            ("attempt", "status", "exit code", "taken (UTC)", "reason"),
            [
                (str(one.attempt), _word(one.status), _text(one.exit_code), _text(one.taken_at), _text(one.reason))
                for one in run.receipts
            ],
        ),
        "<h2>Decisions</h2>",
        _table(
            ("decision", "row", "decided (UTC)", "sequence", "reasons"),
            [
                (_word(one.decision), _text(one.row), _text(one.decided_at), str(one.sequence), _list(one.reasons))
                for one in detail.decisions
            ],
        ),
        "<h2>People's words on this commit</h2>",
        _table(
            ("person", "word", "policy", "signed (UTC)", "expires (UTC)", "note"),
            [
                (
                    _text(one.person),
                    _word(one.action),
                    *map(_text, (one.policy, one.signed_at, one.expires_at, one.note)),
                )
                for one in detail.words
            ],
        ),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Run {escape(run.run)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _answer(run: RunLine) -> str:
    made = run.decision
    if made is None:
        return '<p class="answer">No decision is recorded.</p>'
    return f'<p class="answer">{_word(made.decision)} (row {escape(made.row)})</p>{_list(made.reasons)}'


def _about(run: RunLine) -> list[tuple[str, str]]:
    dirty = " with uncommitted changes" if run.dirty else ""
    return [
        ("commit", f"{run.commit}{dirty}"),
        ("repository", run.repository),
        ("reference", run.reference or "-"),
        ("policy", f"{run.policy} {run.policy_sha256}"),
        ("ground", run.ground),
        ("gate rules", run.rules_sha256),
        ("started (UTC)", run.started_at),
    ]


def _result(one: ResultDetail, events: bytes | None) -> Iterable[str]:
    result = one.result
    seconds = f"{result.duration_ms / 1000:.1f} s"
    yield f"<h2>{escape(result.workload)} {_word(result.verdict)}</h2>"
    yield f"<p>{escape(result.ground)}, attempt {result.attempt}, {seconds}. {_text(result.reason or '')}</p>"
    yield _table(
        ("criterion", "measured", "must be", "threshold", "unit", "basis", "verdict", "reason"),
        [
            (
                *map(_text, (c.name, c.measured, (c.direction or "").replace("_", " "), c.threshold, c.unit, c.basis)),
                _word(c.verdict),
                _text(c.reason or ""),
            )
            for c in one.criteria
        ],
    )
    yield _figure(thresholds_plot(one.criteria))
    yield _figure(memory_plot(events) if events is not None else None)
    yield _table(
        ("artifact", "bytes", "kind", "SHA-256"),
        [(_text(a.name), str(a.size), _text(a.media_type), _text(a.sha256)) for a in one.artifacts],
    )


def _figure(plot: Plot | None) -> str:
    return f"<figure>{plot.svg}<figcaption>{escape(plot.caption)}</figcaption></figure>" if plot else ""


def _table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table of cells that are HTML already."""
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    if not body:
        return "<p>none</p>"
    return f"<table><tr>{''.join(f'<th>{escape(heading)}</th>' for heading in headings)}</tr>{body}</table>"


def _word(word: str) -> str:
    kind = "good" if word in _GOOD else "bad" if word in _BAD else "open"
    return f'<span class="{kind}">{escape(word)}</span>'


def _list(reasons: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(reason)}</li>' for reason in reasons)}</ul>"


def _text(value: str | int | None) -> str:
    return "-" if value is None else escape(str(value))
