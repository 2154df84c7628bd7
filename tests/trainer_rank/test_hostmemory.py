"""Host memory is what the machine has and what every control group above the process allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_rank import hostmemory
from trainer_rank.hostmemory import available_host_memory

GIB = 1 << 30


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 64 GiB available and no limits."""
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable: 67108864 kB\n")
    (tmp_path / "cgroup").write_text("4:memory:/work/run\n0::/work/run\n")
    monkeypatch.setattr(hostmemory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(hostmemory, "MEMBERSHIP", tmp_path / "cgroup")
    monkeypatch.setattr(hostmemory, "CONTROL_GROUPS", tmp_path / "groups")
    return tmp_path


def _group(folder: Path, names: tuple[str, str], limit: str, used: int, stat: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(stat)


UNIFIED = ("memory.max", "memory.current")
LEGACY = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def test_without_limits_it_is_the_machines(system: Path) -> None:
    assert available_host_memory() == 64 * GIB
    _group(system / "groups/work/run", UNIFIED, "max", 5 * GIB)
    assert available_host_memory() == 64 * GIB


def test_the_narrowest_group_above_counts_and_idle_page_cache_gives_way(system: Path) -> None:
    _group(system / "groups/work/run", UNIFIED, str(40 * GIB), 5 * GIB)
    _group(system / "groups/work", UNIFIED, str(20 * GIB), 18 * GIB, f"anon 7\ninactive_file {3 * GIB}\n")
    assert available_host_memory() == 5 * GIB


def test_legacy_groups_count_too_and_never_below_zero(system: Path) -> None:
    _group(system / "groups/memory/work/run", LEGACY, str(8 * GIB), 6 * GIB, f"total_inactive_file {GIB}\n")
    assert available_host_memory() == 3 * GIB
    _group(system / "groups/memory", LEGACY, str(8 * GIB), 9 * GIB)
    assert available_host_memory() == 0


def test_a_system_that_does_not_say_is_unknown(system: Path) -> None:
    (system / "meminfo").unlink()
    assert available_host_memory() is None


def test_this_machine_says_something_plausible() -> None:
    found = available_host_memory()
    assert found is not None
    assert 0 <= found < 1 << 50
