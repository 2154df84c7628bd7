import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_rank.errors import InvalidInputError, UnsupportedError
from trainer_rank.geometry import Topology
from trainer_rank.models.megatron.geometry import QWEN_36_35B_A3B, require_layers, require_supported
from trainer_rank.models.megatron.grid import STEPS_PER_OCTAVE, grid_sizes, padded_tokens
from trainer_rank.models.megatron.layout import lay_out
from trainer_rank.models.sharding import local_positions, padded_length


def test_parameter_count_is_that_of_the_built_model() -> None:
    assert QWEN_36_35B_A3B.parameters() == 34_660_610_688


def test_attention_in_every_fourth_layer() -> None:
    assert QWEN_36_35B_A3B.attention_layers == 10
    assert QWEN_36_35B_A3B.with_layers(4).attention_layers == 1
    assert QWEN_36_35B_A3B.with_layers(3).attention_layers == 0


@pytest.mark.parametrize("layers", [41, 64])
def test_layer_counts_outside_the_geometry_are_refused(layers: int) -> None:
    with pytest.raises(InvalidInputError, match=f"{layers} layers"):
        require_layers(QWEN_36_35B_A3B.with_layers(layers))


@pytest.mark.parametrize("field", ["data", "tensor", "pipeline", "expert"])
def test_unsupported_parallel_sizes_are_named(field: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{field} parallel size 2"):
        require_supported(Topology(**{field: 2}))


def test_supported_topologies() -> None:
    require_supported(Topology())
    require_supported(Topology(context=2))
    with pytest.raises(UnsupportedError, match="context parallel size 4"):
        require_supported(Topology(context=4))


def test_building_names_the_extra_where_the_stack_is_absent() -> None:
    from trainer_rank.models.megatron.block import require_megatron

    assert "megatron" not in sys.modules, "this test needs a machine without Megatron"
    with pytest.raises(UnsupportedError, match=r"\[megatron\]"):
        require_megatron()


@given(st.integers(1, 2_000_000), st.sampled_from([1, 2, 4]))
def test_grid_covers_and_wastes_little(tokens: int, context: int) -> None:
    size = padded_tokens(tokens, context)
    assert size >= tokens
    assert size % context == 0
    assert padded_tokens(size, context) == size
    if tokens > 256 * context * STEPS_PER_OCTAVE:
        assert (size - tokens) * STEPS_PER_OCTAVE < tokens


def test_grid_is_small() -> None:
    assert len(grid_sizes(4_096, 262_144)) == 6 * STEPS_PER_OCTAVE + 1


@given(st.lists(st.integers(1, 5_000), min_size=1, max_size=12), st.sampled_from([1, 2]))
def test_ranks_hold_every_padded_row_once(lengths: list[int], ranks: int) -> None:
    layouts = [lay_out(lengths, ranks, rank) for rank in range(ranks)]
    rows = [row for layout in layouts for start, end in layout.ranges for row in range(start, end)]
    assert sorted(rows) == list(range(layouts[0].tokens))
    assert len({sum(end - start for start, end in layout.ranges) for layout in layouts}) == 1
    assert sum(length for _, _, length in layouts[0].sources) == sum(lengths)
    assert padded_tokens(layouts[0].tokens, 2 * ranks if ranks > 1 else 1) == layouts[0].tokens


@given(st.integers(1, 4_000), st.sampled_from([2, 4]))
def test_causal_work_is_equal_among_ranks(length: int, ranks: int) -> None:
    padded = padded_length(length, ranks)
    work = [
        sum(sum(range(start, end)) for start, end in local_positions([padded], ranks, rank)) for rank in range(ranks)
    ]
    assert max(work) - min(work) == 0


def test_unpadded_sequence_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="pad it to a multiple of 4"):
        local_positions([8, 6], 2, 0)
