"""A head's lock names wheels by hash and nothing else; they are installed once, and nothing of them is executed."""

from __future__ import annotations

from pathlib import Path

import pytest

from qualification.errors import ConfigurationError
from qualification.locked import check_lock, install_lock
from tests.qualification.wheels import make_wheel

HASH = "--hash=sha256:" + "0" * 64


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Point home at a fresh folder and the installer at a folder of wheels, which is returned."""
    monkeypatch.setenv("QUALIFY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return tmp_path / "wheels"


def test_a_lock_is_installed_once(shop: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    lock = make_wheel(shop, "shiny", "1.5", f"open({str(marker)!r}, 'w')\n").encode()
    first = install_lock(b"# made by hand\n" + lock)
    assert first.versions == {"shiny": "1.5"}
    assert (first.folder / "shiny.py").exists()
    assert not marker.exists()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert install_lock(b"# made by hand\n" + lock) == first
    assert [path.name for path in (tmp_path / "home/environments").iterdir()] == [first.folder.name]


def test_a_wheel_with_other_bytes_is_refused_and_nothing_stays(shop: Path, tmp_path: Path) -> None:
    make_wheel(shop, "shiny", "1.5", "value = 1\n")
    with pytest.raises(ConfigurationError, match="cannot be installed"):
        install_lock(f"shiny==1.5 {HASH}\n".encode())
    assert list((tmp_path / "home/environments").iterdir()) == []


def test_an_empty_lock_names_nothing(shop: Path) -> None:
    assert install_lock(b"# nothing\n").versions == {}


@pytest.mark.parametrize(
    "line",
    [
        "shiny==1.5",
        "shiny",
        f"shiny>=1.5 {HASH}",
        f"./shiny.whl {HASH}",
        f"shiny @ https://example.org/shiny.whl {HASH}",
        "-r other.lock",
        "--index-url https://example.org",
        f"shiny==1.5 --index-url=https://example.org {HASH}",
        f"shiny==1.5 ; --index-url x {HASH}",
        f"shiny==1.5 {HASH} --no-binary=shiny",
        "-e .",
    ],
)
def test_a_line_that_could_lead_elsewhere_is_refused(line: str) -> None:
    with pytest.raises(ConfigurationError, match=r"requirements\.lock, entry 2"):
        check_lock(f"# a lock\n{line}\n".encode())


@pytest.mark.parametrize(
    "line",
    [
        f"shiny[extra]==1.5.post1 \\\n    {HASH} \\\n    {HASH}",
        f"shiny==1.5 ; python_version >= '3.11' {HASH}",
        f"shiny==1.5 {HASH}  # via trainer",
    ],
)
def test_what_lock_writers_write_is_accepted(line: str) -> None:
    check_lock(f"{line}\n".encode())
