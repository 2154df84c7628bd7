"""The admission workloads, run whole by the worker and judged from what it left."""

from __future__ import annotations

from pathlib import Path

from qualification.records import Verdict
from qualification.workloads.histories import LENGTHS, histories, scaled
from qualification.workloads.oversized import OWN_PER_MILLION
from tests.qualification.workloads.test_releases import qualify


def test_a_cold_admission_beside_a_ballast_is_fitted_or_refused(tmp_path: Path) -> None:
    criteria = qualify("ballast", "forecast", tmp_path, levels=2, scale=64, most_free=300_000_000)
    assert {each.name: each.reason for each in criteria if each.verdict is not Verdict.PASSED} == {}
    assert {each.name: each.measured for each in criteria if each.name.startswith("batches_")} == {
        "batches_without_the_reported_ballast": 0,
        "batches_fitted": 2,
        "batches_refused": 1,
        "batches_unanswered": 0,
    }


def test_the_oversized_incident_finds_a_smaller_plan_and_explains_a_forced_failure(tmp_path: Path) -> None:
    criteria = qualify("oversized", "forecast", tmp_path, scale=128, capacity=1_485_000_000)
    assert {each.name: each.reason for each in criteria if each.verdict is not Verdict.PASSED} == {}


def test_the_declared_tree_packs_into_the_reported_share() -> None:
    import torch

    from trainer_rank.execution import KEY_BYTES, prefix_keys
    from trainer_rank.prefixes import find_prefixes
    from trainer_rank.requests import Request

    assert sum(LENGTHS) == 1_073_093
    lengths = scaled(LENGTHS, 16)
    sequences = histories(lengths, OWN_PER_MILLION, 2048, torch.Generator().manual_seed(1))
    requests = {index: Request(each[:-1], each[1:]) for index, each in enumerate(sequences)}
    assert [request.tokens.shape[0] for request in requests.values()] == lengths
    packed = find_prefixes(prefix_keys(requests), KEY_BYTES).packed_tokens(dict(enumerate(lengths)))
    assert abs(packed / sum(lengths) - 359_965 / 1_073_093) < 0.005
