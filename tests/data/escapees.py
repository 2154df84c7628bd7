"""Leaves a process behind in one of ten ways, says READY when it is there, and exits 0."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import shared_memory

reader, writer = os.pipe()


def wait_for(count: int = 1) -> None:
    for _ in range(count):
        assert os.read(reader, 1) == b"."


def ready() -> None:
    os.write(writer, b".")


def stay() -> None:
    ready()
    while True:
        time.sleep(60)


def child(body: Callable[[], None]) -> None:
    if os.fork() == 0:
        body()
        os._exit(0)


def setsid() -> None:
    os.setsid()
    stay()


def double_fork() -> None:
    os.setsid()
    child(stay)


def ignore_terminate() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    stay()


def stopped() -> None:
    ready()
    os.kill(os.getpid(), signal.SIGSTOP)
    stay()


def zombie() -> None:
    child(lambda: None)
    time.sleep(0.1)
    stay()


def re_exec() -> None:
    os.setsid()
    os.execve("/bin/sh", ["renamed", "-c", f"printf . >&{writer}; trap '' TERM; while :; do sleep 60; done"], {})


def threads() -> None:
    for _ in range(64):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    stay()


def hold() -> None:
    segment = shared_memory.SharedMemory(create=True, size=1 << 16)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    signal.signal(signal.SIGTERM, lambda *_: (segment.unlink(), os._exit(0)))
    stay()


KINDS = {
    "plain": stay,
    "setsid": setsid,
    "double_fork": double_fork,
    "ignore_terminate": ignore_terminate,
    "stopped": stopped,
    "zombie": zombie,
    "re_exec": re_exec,
    "threads": threads,
    "burst": stay,
    "hold": hold,
}

if __name__ == "__main__":
    os.set_inheritable(writer, True)
    copies = 50 if sys.argv[1] == "burst" else 1
    for _ in range(copies):
        child(KINDS[sys.argv[1]])
    wait_for(copies)
    os.write(1, b"READY\n")
    os._exit(0)
