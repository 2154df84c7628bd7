"""A scripted NVML for tests: the one fake of the hardware edge, compiled from ``data/fake_nvml.c``."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

GPUS = tuple(f"GPU-00000000-0000-0000-0000-00000000000{number}" for number in (1, 2))
TOTAL = 150_754_820_096
IDLE = 650_000_000
LOST, NO_PERMISSION, UNKNOWN = 15, 4, 999


@dataclass
class ScriptedNvml:
    """What NVML answers, changed by writing another script; times count from when it is written."""

    script: Path
    library: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"FAKE_NVML": str(self.script), "LD_LIBRARY_PATH": str(self.library)}

    def say(self, *lines: str, gpus: tuple[str, ...] = GPUS[:1], mark: str = "") -> None:
        """Answer by these lines: ``SECONDS INDEX USED UTILISATION CODE [PID:BYTES]``."""
        cards = [f"gpu {uuid} {TOTAL} {mark}" for uuid in gpus]
        aside = self.script.with_suffix(".new")
        aside.write_text("\n".join([*cards, *(f"at {line}" for line in lines)]) + "\n")
        now = time.time()
        os.utime(aside, (now, now))
        aside.replace(self.script)

    def idle(self, gpus: tuple[str, ...] = GPUS[:1]) -> None:
        self.say(*(f"0 {index} {IDLE} 0 0" for index in range(len(gpus))), gpus=gpus)


@pytest.fixture(scope="session")
def nvml_library() -> Iterator[Path]:
    source = Path(__file__).parent / "data" / "fake_nvml.c"
    with tempfile.TemporaryDirectory(prefix="qualify-nvml-") as folder:
        library = Path(folder) / "libnvidia-ml.so.1"
        subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", library, source], check=True)
        yield library.parent


@pytest.fixture
def nvml(nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedNvml:
    scripted = ScriptedNvml(tmp_path / "nvml.txt", nvml_library)
    scripted.idle()
    for name, value in scripted.environment.items():
        monkeypatch.setenv(name, value)
    return scripted
