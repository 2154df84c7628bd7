"""Shows a process in state D (a parent inside vfork waits uninterruptibly) and 20 zombies under a living parent."""

import ctypes
import os
import time


def keep_zombies() -> None:
    for _ in range(20):
        if os.fork() == 0:
            os._exit(0)
    while True:
        time.sleep(60)


def wait_uninterruptibly() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.vfork() == 0:
        libc.sleep(900)
        libc._exit(0)
    time.sleep(900)


for body in (keep_zombies, wait_uninterruptibly):
    if os.fork() == 0:
        body()
time.sleep(float(os.environ.get("HOLD", "2")))
