"""A server that starts an engine and two workers, then is killed.

Engine and workers live in sessions of their own, under other names, with an empty environment; the workers ignore TERM.
"""

import ctypes
import os
import signal
import sys
import time

PR_SET_NAME = 15


def rename(name: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def work(index: int) -> None:
    os.setsid()
    rename(f"SRV::Worker_TP{index}")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(900)


def run_engine() -> None:
    rename("SRV::EngineCor")
    os.setsid()
    for index in range(2):
        if os.fork() == 0:
            work(index)
    time.sleep(900)


if sys.argv[1:] == ["engine"]:
    run_engine()
elif os.fork() == 0:
    os.execve(sys.executable, [sys.executable, __file__, "engine"], {})
time.sleep(1)
os.kill(os.getpid(), signal.SIGKILL)
