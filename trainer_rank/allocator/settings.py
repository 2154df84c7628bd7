"""Which allocator settings of a job the model covers: the defaults, and options that change no segment or block."""

from __future__ import annotations

import re
from collections.abc import Mapping

from trainer_rank.errors import UnsupportedError

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Where PyTorch 2.11 to 2.13 looks for allocator settings."""
_OPTION = re.compile(r"\s*([^:,\s]+)\s*:\s*(\[[^\]]*\]|[^,]*)\s*(?:,|$)")
_HARMLESS = {
    "backend": {"native"},
    "expandable_segments": {"false"},
    "release_lock_on_cudamalloc": {"true", "false"},
    "release_lock_on_hipmalloc": {"true", "false"},
    "roundup_power2_divisions": {"0", "1"},
}
_HARMLESS_PREFIXES = ("pinned_",)  # host memory only


def unsupported_settings(environment: Mapping[str, str]) -> list[str]:
    """Return each setting that the model does not cover as ``VARIABLE=option:value``; none when all is covered."""
    found = []
    for variable in VARIABLES:
        text = environment.get(variable, "").strip()
        position = 0
        while position < len(text):
            option = _OPTION.match(text, position)
            if option is None:
                found.append(f"{variable}={text[position:]}")
                break
            position = option.end()
            name, value = option.group(1).lower(), option.group(2).strip()
            if value.lower() not in _HARMLESS.get(name, ()) and not name.startswith(_HARMLESS_PREFIXES):
                found.append(f"{variable}={name}:{value}")
    return found


def require_supported(environment: Mapping[str, str]) -> None:
    """Raise UnsupportedError naming every setting under which segments and blocks follow other rules."""
    found = unsupported_settings(environment)
    if found:
        raise UnsupportedError(
            f"allocator settings that the model does not cover: {', '.join(found)}; unset them, then record and plan"
        )
