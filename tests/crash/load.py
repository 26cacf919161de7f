"""A load for a broker that is about to be killed: pipelined sends that note which messages were acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterator

from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames import codec
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import FrameReader
from duemq.protocol.requests.headers import SendMessageV2

PLAIN, DELAYED = "plain", "delayed"
LEVELS = 3
LONGEST_MS = 3000

Delay = Callable[[int], str]
"""Returns the property that delays the message with this number."""


def by_level(number: int) -> str:
    """One of three delay levels."""
    return f"DELAY\x01{1 + number // 4 % LEVELS}"


def by_time(_: int) -> str:
    """A random deliver time, from some ms to some seconds from now."""
    due = time.time_ns() // 1_000_000 + random.choice((20, 400, LONGEST_MS)) * random.random()
    return f"TIMER_DELIVER_MS\x01{int(due) + 1}"


class Load:
    """Sends until the connection is lost. Bodies are numbers; every fourth message is delayed."""

    def __init__(self, numbers: Iterator[int], delay: Delay, window: int = 64) -> None:
        self.acknowledged: set[int] = set()
        self.sent: set[int] = set()
        self._numbers = numbers
        self._delay = delay
        self._window = window
        self._waiting: dict[int, int] = {}

    async def run(self, host: str, port: int) -> None:
        """Send and receive until the connection is lost."""
        reader, writer = await asyncio.open_connection(host, port)
        frames = FrameReader()
        with contextlib.suppress(OSError):
            while True:
                while len(self._waiting) < self._window:
                    writer.write(self._next())
                data = await reader.read(1 << 16)
                if not data:
                    break
                for frame in frames.receive_data(data):
                    answer = codec.decode(frame)
                    number = self._waiting.pop(answer.opaque)
                    assert answer.code == ResponseCode.SUCCESS, answer.remark
                    self.acknowledged.add(number)
        writer.close()

    def _next(self) -> bytes:
        number = next(self._numbers)
        is_delayed = number % 4 == 0
        header = SendMessageV2(
            producer_group="crash",
            topic=DELAYED if is_delayed else PLAIN,
            default_topic="TBW102",
            default_topic_queue_nums=4,
            queue_id=number // 4 % 4,
            sys_flag=0,
            born_timestamp=1,
            flag=0,
            properties=f"{self._delay(number)}\x02TAGS\x01t" if is_delayed else "TAGS\x01t",
        )
        self.sent.add(number)
        self._waiting[number & 0x7FFFFFFF] = number
        command = Command(code=RequestCode.SEND_MESSAGE_V2, ext=header.to_ext(), opaque=number, body=b"%d" % number)
        return codec.encode(command)


async def load_until_lost(
    host: str, port: int, numbers: itertools.count[int], delay: Delay = by_level, connections: int = 3
) -> list[Load]:
    """Run loads over several connections until the broker is gone."""
    loads = [Load(numbers, delay) for _ in range(connections)]
    await asyncio.gather(*(load.run(host, port) for load in loads))
    return loads
