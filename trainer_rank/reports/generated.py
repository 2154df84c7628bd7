"""Name the files that a compiler generated and that the stack of a failure runs through, before they are retired."""

from __future__ import annotations

import getpass
import hashlib
import os
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

from trainer_rank.outofmemory import chain
from trainer_rank.reports.failure import Generated

CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TILELANG_CACHE_DIR")
"""Variables that name the compile caches."""
MOST = 16


def generated_files(error: BaseException) -> tuple[Generated, ...]:
    """Return the generated files whose code is on the stack of ``error`` or of anything behind it, at most 16."""
    roots = list(_roots())
    found: dict[str, Generated] = {}
    for path in _files(error):
        root = next((root for root in roots if path.is_relative_to(root)), None)
        if root is None or len(found) == MOST:
            continue
        try:
            content = path.read_bytes()
        except OSError:  # gone already; its name alone says nothing
            continue
        name = str(path.relative_to(root))
        found[name] = Generated(name, len(content), hashlib.sha256(content).hexdigest())
    return tuple(found.values())


def _files(error: BaseException) -> Iterator[Path]:
    """Yield the files of all frames, those nearest to the failure first."""
    for each in chain(error):
        frames = [frame for frame, _ in traceback.walk_tb(each.__traceback__)]
        yield from (Path(frame.f_code.co_filename).resolve() for frame in reversed(frames))


def _roots() -> Iterator[Path]:
    given = [os.environ[name] for name in CACHES if os.environ.get(name)]
    yield from (Path(each).resolve() for each in given)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        return
    yield Path(tempfile.gettempdir(), f"torchinductor_{user}").resolve()
