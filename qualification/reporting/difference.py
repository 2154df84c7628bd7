"""In what two runs differ: source, policy, rules, verdicts, figures and artifacts. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from qualification.reporting.lines import Difference, RunDetail

_OF_RUN = ("commit", "tree", "dirty", "repository", "reference", "ground", "policy", "policy_sha256", "rules_sha256")


def differences(first: RunDetail, second: RunDetail) -> list[Difference]:
    """Return every difference, in the order source, then per workload verdict, figures and artifacts."""
    sides = [dict(_facts(detail)) for detail in (first, second)]
    names = dict.fromkeys((*sides[0], *sides[1]))
    return [
        Difference(name, sides[0].get(name), sides[1].get(name))
        for name in names
        if sides[0].get(name) != sides[1].get(name)
    ]


def _facts(detail: RunDetail) -> Iterator[tuple[str, str]]:
    """Yield what a run amounts to, by name; of several attempts of a workload the last counts."""
    for name in _OF_RUN:
        yield name, str(getattr(detail.run, name))
    for one in detail.results:
        workload = one.result.workload
        yield f"{workload} verdict", one.result.verdict
        yield f"{workload} parameters", one.given
        yield f"{workload} exit code", str(one.result.exit_code)
        for criterion in one.criteria:
            yield f"{workload} {criterion.name}", f"{criterion.measured} {criterion.unit or ''} {criterion.verdict}"
        for artifact in one.artifacts:
            yield f"{workload} artifact {artifact.name}", artifact.sha256
    for receipt in detail.run.receipts:
        yield f"receipt of attempt {receipt.attempt}", receipt.status
    if detail.run.decision is not None:
        yield "decision", f"{detail.run.decision.decision} ({detail.run.decision.row})"
