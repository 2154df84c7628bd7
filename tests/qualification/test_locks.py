"""Which lock counts, and that nothing in one can lead an installer elsewhere."""

from __future__ import annotations

import pytest

from qualification.errors import ConfigurationError
from qualification.locks import FOREIGN, LOOSE, PYLOCK, REQUIREMENTS, Lock, find_lock

DIGEST = "0" * 64
HASH = f"--hash=sha256:{DIGEST}"
WHEEL = f'{{ url = "https://example.org/x.whl", hashes = {{ sha256 = "{DIGEST}" }} }}'
HEAD = 'lock-version = "1.0"\ncreated-by = "a test"\n'


def found(**files: str) -> Lock | None:
    named = {name.replace("_", "."): content.encode() for name, content in files.items()}
    return find_lock(named, named.__getitem__)


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
        Lock(REQUIREMENTS, f"# a lock\n{line}\n".encode()).requirements()


@pytest.mark.parametrize(
    "line",
    [
        f"shiny[extra]==1.5.post1 \\\n    {HASH} \\\n    {HASH}",
        f"shiny==1.5 ; python_version >= '3.11' {HASH}",
        f"shiny==1.5 {HASH}  # via trainer",
    ],
)
def test_what_lock_writers_write_is_accepted(line: str) -> None:
    assert len(Lock(REQUIREMENTS, f"{line}\n".encode()).requirements()) == 1


def test_a_pylock_gives_names_versions_markers_and_hashes_and_no_address() -> None:
    text = f"""{HEAD}
[[packages]]
name = "shiny"
version = "1.5"
marker = "python_version >= '3.11'"
wheels = [{WHEEL}]
[[packages]]
name = "trainer"
directory = {{ path = ".", editable = true }}
"""
    assert Lock(PYLOCK, text.encode()).requirements() == (f"shiny==1.5 ; python_version >= '3.11' {HASH}",)
    assert Lock(PYLOCK, HEAD.encode()).requirements() == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lock-version =", "is no lock of its format"),
        ("packages = []", "is no lock of its format"),
        ('lock-version = "2.0"', "lock-version 2.0; 1.0 is read"),
        (f"{HEAD}packages = [1]", "package 1 is no table"),
        (f'{HEAD}[[packages]]\nname = "a"\nvcs = {{ type = "git" }}', "package 1 is locked as vcs"),
        (f'{HEAD}[[packages]]\nname = "a"\narchive = {{ url = "https://x" }}', "package 1 is locked as archive"),
        (f'{HEAD}[[packages]]\nname = "a"\ndirectory = {{ path = "../a" }}', "package 1 is locked as directory"),
        (f'{HEAD}[[packages]]\nname = "a"\nversion = "1"', "has no name, version and wheels"),
        (f'{HEAD}[[packages]]\nname = "a"\nversion = "1"\nwheels = [{{ url = "https://x" }}]', "has no name, version"),
        (f'{HEAD}[[packages]]\nname = "a b"\nversion = "1"\nwheels = [{WHEEL}]', "has no name, version"),
        (f'{HEAD}[[packages]]\nname = "a"\nversion = "1 -r x"\nwheels = [{WHEEL}]', "has no name, version"),
        (
            f"""{HEAD}[[packages]]\nname = "a"\nversion = "1"\nmarker = "'x' in extras"\nwheels = [{WHEEL}]""",
            "depends on extras or groups",
        ),
    ],
)
def test_a_pylock_that_cannot_be_installed_by_hash_is_refused_by_the_package(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Lock(PYLOCK, text.encode()).requirements()


def test_requirements_count_as_a_lock_only_with_hashes() -> None:
    assert found(requirements_txt="shiny\n") is None
    lock = found(requirements_txt=f"shiny==1.5 {HASH}\n")
    assert lock is not None
    assert lock.name == LOOSE
    preferred = found(requirements_txt=f"shiny==1.5 {HASH}\n", pylock_toml=HEAD)
    assert preferred is not None
    assert preferred.name == PYLOCK


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_lock_is_refused_by_name_with_what_to_do(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"the head's {name} is not read") as refused:
        find_lock([name], lambda _: b"")
    assert FOREIGN[name] in str(refused.value)
    assert find_lock([name, REQUIREMENTS], lambda _: b"") == Lock(REQUIREMENTS, b"")
