"""A head's lock names wheels by hash and nothing else; they are installed once, and nothing of them is executed."""

from __future__ import annotations

from pathlib import Path

import pytest

from qualification.errors import ConfigurationError
from qualification.locked import install_lock
from qualification.locks import PYLOCK, REQUIREMENTS, Lock
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
    first = install_lock(Lock(REQUIREMENTS, b"# made by hand\n" + lock))
    assert first.versions == {"shiny": "1.5"}
    assert (first.folder / "shiny.py").exists()
    assert not marker.exists()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert install_lock(Lock(REQUIREMENTS, b"# made by hand\n" + lock)) == first
    assert [path.name for path in (tmp_path / "home/environments").iterdir()] == [first.folder.name]


def test_a_wheel_with_other_bytes_is_refused_and_nothing_stays(shop: Path, tmp_path: Path) -> None:
    make_wheel(shop, "shiny", "1.5", "value = 1\n")
    with pytest.raises(ConfigurationError, match="cannot be installed"):
        install_lock(Lock(REQUIREMENTS, f"shiny==1.5 {HASH}\n".encode()))
    assert list((tmp_path / "home/environments").iterdir()) == []


def test_an_empty_lock_names_nothing(shop: Path) -> None:
    assert install_lock(Lock(REQUIREMENTS, b"# nothing\n")).versions == {}


def test_a_pylock_is_installed_by_its_hashes(shop: Path) -> None:
    digest = make_wheel(shop, "shiny", "1.5", "value = 1\n").rpartition("sha256:")[2].strip()
    wheel = f'{{ name = "shiny-1.5-py3-none-any.whl", url = "https://nowhere/", hashes = {{ sha256 = "{digest}" }} }}'
    text = f'lock-version = "1.0"\n[[packages]]\nname = "shiny"\nversion = "1.5"\nwheels = [{wheel}]\n'
    assert install_lock(Lock(PYLOCK, text.encode())).versions == {"shiny": "1.5"}
