"""The output of log lines. A log that cannot be written must not change the broker's behaviour: its disk may be full,
its reader slow, stopped, or gone. So lines are handed over to a thread, and only that thread waits for writes. A line
for which there is no room among the waiting lines, or that cannot be written, is left out and counted. As soon as a
line can be written again, an extra line says how many were left out."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

MAX_WAITING: Final = 1 << 20
"""Maximum number of characters in lines that wait."""
CLOSE_S: Final = 2.0
"""Seconds that an ending process waits for its last lines."""

Write = Callable[[int, bytes], int]


class DescribeLost(Protocol):
    """Makes the line that reports left-out lines."""

    def __call__(self, lost: int, why: str) -> str:
        """Return the line, with its line end. `lost`: lines left out since the last such report."""


class LogOutput:
    """A text file for loggers, over a descriptor. `write` never fails and never waits."""

    def __init__(
        self, descriptor: int, describe_lost: DescribeLost, *, max_waiting: int = MAX_WAITING, write: Write = os.write
    ) -> None:
        """`write` is called like os.write. Starts the thread; raises RuntimeError if it cannot be created."""
        self._descriptor = descriptor
        self._describe_lost = describe_lost
        self._max_waiting = max_waiting
        self._write = write
        self._lines: deque[str] = deque()
        self._waiting = self._lost = 0
        self._why = ""
        self._is_closed = False
        self._change = threading.Condition(threading.Lock())
        self._thread = threading.Thread(target=self._work, name="log", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        """Take a line; return the number of characters taken, as files do."""
        with self._change:
            try:
                if self._waiting + len(text) > self._max_waiting:
                    self._lose("lines were logged faster than they were written")
                else:
                    self._lines.append(text)
                    self._waiting += len(text)
                    self._change.notify_all()
            except MemoryError:
                self._lose("memory ran out")
        return len(text)

    def flush(self) -> None:
        """Do nothing: loggers do not wait."""

    def lose(self, why: str) -> None:
        """Count a line that could not even be formatted."""
        with self._change:
            self._lose(why)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Wait until everything is written, at most `timeout_s` seconds."""
        with self._change:
            self._is_closed = True
            self._change.notify_all()
        self._thread.join(timeout_s)

    def _lose(self, why: str) -> None:
        self._lost += 1
        self._why = why

    def _work(self) -> None:
        # The main thread decides what a signal does. It may block one, which would then come to this thread.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            with self._change:
                while not self._lines and not self._is_closed:
                    self._change.wait()
                if not self._lines:
                    return
                text = self._lines.popleft()
                self._waiting -= len(text)
                lost, why = self._lost, self._why
            try:
                if lost:
                    self._write_all(self._describe_lost(lost, why))
                    with self._change:
                        self._lost -= lost
                self._write_all(text)
            except Exception as error:
                self.lose(str(error) or type(error).__name__)

    def _write_all(self, text: str) -> None:
        data = memoryview(text.encode("utf-8", "backslashreplace"))
        while data:
            try:
                data = data[self._write(self._descriptor, data) :]  # type: ignore[arg-type]
            except BlockingIOError:  # the process at the other end made it non-blocking
                select.select([], [self._descriptor], [])


def write_last(data: bytes, descriptor: int = 2) -> None:
    """Write the last line of a process, unless the write would have to wait."""
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        if poll.poll(0):
            os.write(descriptor, data)
    except (OSError, MemoryError):
        return


def keep_standard_descriptors() -> None:
    """Make sure that the descriptors 0 to 2 are open. Otherwise the first file of the store would get one of them, and
    others would read it as standard input or print into it."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the system takes the lowest descriptor that is free
