"""Tasks for processes. The module is imported in each of these, so it imports as little as it can."""

from __future__ import annotations

import os
import signal
import time


def say_pid_and_sleep(path: str) -> None:
    with open(path, "w") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(60)


def sleep_or_not(seconds: int) -> int:
    time.sleep(seconds)
    return seconds


def print_and_give(item: int) -> int:
    print("not an answer")
    return item * 2


def die(how: str) -> None:
    if how == "memory":
        raise MemoryError
    if how == "error":
        raise ValueError("a mistake of ours")
    if how == "not pickled":
        raise type("Strange", (Exception,), {})("of nowhere")
    if how == "exit":
        os._exit(7)
    os.kill(os.getpid(), signal.SIGKILL)
