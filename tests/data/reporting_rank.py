"""Stands where the worker stands: reports what its launcher told it, as an event and on both outputs."""

import json
import os
import sys

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")
told = {name: os.environ.get(name) for name in NAMES}
line = json.dumps({"event": "told", "job": sys.argv[1], **told}) + "\n"
os.write(int(os.environ["QUALIFY_EVENTS_FD"]), line.encode())
os.write(1, f"out {told['RANK']}\n".encode())
os.write(2, f"err {told['RANK']}\n".encode())
