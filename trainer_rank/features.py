"""The plan's features: the integers that decide how much a plan allocates. Pure; defined only here.

Every size on a tape is explained by these names. A feature that nobody gave is unknown, never zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainer_rank.errors import InvalidInputError
from trainer_rank.geometry import ModelGeometry, Topology

PACKED_TOKENS = "packed_tokens"
TOKENS = "tokens"
ROUTED_ROWS = "routed_rows"
SEQUENCES = "sequences"
LONGEST_SEQUENCE = "longest_sequence"
CHUNKS_64 = "chunks_64"
OUTPUT_ROWS = "output_rows"
ADAPTER_BYTES = "adapter_bytes"
LOGICAL_TOKENS = "logical_tokens"
ATTENDED_ROWS = "attended_rows"

FEATURES = {
    PACKED_TOKENS: "rows that this rank executes",
    TOKENS: "rows of the plan over all context ranks",
    ROUTED_ROWS: "rows that this rank's router hands to experts",
    SEQUENCES: "sequences in the pack",
    LONGEST_SEQUENCE: "rows of the longest sequence",
    CHUNKS_64: "chunks of 64 rows, no chunk across two sequences",
    OUTPUT_ROWS: "rows whose log-probability the head computes on this rank",
    ADAPTER_BYTES: "trainable adapter bytes of the slot",
    LOGICAL_TOKENS: "tokens of the requests, where other rows run: prefixes are shared, or ranks pad their shares",
    ATTENDED_ROWS: "rows that sequences attend to, where prefixes are shared: their own, and what they continue",
}
"""Every feature by name, simplest explanation first, with what it counts."""

LARGEST = 2**60
"""No feature and no size reaches this (1 EiB): what does is a broken number, not a plan."""


def plan_features(
    lengths: Sequence[int],
    geometry: ModelGeometry,
    topology: Topology,
    *,
    output_rows: int | None = None,
    adapter_bytes: int = 0,
) -> dict[str, int]:
    """Return the features of one subforward with sequences of ``lengths`` rows.

    ``output_rows`` counts rows of the plan that need an output (all of them by default). Under context
    parallelism every rank holds an equal share of the rows. Raises InvalidInputError for an empty pack,
    a length below 1, or a sum that no machine can hold.
    """
    if not lengths:
        raise InvalidInputError("a plan without sequences has no features; give at least one length")
    for index, length in enumerate(lengths):
        if length < 1:
            raise InvalidInputError(f"sequence {index} has length {length}; give at least one token")
    tokens = sum(lengths)
    if tokens >= LARGEST:
        raise InvalidInputError(f"{tokens} packed tokens are no plan; give fewer than {LARGEST}")
    packed = -(-tokens // topology.context)
    outputs = tokens if output_rows is None else output_rows
    return {
        PACKED_TOKENS: packed,
        TOKENS: tokens,
        ROUTED_ROWS: packed * geometry.experts_per_token,
        SEQUENCES: len(lengths),
        LONGEST_SEQUENCE: max(lengths),
        CHUNKS_64: sum(-(-length // 64) for length in lengths),
        OUTPUT_ROWS: -(-outputs // topology.context),
        ADAPTER_BYTES: adapter_bytes,
    }


def recorded_features(features: Mapping[str, int]) -> dict[str, int]:
    """Return the plan features of a recording from what it states.

    A recording in the published trace format states only ``tokens`` over all ranks and ``context``; what follows
    from these is added, and nothing else is assumed. Raises InvalidInputError when no number of rows is stated.
    """
    named = {name: features[name] for name in FEATURES if name in features}
    if PACKED_TOKENS not in named:
        if TOKENS not in named:
            raise InvalidInputError("the recording states no number of tokens; record it again with its features")
        named[PACKED_TOKENS] = -(-named[TOKENS] // features.get("context", 1))
    for name, value in named.items():
        if not 0 <= value < LARGEST:
            raise InvalidInputError(f"the recording states {name} = {value}; give 0 to {LARGEST - 1}")
    return named
