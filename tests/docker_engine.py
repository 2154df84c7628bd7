"""A private Docker Engine for tests: its own socket and data, no network, one small image made from Debian packages.

The engine's data, with the image in it, stay in the user's cache: making them takes minutes, using them seconds.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

DOCKER = Path(__file__).parents[1] / "docker"
PACKAGES = "python3,python3-venv,ca-certificates,git,tini"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "trainer-rank-qualification-tests"


@dataclass
class Engine:
    """A running dockerd. ``image`` is the worker image's digest."""

    folder: Path
    data: Path
    process: subprocess.Popen[bytes]
    image: str = ""

    @property
    def host(self) -> str:
        return f"unix://{self.folder}/docker.sock"

    def docker(self, *arguments: str | Path) -> str:
        done = subprocess.run(["docker", "-H", self.host, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def containers(self) -> list[str]:
        return self.docker("ps", "--all", "--quiet").split()

    def wait_for_container(self) -> str:
        deadline = time.monotonic() + 30
        while not (running := self.docker("ps", "--quiet", "--filter", "status=running").split()):
            assert time.monotonic() < deadline, "no container came up"
            time.sleep(0.1)
        return running[0]

    def start(self) -> None:
        options = ["--iptables=false", "--ip6tables=false", "--bridge=none", "--storage-driver=overlay2"]
        places = ["--data-root", self.data, "--exec-root", self.folder / "exec", "-p", self.folder / "pid"]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                ["dockerd", "-H", self.host, *options, *places], stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + 60
        while subprocess.run(["docker", "-H", self.host, "info"], capture_output=True, check=False).returncode:
            assert self.process.poll() is None, (self.folder / "log").read_text()[-2000:]
            assert time.monotonic() < deadline, "dockerd does not answer"
            time.sleep(0.2)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        self.process.wait(60)


def base_tar() -> Path:
    """Return a root file system with Python and tini, made once and kept in the user's cache."""
    tar = CACHE / f"bookworm-{PACKAGES.replace(',', '-')}.tar"
    if not tar.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        aside = tar.with_suffix(f".{os.getpid()}.tar")
        command = ["mmdebstrap", "--quiet", "--variant=apt", f"--include={PACKAGES}", "bookworm", aside]
        subprocess.run(command, check=True)
        aside.rename(tar)
    return tar


def build(engine: Engine) -> str:
    """Return the digest of the shipped worker image with all that the pipeline needs, built unless it was before."""
    recipe = (DOCKER / "worker.Dockerfile").read_bytes()
    packages = subprocess.run([sys.executable, DOCKER / "packages.py"], capture_output=True, check=True).stdout
    tag = f"qualify-worker:{hashlib.sha256(recipe + packages + PACKAGES.encode()).hexdigest()[:16]}"
    if not engine.docker("images", "--quiet", tag):
        base = engine.docker("import", base_tar())
        context = engine.folder / "context"
        context.mkdir()
        (context / "packages.txt").write_bytes(packages)
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", context / "wheels"]
        options = ["--only-binary", ":all:", "--no-deps", "--python-version", "3.11"]
        subprocess.run([*download, *options, "--requirement", context / "packages.txt"], check=True)
        (context / "Dockerfile").write_bytes(recipe)
        engine.docker("build", "--quiet", "--tag", tag, "--build-arg", f"BASE_IMAGE={base}", context)
        engine.docker("image", "prune", "--force")
    return engine.docker("inspect", "--format", "{{.Id}}", tag)


@contextmanager
def unused_data() -> Iterator[Path]:
    """Give a folder for an engine's data that no other test session is using, the oldest one first."""
    CACHE.mkdir(parents=True, exist_ok=True)
    for number in range(8):
        with (CACHE / f"engine-{number}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield CACHE / f"engine-{number}"
            return
    pytest.fail("eight test sessions run an engine already")


@pytest.fixture(scope="module")  # not longer: other sessions on this machine wait for the data
def docker_engine() -> Iterator[Engine]:
    missing = [name for name in ("dockerd", "docker", "mmdebstrap") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"a private Docker Engine needs root and {', '.join(missing) or 'nothing else'}")
    with (
        tempfile.TemporaryDirectory(prefix="qualify-docker-", ignore_cleanup_errors=True) as folder,
        unused_data() as data,
    ):
        engine = Engine(Path(folder), data, None)  # type: ignore[arg-type]  # started at once
        engine.start()
        try:
            engine.image = build(engine)
            for container in engine.containers():  # of a test session that was killed
                engine.docker("rm", "--force", container)
            yield engine
        finally:
            engine.stop()
