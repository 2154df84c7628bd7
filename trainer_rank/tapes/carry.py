"""Carry what one topology shows of an allocation to the same allocation in another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from trainer_rank.tapes.explain import Explanation, Grounds, Sample
from trainer_rank.tapes.rules import Rule


def carry(
    explanations: Sequence[Explanation], samples: Sequence[Sequence[Sample]], links: Iterable[tuple[int, int]]
) -> list[Explanation]:
    """Return the explanations, improved where a linked one (the same allocation elsewhere) shows more.

    A floor or ceiling is carried to a rule with the same terms. An allocation seen once at each of two places keeps
    its size when the other place shows that it hardly grows. Each carried rule still gives every recorded size.
    """
    result = list(explanations)
    for left, right in sorted(links):
        for target, source in ((left, right), (right, left)):
            result[target] = _improved(result[target], result[source], samples[target], samples[source])
    return result


def _improved(
    ours: Explanation, theirs: Explanation, samples: Sequence[Sample], others: Sequence[Sample]
) -> Explanation:
    rule, source = ours.rule, theirs.rule
    if rule.terms and rule.terms == source.terms and rule.constant == source.constant:
        held = Rule(rule.terms, rule.constant, rule.floor or source.floor, rule.ceiling or source.ceiling)
        if held != rule and _meets(held, samples):
            return replace(ours, rule=held)
    if ours.grounds is Grounds.ONCE and theirs.grounds is not Grounds.ONCE and _meets(source, samples):
        return Explanation(source, ours.others, Grounds.UNCHECKED)
    if ours.grounds is Grounds.ONCE and theirs.grounds is Grounds.ONCE and rule.terms:
        constant = Rule(constant=samples[0][1])
        if _hardly_grows(samples[0], others[0]):
            return replace(ours, rule=constant, others=(*ours.others, rule))
    return ours


def _meets(rule: Rule, samples: Sequence[Sample]) -> bool:
    return all(rule.size(features) == size for features, size in samples)


def _hardly_grows(left: Sample, right: Sample) -> bool:
    """Tell whether sizes differ by less than the square root of the least growth of any common feature."""
    growths = [
        max(left[0][name], right[0][name]) / min(left[0][name], right[0][name])
        for name in left[0].keys() & right[0].keys()
        if min(left[0][name], right[0][name]) > 0 and left[0][name] != right[0][name]
    ]
    change = max(left[1], right[1]) / min(left[1], right[1])
    return bool(growths) and change * change < min(growths)
