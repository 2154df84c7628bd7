"""Two verifiers side by side: the package's own, and tools/verify_bundle.py, loaded as the separate file that it is."""

from __future__ import annotations

import importlib.util
import re
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

from qualification.errors import ConfigurationError
from qualification.evidence.bundle import read_bundle
from qualification.evidence.bundle_check import verify_bundle
from qualification.evidence.findings import InvalidEvidence
from qualification.evidence.trust import Trust

TOOL = Path(__file__).parents[2] / "tools" / "verify_bundle.py"
_CODE = re.compile(r"\[([a-z-]+)\]$")


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("standalone_verifier", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = _load()


def ours(bundle: Path, trust: Path, now: datetime | None = None) -> str | None:
    """Return the code of the first finding of the package's verifier, None when the bundle verifies."""
    try:
        found = verify_bundle(read_bundle(bundle), Trust.load(trust), now).first
    except InvalidEvidence as error:
        return error.code.value
    except ConfigurationError:
        return "unreadable"
    return None if found is None else found.code.value


def theirs(bundle: Path, trust: Path, now: datetime | None = None) -> str | None:
    """Return the code that the standalone verifier ends with, None when the bundle verifies."""
    try:
        keys = tool.Keys()
        keys.load(trust)
        tool.verify(bundle, keys, [], now or datetime.now(UTC))
    except tool.BadError as error:
        found = _CODE.search(str(error))
        assert found, str(error)
        return found[1]
    except tool.MALFORMED:
        return "bundle"
    return None
