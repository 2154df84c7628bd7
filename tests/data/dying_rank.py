"""Stands where the worker stands: rank 1 dies as its job's file name says; whoever is left waits for ever."""

import json
import os
import signal
import sys
import time
from pathlib import Path

how = Path(sys.argv[1]).stem
os.write(int(os.environ["QUALIFY_EVENTS_FD"]), json.dumps({"event": "alive", "pid": os.getpid()}).encode() + b"\n")
if os.environ["RANK"] == "1" and how == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ["RANK"] == "1" and how == "failed":
    sys.exit(5)
time.sleep(600)
