"""The gate's answer in words, as a versioned document, and its table as Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from qualification.gate import ADOPTION, CONDITIONS, REJECTIONS, TAMPERED, GateInputs, Line, Ruling, flatten, table
from qualification.records import Decision

SCHEMA = "qualify.gate/1"
_NEXT = {
    "unverified": "qualify verify",
    "unclean": "qualify evidence show {run}",
    "tampered": "qualify verify",
    "rehearsal": "qualify run --ground native --head {commit}",
    "unapproved": "qualify approve {run}",
    "stale": "qualify run --head {commit}",
    "incomplete": "qualify evidence show {run}",
    "workload_failed": "qualify evidence show {run}",
}


def next_command(inputs: GateInputs, ruling: Ruling) -> str:
    """Return the command that helps most after this answer."""
    return _NEXT.get(ruling.row, "qualify gate explain {run}").format(run=inputs.run, commit=inputs.commit)


def case_document(inputs: GateInputs, ruling: Ruling, lines: tuple[Line, ...] | None = None) -> dict[str, object]:
    """Return the answer as the document that ``--json`` prints."""
    document: dict[str, object] = {
        "schema": SCHEMA,
        "run": inputs.run,
        "commit": inputs.commit,
        "policy": inputs.policy,
        "decision": ruling.decision,
        "tampered": ruling.row == TAMPERED.name,
        "row": ruling.row,
        "reasons": ruling.reasons,
        "evidence_root": inputs.evidence_root,
        "rules_sha256": inputs.rules_sha256,
        "decided_at": inputs.decided_at,
        "remarks": inputs.remarks,
        "next": next_command(inputs, ruling),
    }
    if lines is not None:
        document |= {"inputs": flatten(inputs), "table": lines}
    return document


def explanation(inputs: GateInputs, ruling: Ruling, *, full: bool) -> str:
    """Return the answer in words; ``full`` adds every input and every row of the table."""
    return "\n".join(_full(inputs, ruling) if full else _short(inputs, ruling))


def _short(inputs: GateInputs, ruling: Ruling) -> Iterator[str]:
    marked = ", tampered" if ruling.row == TAMPERED.name else ""
    yield f"{ruling.decision.value}{marked}: run {inputs.run}, policy {inputs.policy}, commit {inputs.commit}"
    yield from (f"  - {reason}" for reason in ruling.reasons)
    yield from (f"  note: {remark}" for remark in inputs.remarks)
    if ruling.decision is not Decision.ADOPTED:
        yield f"next: {next_command(inputs, ruling)}"


def _full(inputs: GateInputs, ruling: Ruling) -> Iterator[str]:
    yield "Inputs"
    flat = flatten(inputs)
    width = max(len(name) for name in flat)
    for name, value in flat.items():
        yield f"  {name:<{width}}  {_shown(value)}"
    yield ""
    yield "Table (the first row that matches decides)"
    for line in table(inputs):
        mark = "=>" if line.applies else "  "
        yield f"  {mark} {_state(line):<9} {line.row:<16} {line.decision.value:<9} {line.text}"
        yield from (f"       {'':<26} - {reason}" for reason in line.reasons)
    yield ""
    yield from _short(inputs, ruling)


def _state(line: Line) -> str:
    if line.row in {row.name for row in CONDITIONS}:
        return "not met" if line.reasons else "met"
    return "matches" if line.reasons else "no match"


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return "; ".join(map(str, value)) or "none"
    return "absent" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def rules_table() -> str:
    """Return the gate's table as Markdown, in the order in which rows are looked at."""
    rows = [
        (TAMPERED.name, TAMPERED.text, "**held**, marked tampered", 5),
        *((row.name, row.text, "**rejected**", 3) for row in REJECTIONS),
        (ADOPTION.name, ADOPTION.text, "**adopted**", 0),
        *((row.name, f"not: {row.text}", "**held**", 6 if row.name == "unclean" else 4) for row in CONDITIONS),
    ]
    lines = ["| # | row | matches when | decision | exit code |", "|---|---|---|---|---|"]
    lines += [
        f"| {number} | `{name}` | {text} | {answer} | {code} |"
        for number, (name, text, answer, code) in enumerate(rows, 1)
    ]
    return "\n".join(lines) + "\n"
