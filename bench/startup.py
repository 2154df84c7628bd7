"""How long a command takes to start, as a person feels it: whole processes, against a bare interpreter in the same run.

Read commands must start within 0.5 s and import neither Prefect nor torch; both are checked here.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPEATS = 5
COMMANDS = (
    ["--help"],
    ["trace", "check", "--help"],
    ["plan", "incident-b", "--card", "h200"],
    ["evidence", "list"],
    ["verify"],
    ["gate", "check"],
    ["gpus"],
)
_PROBE = (
    "import sys; from flows.cli.main import execute; execute({arguments!r}); "
    "print(*sorted(set(sys.modules) & {{'prefect', 'torch'}}), file=sys.stderr)"
)


def seconds(command: list[str], environment: dict[str, str]) -> tuple[float, float, float]:
    """Return minimum, median and maximum wall seconds of whole processes."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        subprocess.run(command, env=environment, capture_output=True, check=False)
        times.append(time.perf_counter() - started)
    return min(times), statistics.median(times), max(times)


def heavy_imports(arguments: list[str], environment: dict[str, str]) -> list[str]:
    """Return which of Prefect and torch a command has imported when it ends."""
    program = _PROBE.format(arguments=arguments)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return done.stderr.splitlines()[-1].split()


def main() -> None:
    qualify = str(Path(sys.executable).with_name("qualify"))
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"QUALIFY_HOME": f"{folder}/home", "QUALIFY_TRUST": f"{folder}/trust"}
        _, bare, _ = seconds([sys.executable, "-c", "pass"], environment)
        print(f"{'bare interpreter':40} median {bare:.3f} s")
        for arguments in COMMANDS:
            low, median, high = seconds([qualify, *arguments], environment)
            heavy = heavy_imports(arguments, environment)
            print(
                f"{'qualify ' + ' '.join(arguments):40} median {median:.3f} s (min {low:.3f}, max {high:.3f}), "
                f"{median / bare:.1f} x bare, imports {' and '.join(heavy) or 'neither Prefect nor torch'}"
            )


if __name__ == "__main__":
    main()
