"""Profiles the hot path: a whole broker in this process, without sockets, under Python's profiler.

    python -m tests.bench.profile [sends|signed|timers|pulls|levels] [--messages N]      (make profile WHAT=sends)

It prints CPU microseconds per message without the profiler, best of three runs, and then, with it, the functions that
take the most time. The profiler makes calls slower than they are: use its shares, and the figure without it. A run has
at least N messages, which are rounded up to whole reads of a socket (64 messages).
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import logging
import math
import pstats
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import structlog
import uvloop

from duemq.storage.clock import look
from tests.support.access import signed, write_accounts
from tests.support.broker import Peer, UnboundBroker, running
from tests.support.wire import encode_all, pull, send

BODY = b"x" * 1000
KEY = "UNIQ_KEY\x017F0000010001\x02WAIT\x01true\x02TAGS\x01a"
READ = 64
"""Requests in one read of a socket."""
RUNS = 3
SHOWN = 25
SETTINGS = ("mappedFileSizeCommitLog=1073741824", "flushDiskType=ASYNC_FLUSH")


class _Case:
    """One kind of work on a broker: `prepare` once, then `run` any number of times."""

    settings: tuple[str, ...] = ()

    def __init__(self, broker: UnboundBroker, messages: int) -> None:
        self.broker = broker
        self.peer = broker.connect()
        self.reads = math.ceil(messages / READ)
        self.messages = self.reads * READ

    async def prepare(self) -> None:
        """Work that is not measured."""
        answer = await self.peer.ask(send("T", BODY, properties=KEY))
        assert answer.code == 0, answer

    async def run(self) -> None:
        """Work that is measured."""
        raise NotImplementedError


class Sends(_Case):
    """Messages to be delivered at once."""

    properties = KEY

    async def prepare(self) -> None:
        await super().prepare()
        self._data = encode_all(send("T", BODY, properties=self.properties) for _ in range(READ))

    async def run(self) -> None:
        for _ in range(self.reads):
            self.peer.connection.data_received(self._data)
            await asyncio.sleep(0)


class SignedSends(Sends):
    """The same, with access control."""

    settings = ("aclEnable=true",)

    async def prepare(self) -> None:
        answer = await self.peer.ask(signed(send("T", BODY, properties=KEY)))
        assert answer.code == 0, answer
        self._data = encode_all(signed(send("T", BODY, properties=self.properties)) for _ in range(READ))


class Timers(Sends):
    """Messages with a time, from the request until they are in the wheel."""

    properties = f"{KEY}\x02TIMER_DELAY_MS\x01600000"


class Levels(Sends):
    """Messages with a delay level, and their deliveries."""

    properties = f"{KEY}\x02DELAY\x011"

    async def run(self) -> None:
        await super().run()
        self.broker.clock.advance(1000)
        levels = self.broker.levels
        levels.report(look(self.broker.clock))
        while any(level.waiting for level in levels.levels.values()):
            await asyncio.sleep(0.001)


class Pulls(Sends):
    """Reads of messages with one tag, 32 per pull, as most consumers do."""

    properties = f"{KEY}\x02TAGS\x01load"

    async def prepare(self) -> None:
        await super().prepare()
        await super().run()
        self._pulls = [encode_all([pull("T", offset, subscription="load")]) for offset in range(0, self.messages, 32)]

    async def run(self) -> None:
        for data in self._pulls:
            self.peer.connection.data_received(data)
            await asyncio.sleep(0)


CASES: dict[str, type[_Case]] = {
    "sends": Sends,
    "signed": SignedSends,
    "timers": Timers,
    "levels": Levels,
    "pulls": Pulls,
}


async def measure(name: str, messages: int) -> None:
    """Print the profile of a case."""
    with tempfile.TemporaryDirectory() as directory:
        write_accounts(Path(directory))
        home = f"rocketmqHome={directory}"
        async with running(Path(directory, "store"), *SETTINGS, home, *CASES[name].settings) as broker:
            case = CASES[name](broker, messages)
            await case.prepare()
            spent = []
            profile = cProfile.Profile()
            # The client does not decode the answers: that would take most of the time.
            with patch.object(Peer, "received"):
                for _ in range(RUNS):
                    gc.collect()
                    begun = time.process_time()
                    await case.run()
                    spent.append(time.process_time() - begun)
                profile.enable()
                await case.run()
                profile.disable()
    print(f"{name}: {min(spent) / case.messages * 1e6:.2f} us of CPU a message, {case.messages} messages")
    pstats.Stats(profile).sort_stats("tottime").print_stats(SHOWN)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.profile", description=__doc__)
    parser.add_argument("case", nargs="?", default="sends", choices=CASES)
    parser.add_argument("--messages", type=int, metavar="N", default=50_000, help="50000 by default")
    arguments = parser.parse_args()
    if arguments.messages < 1:
        parser.error(f"--messages {arguments.messages}: give 1 or more")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    uvloop.run(measure(arguments.case, arguments.messages))


if __name__ == "__main__":
    main()
