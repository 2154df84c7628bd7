"""The shipped recipes of images: what they may hold, and that an engine builds the GPU worker's without a registry."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker_engine import DOCKER, Engine, base_tar

RECIPES = ("worker.Dockerfile", "gpu-worker.Dockerfile")
KNOWN = {"ARG", "COPY", "ENTRYPOINT", "ENV", "FROM", "RUN", "USER"}
SECRET = re.compile(r"password|passwd|secret|token|credential|api_?key|private_?key", re.IGNORECASE)
FETCHES = re.compile(r"\b(curl|wget|apt-get|apt|git clone|https?://)")


def instructions(text: str) -> list[tuple[str, str]]:
    """Return keyword and arguments of each instruction; continued lines are joined, comments left out."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (keyword.upper(), rest.strip()) for keyword, _, rest in (line.partition(" ") for line in joined.splitlines())
    ]


def flaws(text: str) -> Iterator[str]:
    """Say what a worker image may not do."""
    found = instructions(text)
    stages = set()
    for keyword, rest in found:
        if keyword not in KNOWN:
            yield f"{keyword} is not among {', '.join(sorted(KNOWN))}"
        if keyword == "ARG" and rest != "BASE_IMAGE":
            yield f"ARG {rest}: only BASE_IMAGE, without a default, so that the caller names a digest"
        if keyword == "FROM":
            image, _, stage = rest.partition(" AS ")
            if image not in ("${BASE_IMAGE}", *stages):
                yield f"FROM {image} names an image itself"
            stages.add(stage)
        if keyword == "COPY" and not rest.startswith(("wheels ", "--from=")):
            yield f"COPY {rest} takes more than wheels"
        if keyword in ("ARG", "ENV", "RUN") and SECRET.search(rest):
            yield f"{keyword} {rest[:40]} reads like a secret"
        if keyword == "RUN" and (fetched := FETCHES.search(rest)):
            yield f"RUN fetches with {fetched[0]}"
        if keyword == "RUN":
            yield from (f"pip without {option}" for option in _missing_of_pip(rest))
    last = dict(found)
    if last.get("USER", "root") in ("root", "0"):
        yield "it runs as root"
    if not last.get("ENTRYPOINT", "").startswith('["/usr/bin/tini"'):
        yield "its first process is not tini"


def _missing_of_pip(command: str) -> Iterator[str]:
    for call in re.findall(r"pip install([^;&]*)", command):
        yield from (option for option in ("--no-index", "--no-cache-dir", "--no-deps") if option not in call)


@pytest.mark.parametrize("name", RECIPES)
def test_a_shipped_recipe_has_no_flaw(name: str) -> None:
    assert list(flaws((DOCKER / name).read_text())) == []


@pytest.mark.parametrize(
    ("change", "flaw"),
    [
        (("FROM ${BASE_IMAGE}", "FROM python:latest"), "FROM python:latest names an image itself"),
        (("ARG BASE_IMAGE", "ARG BASE_IMAGE=python"), "ARG BASE_IMAGE=python"),
        (("USER worker", "USER root"), "it runs as root"),
        (("COPY wheels /opt/wheels", "COPY . /source"), "COPY . /source takes more than wheels"),
        (("--no-index ", ""), "pip without --no-index"),
        (("USER worker", "ENV API_KEY=x\nUSER worker"), "ENV API_KEY=x reads like a secret"),
        (("RUN useradd", "RUN curl -O x && useradd"), "RUN fetches with curl"),
        (("/usr/bin/tini", "/bin/sh"), "its first process is not tini"),
        (("USER worker", "ADD x y\nUSER worker"), "ADD is not among"),
    ],
)
def test_a_flaw_is_found(change: tuple[str, str], flaw: str) -> None:
    text = (DOCKER / "gpu-worker.Dockerfile").read_text()
    assert change[0] in text
    assert any(flaw in each for each in flaws(text.replace(*change)))


def test_the_packages_are_those_of_the_extra() -> None:
    """The extra's own pins, spelled out so that nothing is resolved where there is no index."""
    project = tomllib.loads((DOCKER.parent / "pyproject.toml").read_text())["project"]
    extra = [each.partition(";")[0].strip() for each in project["optional-dependencies"]["megatron"]]
    rows = (DOCKER / "gpu-packages.txt").read_text().splitlines()
    pinned = dict(row.split("==") for row in rows if not row.startswith("#"))
    for wanted in extra:
        name, version = re.sub(r"\[.*\]", "", wanted).split("==")
        assert pinned[name] == version
    assert pinned["transformer-engine-cu13"] == pinned["transformer-engine"]


@pytest.mark.docker
def test_an_engine_builds_the_gpu_worker_from_wheels_alone(docker_engine: Engine, tmp_path: Path) -> None:
    """On a base without CUDA: every step runs; only the packages differ from those of a GPU host."""
    (tmp_path / "wheels").mkdir()
    options = ["--quiet", "--only-binary", ":all:", "--no-deps", "--python-version", "3.11"]
    download = [sys.executable, "-m", "pip", "download", "--dest", str(tmp_path / "wheels"), *options]
    subprocess.run([*download, "msgspec"], check=True)
    shutil.copy(DOCKER / "gpu-worker.Dockerfile", tmp_path / "Dockerfile")
    base = "recipe-base:" + base_tar().stem.replace(",", "-")
    if not docker_engine.docker("images", "--quiet", base):  # kept, so that steps of equal content are built once
        docker_engine.docker("import", base_tar(), base)
    named = ["--tag", "recipe-result:gpu", "--build-arg", f"BASE_IMAGE={base}"]
    image = docker_engine.docker("build", "--quiet", *named, tmp_path)
    code = "import os, msgspec; print(os.getuid(), os.environ['TRITON_CACHE_AUTOTUNING'])"
    said = docker_engine.docker("run", "--rm", "--network", "none", image, "python3", "-c", code)
    assert said == "10001 1"
