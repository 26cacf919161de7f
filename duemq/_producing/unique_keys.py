"""The ids that a client gives its messages (property UNIQ_KEY). Mirrors apache/rocketmq
common/message/MessageClientIDSetter.java (4.9.7)."""

from __future__ import annotations

import itertools
import os
import random
import socket
import struct
import time


class UniqueKeys:
    """Makes client message ids (UNIQ_KEY). Their fields, with sizes in bytes: | ip 4 | process id 2 | random 4 |
    ms since the month began 4 | counter 2 |.

    In RocketMQ the third field is the hash of the class loader, which distinguishes clients of one process; a random
    number does that as well.
    """

    def __init__(self) -> None:
        try:
            address = socket.inet_aton(socket.gethostbyname(socket.gethostname()))
        except OSError:
            address = socket.inet_aton("127.0.0.1")
        self._prefix = (
            address + struct.pack(">H", os.getpid() & 0xFFFF) + struct.pack(">I", random.getrandbits(32))
        ).hex()
        self._counter = itertools.count(random.getrandbits(15))
        self._month_start_ms = self._next_month_ms = 0

    def make(self) -> str:
        """Return a new id of 32 hex digits, in upper case."""
        now_ms = int(time.time() * 1000)
        if now_ms >= self._next_month_ms:
            today = time.localtime(now_ms / 1000)
            self._month_start_ms = int(time.mktime((today.tm_year, today.tm_mon, 1, 0, 0, 0, 0, 0, -1)) * 1000)
            following = (today.tm_year, today.tm_mon + 1, 1) if today.tm_mon < 12 else (today.tm_year + 1, 1, 1)
            self._next_month_ms = int(time.mktime((*following, 0, 0, 0, 0, 0, -1)) * 1000)
        elapsed = (now_ms - self._month_start_ms) & 0xFFFFFFFF
        return f"{self._prefix}{elapsed:08x}{next(self._counter) & 0xFFFF:04x}".upper()
