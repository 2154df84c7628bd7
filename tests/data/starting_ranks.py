"""Stands where torchrun stands, in an image without PyTorch: starts the ranks that it is asked for and waits."""

import os
import subprocess
import sys

ranks = int(sys.argv[sys.argv.index("--nproc-per-node") + 1])
command = sys.argv[sys.argv.index("--no-python") + 1 :]
started = [subprocess.Popen(command, env={**os.environ, "RANK": str(rank)}) for rank in range(ranks)]
sys.exit(max(process.wait() for process in started))
