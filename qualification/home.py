"""Where state and trust live; never inside a checkout, and apart from each other.

``$QUALIFY_HOME`` holds ``evidence.db``, ``blobs/`` and ``runs/``; ``$QUALIFY_TRUST`` holds keys, permitted people and
signed tree heads, so that losing or rewriting the first cannot touch the second.
"""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_config_path, user_state_path

from qualification.errors import ConfigurationError

APPLICATION = "trainer-rank-qualification"


def home() -> Path:
    """Return the absolute folder of the evidence database, blobs and runs; created private on first use."""
    return _private_folder("QUALIFY_HOME", user_state_path(APPLICATION))


def trust() -> Path:
    """Return the absolute folder of keys, permitted people and signed tree heads; created private on first use."""
    return _private_folder("QUALIFY_TRUST", user_config_path(APPLICATION))


def _private_folder(variable: str, default: Path) -> Path:
    given = os.environ.get(variable)
    folder = Path(given).expanduser().absolute() if given else default
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except FileExistsError:
        raise ConfigurationError(f"{variable}={folder} is not a folder; name a folder that may be created") from None
    return folder
