"""`duemq store repair` on stores that Apache's brokers wrote: started on the repaired stores, Apache's brokers deliver
all waiting messages once, and nothing that they had delivered before.

Without the repair, 4.9.7 never delivers the messages in a queue of the schedule topic that is gone or all zeros, and
delivers a level again from its beginning if delayOffset.json is gone; 5.3.3 never delivers waiting timers if timerlog/
is gone, and delivers the timer topic's messages again if timercheck is gone; a killed broker delivers the messages of
the last ten seconds twice. The second run has a shorter table of levels, by which the waiting messages are due.
"""

import asyncio
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from tests.interop.environment import ClientPool, SharedBroker, make_broker
from tests.interop.support import eventually
from tests.peers.broker import Broker
from tests.peers.clients import JavaClient
from tests.peers.messages import Outgoing
from tests.spark import oracle
from tests.spark.stores import copy_store, sampled
from tests.support import rows

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
WAITS_MS = 20_000
SCHEDULE = "consumequeue/SCHEDULE_TOPIC_XXXX"
TIMERS = ("timerlog", "timerwheel", "config/timercheck")
OFFSETS = ("config/delayOffset.json", "config/delayOffset.json.bak")
EVERYTHING = ("consumequeue", "checkpoint", *TIMERS, *OFFSETS)
ZEROED = f"{SCHEDULE}/2/{0:020}"
CASES = [
    ("apache-4.9.7", "stop", (SCHEDULE,)),
    ("apache-4.9.7", "stop", OFFSETS),
    ("apache-4.9.7", "stop", (ZEROED,)),
    ("apache-4.9.7", "kill", EVERYTHING),
    ("apache-5.3.3", "stop", (SCHEDULE, "consumequeue/rmq_sys_wheel_timer")),
    ("apache-5.3.3", "stop", TIMERS),
    ("apache-5.3.3", "stop", OFFSETS),
    ("apache-5.3.3", "kill", ()),
    ("apache-5.3.3", "kill", EVERYTHING),
]
ALWAYS = [CASES[0], CASES[3], CASES[8]]


class Stores:
    """The stores, each written on first use."""

    def __init__(self, directory: Path, clients: ClientPool) -> None:
        self._directory = directory
        self._clients = clients
        self._written: dict[tuple[str, str], Path] = {}

    async def get(self, kind: str, end: str) -> Path:
        """Return a store that a broker wrote before it was stopped, or killed."""
        if (kind, end) not in self._written:
            self._written[kind, end] = await self._write(kind, end)
        return self._written[kind, end]

    async def _write(self, kind: str, end: str) -> Path:
        directory = self._directory / f"{kind}-{end}"
        broker = make_broker(kind, directory, PROPERTIES, store=directory / "store")
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


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stores(
    shared_broker: SharedBroker, clients: ClientPool, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stores]:
    await shared_broker.make_room()
    directory = tmp_path_factory.mktemp("repair")
    yield Stores(directory, clients)
    shutil.rmtree(directory)


def damage(store: Path, lost: tuple[str, ...]) -> None:
    for name in lost:
        path = store / name
        if name == ZEROED:
            path.write_bytes(bytes(path.stat().st_size))
        elif path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def repair(store: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from duemq.cli import main; main()", "store", "repair", str(store), *options]
    for name in ("messageDelayLevel", "mappedFileSizeConsumeQueue"):
        command += ["--set", f"{name}={PROPERTIES[name]}"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("kind", "end", "lost"), sampled(CASES, ALWAYS))
async def test_apache_goes_on_with_a_repaired_store(
    stores: Stores, clients: ClientPool, tmp_path: Path, kind: str, end: str, lost: tuple[str, ...]
) -> None:
    written = await stores.get(kind, end)
    store = copy_store(written, tmp_path / "store")
    before = bodies(store)
    damage(store, lost)
    done = await asyncio.to_thread(repair, store)
    assert done.returncode == 0, done.stderr
    assert f"repaired: {store}" in done.stdout, done.stdout
    checked = await asyncio.to_thread(repair, store, "--dry-run")
    assert "nothing is to be repaired" in checked.stdout, checked.stdout
    waits = {b"waits level %d" % n for n in range(COUNT)}
    if kind == "apache-5.3.3":
        waits |= {b"waits timer %d" % n for n in range(COUNT)}
    assert not waits & before.keys(), "this machine was too slow"
    java = await clients.java(kind.removeprefix("apache-"))
    broker = make_broker(kind, tmp_path / "broker", SHORTENED, store=store)
    try:
        await broker.start()
        await eventually(partial(java.admin(broker.nameserver).route, TOPIC))
        await eventually(partial(stored, broker, java), lambda found: found >= before.total() + len(waits))
        # The delivery of messages sent behind all others shows that a second copy of those would be there as well.
        ends = [Outgoing(b"end", level=1), Outgoing(b"end", level=3)]
        if kind == "apache-5.3.3":
            ends.append(Outgoing(b"end", properties={"TIMER_DELIVER_MS": str(time.time_ns() // 1_000_000 + 3000)}))
        async with await java.producer(broker.nameserver) as producer:
            await producer.send(TOPIC, ends)
        expected = before.total() + len(waits) + len(ends)
        await eventually(partial(stored, broker, java), lambda found: found >= expected)
        await broker.stop()
    finally:
        if broker.running:
            await broker.kill()
    found, wanted = bodies(store), before + Counter(waits) + Counter({b"end": len(ends)})
    assert found == wanted, rows.about(store, [*(found - wanted), *(wanted - found)])
