"""The two brokers under measurement, how to start them, and the Java load on them."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.measure import bytes_read
from tests.bench.remote import Remote
from tests.peers import install, tools
from tests.peers.brokers.apache import ApacheBroker
from tests.peers.brokers.broker import HOST, Broker
from tests.peers.brokers.duemq import DuemqBroker

MakeBroker = Callable[[Path, Mapping[str, object]], Broker]
"""Makes a broker from a directory, whose `store` may exist already, and RocketMQ's properties."""


def apache(directory: Path, properties: Mapping[str, object]) -> Broker:
    """Apache's 4.9.7, with the heap that its documentation recommends for a small broker."""
    return ApacheBroker("4.9.7", directory, properties, heap="2g")


def apache_5(directory: Path, properties: Mapping[str, object]) -> Broker:
    """Apache's 5.3.3, as it comes."""
    return ApacheBroker("5.3.3", directory, properties, heap="2g")


def apache_with_timers(directory: Path, properties: Mapping[str, object]) -> Broker:
    """Apache's 5.3.3: 4.9.7 has no timers."""
    return apache_5(directory, {"timerWheelEnable": "true"} | dict(properties))


def ours(directory: Path, properties: Mapping[str, object]) -> Broker:
    """duemq's broker."""
    return DuemqBroker(directory, properties)


@asynccontextmanager
async def running(make: MakeBroker, directory: Path, properties: Mapping[str, object]) -> AsyncIterator[Broker]:
    """Run a broker, and stop it at the end."""
    broker = make(directory, properties)
    await broker.start()
    try:
        yield broker
    finally:
        await broker.stop()


@dataclass(frozen=True)
class Started:
    """The duration of a start, from the creation of the broker's process; its name server ran beforehand."""

    began_ms: float
    """Time at which the process began, ms since the epoch."""
    opened_ms: float
    """Time at which its port took a connection, ms since the epoch."""
    answered_ms: float
    """Time at which it had answered the first request, ms since the epoch."""
    bytes_read: int
    """Bytes that its process had read when its port took a connection, from the disk or from memory."""

    @property
    def open_s(self) -> float:
        """Seconds until the port was open."""
        return (self.opened_ms - self.began_ms) / 1000

    @property
    def answer_s(self) -> float:
        """Seconds until the first answer."""
        return (self.answered_ms - self.began_ms) / 1000


async def start_timed(broker: Broker) -> Started:
    """Start a broker and measure the time until it answers. The first request asks for an offset."""
    task = asyncio.create_task(broker.start())
    while not broker.running and not task.done():
        await asyncio.sleep(0.001)
    began = time.time()
    while True:
        if task.done():
            await task  # a failed start is reported at once
        try:
            socket.create_connection((HOST, broker.port), 0.1).close()
            break
        except OSError:
            await asyncio.sleep(0.002)
    opened, read = time.time(), bytes_read(broker.pid)
    await asyncio.to_thread(_ask, broker)
    answered = time.time()
    await task
    return Started(began * 1000, opened * 1000, answered * 1000, read)


def _ask(broker: Broker) -> None:
    with Remote((HOST, broker.port)) as remote:
        remote.max_offsets("SCHEDULE_TOPIC_XXXX", 1)


async def java(*arguments: str) -> dict[str, Any]:
    """Run the Java load with Apache's 4.9.7 client."""
    jars = install.apache("4.9.7").require() / "lib"
    program = install.java_program("4.9.7").require() / "program.jar"
    process = await asyncio.create_subprocess_exec(
        tools.find("java"), "-Xmx2g", "-Dcom.rocketmq.sendMessageWithVIPChannel=false",
        "-cp", f"{program}:{jars}/*", "duemq.peer.Load", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, errors = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError(errors.decode())
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    if result.get("failed") or result.get("lost") or result.get("twice"):
        raise RuntimeError(f"the load went wrong: {result}")
    return result
