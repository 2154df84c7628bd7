"""Keep planner reports in a private folder, bounded in files and bytes, whole or absent, one file per report id."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from trainer_rank.reports.report import bounded, canonical, projected

_SUFFIX, _PROJECTION = ".report.json", ".projection.json"


class Spool:
    """A folder of reports: ``<id>.report.json``, and beside it ``<id of the original>.projection.json``.

    The oldest reports go when there would be more than ``files`` reports or ``size`` bytes of them.
    """

    def __init__(self, folder: Path, *, files: int = 256, size: int = 16 << 20) -> None:
        self._folder = folder
        self._files = files
        self._size = size
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)

    def write(self, document: Mapping[str, Any]) -> str:
        """Keep a report and its projection, durably, and return its id; one that is there already is left as it is."""
        found = bounded(document)
        path = self._folder / f"{found['id']}{_SUFFIX}"
        if not path.exists():
            self._publish(self._folder / f"{found['id']}{_PROJECTION}", canonical(projected(found)))
            self._publish(path, canonical(found))
            self._trim()
        return str(found["id"])

    def reports(self) -> list[Path]:
        """Return the reports, oldest first."""
        return sorted(self._folder.glob(f"*{_SUFFIX}"), key=lambda path: (path.stat().st_mtime_ns, path.name))

    def _publish(self, path: Path, content: bytes) -> None:
        with NamedTemporaryFile(dir=self._folder, prefix=".draft-", delete=False) as file:
            try:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise

    def _trim(self) -> None:
        kept = self.reports()
        sizes = {path: path.stat().st_size for path in kept}
        while len(kept) > self._files or (len(kept) > 1 and sum(sizes[path] for path in kept) > self._size):
            oldest = kept.pop(0)
            oldest.unlink(missing_ok=True)
            oldest.with_name(oldest.name.replace(_SUFFIX, _PROJECTION)).unlink(missing_ok=True)
