"""Keep planner reports in a private folder, bounded in files and bytes, whole or absent, one file per report id."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

from trainer_rank.folders import sync_folder
from trainer_rank.reports.report import bounded, canonical, projected

_SUFFIX, _PROJECTION, _DRAFT = ".report.json", ".projection.json", ".draft-"
ABANDONED_SECONDS = 600.0
"""After so long a draft, or a projection without its report, belongs to a process that was killed."""


class Spool:
    """A folder of reports: ``<id>.report.json``, and beside it ``<id of the original>.projection.json``.

    The oldest reports go, each with its projection, when there would be more than ``files`` reports or ``size`` bytes
    of both. Several processes may share a folder. What a killed one left half done is removed in time.
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
            self._publish(_projection_of(path), canonical(projected(found)))
            self._publish(path, canonical(found))
            sync_folder(self._folder)
            self._trim()
        return str(found["id"])

    def reports(self) -> list[Path]:
        """Return the reports, oldest first."""
        return [each.path for each in self._listed() if each.path.name.endswith(_SUFFIX)]

    def _publish(self, path: Path, content: bytes) -> None:
        with NamedTemporaryFile(dir=self._folder, prefix=_DRAFT, delete=False) as file:
            try:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise

    def _trim(self) -> None:
        listed = self._listed()
        sizes = {each.path: each.size for each in listed}
        kept = [each.path for each in listed if each.path.name.endswith(_SUFFIX)]
        for each in listed:
            draft = each.path.name.startswith(_DRAFT)
            alone = each.path.name.endswith(_PROJECTION) and _report_of(each.path) not in sizes
            if (draft or alone) and each.age > ABANDONED_SECONDS:
                each.path.unlink(missing_ok=True)

        def taken() -> int:
            return sum(sizes[path] + sizes.get(_projection_of(path), 0) for path in kept)

        while len(kept) > self._files or (len(kept) > 1 and taken() > self._size):
            oldest = kept.pop(0)
            oldest.unlink(missing_ok=True)
            _projection_of(oldest).unlink(missing_ok=True)

    def _listed(self) -> list[_Entry]:
        """Return every file of the folder, oldest first; one that another process removes meanwhile is not there."""
        now = time.time()
        found: list[tuple[int, Path, _Entry]] = []
        for path in self._folder.iterdir():
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            found.append((status.st_mtime_ns, path, _Entry(path, status.st_size, now - status.st_mtime)))
        return [entry for _, _, entry in sorted(found)]


class _Entry(NamedTuple):
    """A file, its bytes, and the seconds since it was written."""

    path: Path
    size: int
    age: float


def _projection_of(report: Path) -> Path:
    return report.with_name(report.name.removesuffix(_SUFFIX) + _PROJECTION)


def _report_of(projection: Path) -> Path:
    return projection.with_name(projection.name.removesuffix(_PROJECTION) + _SUFFIX)
