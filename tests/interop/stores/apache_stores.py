"""Stores that Apache's brokers wrote, for the tests of what becomes of them: levels and timers, some delivered, the
others waiting. Each is written once in a run of the tests, which work on copies.
"""

import asyncio
import shutil
import time
from collections import Counter
from functools import partial
from pathlib import Path

from tests.interop.environment import FLUSHES_TIMERS, ClientPool, make_broker
from tests.interop.support import eventually
from tests.peers.brokers.broker import Broker
from tests.peers.clients import JavaClient
from tests.peers.messages import Outgoing
from tests.spark.world import oracle

TOPIC = "orders"
SEGMENT = 1 << 20
PROPERTIES: dict[str, object] = {
    "mappedFileSizeCommitLog": SEGMENT,
    "mappedFileSizeConsumeQueue": 300 * 20,
    "maxMessageSize": SEGMENT // 4,
    "messageDelayLevel": "1s 2s 1h",
    "timerWheelEnable": "true",
    "timerRollWindowSlot": 10,
}
SHORTENED = {**PROPERTIES, "messageDelayLevel": "1s 2s 1s"}
COUNT = 100
# Longer than the brokers need from the first send to their end, also on a busy machine.
WAITS_MS = 40_000
SCHEDULE = "consumequeue/SCHEDULE_TOPIC_XXXX"
ZEROED = f"{SCHEDULE}/2/{0:020}"


class ApacheStores:
    """The stores, each written on first use."""

    def __init__(self, directory: Path, clients: ClientPool) -> None:
        self._directory = directory
        self._clients = clients
        self._written: dict[tuple[str, str], asyncio.Task[Path]] = {}

    async def get(self, kind: str, end: str) -> Path:
        """Return a store that a broker wrote before it was stopped, or killed."""
        if (kind, end) not in self._written:
            self._written[kind, end] = asyncio.create_task(self._write(kind, end))
        return await asyncio.shield(self._written[kind, end])

    async def _write(self, kind: str, end: str) -> Path:
        directory = self._directory / f"{kind}-{end}"
        flushes = FLUSHES_TIMERS if kind == "apache-5.3.3" and end == "kill" else {}
        broker = make_broker(kind, directory, {**PROPERTIES, **flushes}, store=directory / "store")
        java = await self._clients.java(kind.removeprefix("apache-"))
        try:
            await broker.start()
            await java.admin(broker.nameserver).create_topic(broker.address, TOPIC, 3)
            await eventually(partial(java.admin(broker.nameserver).route, TOPIC))
            delivered = await _fill(broker, java, has_timers=kind == "apache-5.3.3")
            await eventually(partial(stored, broker, java), lambda found: found >= delivered)
            await (broker.stop() if end == "stop" else broker.kill())
        finally:
            if broker.running:
                await broker.kill()
        twice = [body for body, count in bodies(broker.store).items() if count > 1]
        assert not twice, f"the Java client sent {len(twice)} messages again"
        return broker.store


async def _fill(broker: Broker, java: JavaClient, *, has_timers: bool) -> int:
    """Send messages; return the number of those delivered in the next seconds."""
    messages = [Outgoing(b"soon level %d" % n, level=1) for n in range(COUNT)]
    messages += [Outgoing(b"waits level %d" % n, level=3) for n in range(COUNT)]
    messages += [Outgoing(b"soon plain %d" % n + b"x" * 900) for n in range(15 * COUNT)]
    if has_timers:
        now = time.time_ns() // 1_000_000
        for name, delay in (("soon", 2000), ("waits", WAITS_MS)):
            for n in range(COUNT):
                at = {"TIMER_DELIVER_MS": str(now + delay + 10 * n)}
                messages.append(Outgoing(b"%s timer %d" % (name.encode(), n), properties=at))
    async with await java.producer(broker.nameserver) as producer:
        await producer.send(TOPIC, messages, "async")
    return sum(message.body.startswith(b"soon") for message in messages)


async def stored(broker: Broker, java: JavaClient) -> int:
    stats = await java.admin(broker.nameserver).topic_stats(TOPIC)
    return sum(queue.max for queue in stats.values())


def bodies(store: Path) -> Counter[bytes]:
    """The messages sent or delivered to the topic, by the commitlog."""
    return Counter(record.content.rstrip(b"x") for record in oracle.contents(store).records if record.topic == TOPIC)


def damage(store: Path, lost: tuple[str, ...]) -> None:
    for name in lost:
        path = store / name
        if name == ZEROED:
            path.write_bytes(bytes(path.stat().st_size))
        elif path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
