"""Hosts that share their leases on PostgreSQL: each judges only what it can see; nobody frees another's device."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.engine import URL

from db.engine import writing
from db.leases import DatabaseLeaseStore
from tests.databases import Workplace

pytestmark = pytest.mark.postgresql

VIRTUAL = "virtual:shared:0"
ROOT = Path(__file__).parents[2]


class Host:
    """A process of one host; see ``tests.data.another_host``."""

    def __init__(self, workplace: Workplace, name: str, boot: str) -> None:
        command = [sys.executable, "-m", "tests.data.another_host", name, boot, str(workplace.home / "runs"), VIRTUAL]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=workplace.environment, stdin=pipe, stdout=pipe, text=True, bufsize=1
        )

    def do(self, word: str) -> None:
        """Ask for something without waiting for it."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")

    def hear(self) -> str:
        """Return the next line that it says."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        """End it at once, as a host that loses power does."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def shared(postgresql_url: URL, tmp_path: Path) -> Workplace:
    return Workplace(tmp_path / "home", tmp_path / "trust", postgresql_url)


@pytest.fixture
def hosts(shared: Workplace) -> Iterator[dict[str, Host]]:
    hosts = {name: Host(shared, name, f"boot-of-{name}") for name in ("a", "b")}
    yield hosts
    for host in hosts.values():
        host.kill()


def let_leases_run_out(workplace: Workplace) -> None:
    with writing(workplace.engine) as connection:
        connection.execute(text("UPDATE leases SET expires_at_ms = 0 WHERE closed_at_ms IS NULL"))


def test_a_dead_host_s_lease_is_left_to_that_host_and_recovered_once_it_is_back(
    shared: Workplace, hosts: dict[str, Host]
) -> None:
    hosts["a"].do("acquire")
    assert hosts["a"].hear() == "granted 1"
    hosts["a"].kill()
    let_leases_run_out(shared)
    hosts["b"].do("sweep")
    assert "run on-a is on host a; only a sweep there can see its processes" in hosts["b"].hear()
    assert hosts["b"].hear() == "swept all"
    hosts["b"].do("acquire")
    assert "run on-a is on host a; only a sweep there can see its processes" in hosts["b"].hear()
    hosts["a"] = Host(shared, "a", "the next boot of a")
    hosts["a"].do("sweep")
    assert hosts["a"].hear() == "swept CLEAN"
    assert "run on-b is on host b" in hosts["a"].hear()  # it waits there, alive, and is no dead run of this host
    said = [hosts["b"].hear()]
    while not said[-1].startswith("granted"):
        said.append(hosts["b"].hear())
    assert said[-1] == "granted 3"  # 2 was the recovery's own
    (holding,) = DatabaseLeaseStore(shared.engine).holdings()
    assert (holding.host, holding.run) == ("b", "on-b")


def test_the_same_boot_under_another_name_recovers_what_it_can_see(shared: Workplace, hosts: dict[str, Host]) -> None:
    hosts["a"].do("acquire")
    assert hosts["a"].hear() == "granted 1"
    hosts["a"].kill()
    let_leases_run_out(shared)
    hosts["b"].kill()
    hosts["b"] = Host(shared, "renamed", "boot-of-a")
    hosts["b"].do("acquire")
    assert hosts["b"].hear() == "granted 3"


def test_a_dead_run_whose_folder_is_not_here_is_never_called_clean(shared: Workplace, hosts: dict[str, Host]) -> None:
    hosts["a"].do("acquire")
    assert hosts["a"].hear() == "granted 1"
    hosts["a"].kill()
    let_leases_run_out(shared)
    (shared.home / "runs/on-a/1/attempt.json").unlink()
    hosts["a"] = Host(shared, "a", "boot-of-a")
    hosts["a"].do("sweep")
    assert hosts["a"].hear() == "swept UNVERIFIED"


def test_two_hosts_at_once_never_hold_one_device(shared: Workplace, hosts: dict[str, Host]) -> None:
    granted: list[int] = []
    both = threading.Lock()

    def take_turns(host: Host) -> None:
        for _ in range(3):
            host.do("acquire")
            while not (line := host.hear()).startswith("granted"):
                assert "held by run" in line or "place" in line
            assert both.acquire(blocking=False), "both hosts hold the device"
            granted.append(int(line.split()[1]))
            both.release()
            host.do("release")
            assert host.hear() == "released"

    threads = [threading.Thread(target=take_turns, args=(host,)) for host in hosts.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert granted == sorted(granted)
    assert len(set(granted)) == 6
