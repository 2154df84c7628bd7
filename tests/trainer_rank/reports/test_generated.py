"""Files that a compiler generated are named when the stack of a failure runs through them."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_rank.reports.generated import generated_files

COMPILED = """
import sys
from pathlib import Path
import torch
from trainer_rank.reports.generated import generated_files

torch.compile(lambda rows: rows @ rows)(torch.ones(4, 4))
modules = [each for each in list(sys.modules.values()) if hasattr(each, "call")]
(module,) = [each for each in modules if str(getattr(each, "__file__", "")).startswith(sys.argv[1])]
try:
    module.call([])
except ValueError as error:
    wrapped = RuntimeError("compiled call failed")
    wrapped.__cause__ = error
    (found,) = generated_files(wrapped)
    print(found.name, found.size, found.sha256)
"""


def test_generated_code_on_the_stack_is_named_and_hashed(tmp_path: Path) -> None:
    cache = tmp_path.resolve() / "inductor"
    printed = subprocess.run(
        [sys.executable, "-c", COMPILED, str(cache)],
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_COMPILE_THREADS": "1"},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    name, size, digest = printed.split()
    content = (cache / name).read_bytes()
    assert name.endswith(".py")
    assert (int(size), digest) == (len(content), hashlib.sha256(content).hexdigest())


def test_code_from_elsewhere_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    try:
        raise RuntimeError("here")
    except RuntimeError as error:
        assert generated_files(error) == ()
