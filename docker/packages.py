"""Print what the installed pipeline needs, as NAME==VERSION, for an image that runs its flows. PyTorch is the base's.

Run with the Python of the installed pipeline: ``python docker/packages.py > packages.txt``.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PIPELINE = Requirement("trainer-rank-qualification[pipeline]")
BROUGHT = {"torch"}


def pinned(wanted: Requirement, found: dict[str, str]) -> dict[str, str]:
    """Add what ``wanted`` needs to ``found``, versions by name. Raises PackageNotFoundError for what is missing."""
    for text in distribution(wanted.name).requires or []:
        needed = Requirement(text)
        name = canonicalize_name(needed.name)
        extras = wanted.extras or {""}
        applies = needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras)
        if applies and name not in BROUGHT and (name not in found or needed.extras):
            found[name] = distribution(name).version
            pinned(needed, found)
    return found


if __name__ == "__main__":
    try:
        packages = pinned(PIPELINE, {})
    except PackageNotFoundError as error:
        sys.exit(f"{error.name} is not installed here: pip install 'trainer-rank-qualification[pipeline]'")
    sys.stdout.writelines(f"{name}=={version}\n" for name, version in sorted(packages.items()))
