from __future__ import annotations

import pytest

from trainer_rank.allocator.settings import VARIABLES, require_supported, unsupported_settings
from trainer_rank.errors import UnsupportedError


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize(
    "setting",
    [
        "backend:cudaMallocAsync",
        "expandable_segments:True",
        "max_split_size_mb:128",
        "roundup_power2_divisions:4",
        "roundup_power2_divisions:[256:1,512:2,>:4]",
        "garbage_collection_threshold:0.8",
        "max_non_split_rounding_mb:64",
        "large_segment_size_mb:64",
        "an_option_of_a_later_version:1",
        "no option at all",
    ],
)
def test_settings_that_change_the_rules_are_named(variable: str, setting: str) -> None:
    assert unsupported_settings({variable: setting}) == [f"{variable}={setting}"]
    with pytest.raises(UnsupportedError, match="set"):
        require_supported({variable: setting})


@pytest.mark.parametrize(
    "setting",
    [
        "", "  ", "backend:native", "expandable_segments:False", "pinned_use_background_threads:True",
        "backend:native, expandable_segments:False,pinned_reserve_segment_size_mb:64",
    ],
)  # fmt: skip
def test_settings_that_change_no_block_are_accepted(setting: str) -> None:
    assert unsupported_settings({VARIABLES[0]: setting}) == []
    require_supported({})


def test_every_setting_of_a_list_is_named() -> None:
    found = unsupported_settings({VARIABLES[1]: "max_split_size_mb:64,backend:native, expandable_segments : True"})
    assert found == [f"{VARIABLES[1]}=max_split_size_mb:64", f"{VARIABLES[1]}=expandable_segments:True"]
