"""Goal: a broker killed with -9 at any moment under load loses nothing that it acknowledged and delivers nothing twice.

Method: a real broker process takes pipelined sends, plain and delayed, over several connections, and is killed after a
random time; it starts again on its store, and again, with the load going on. The delayed messages have one of three
levels, or timers for random times up to some seconds ahead. Before a start the progress files of levels and timers may
be removed or replaced with old copies, and the timer wheel and its log may be removed. At the end the store is read:
every acknowledged message is there once, the delayed ones have been delivered into their topic, none before its time
and each by one record, and the consume queues agree with the commitlog.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest

from duemq.protocol.codes import RequestCode
from duemq.protocol.frames import codec
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.fastjson import loads
from duemq.protocol.frames.frame import Frame, FrameReader
from duemq.scheduler.levels.table import DelayLevels
from duemq.storage.files import OsFiles
from duemq.storage.log.copies import origin_of
from duemq.storage.store import MessageStore, StoreConfig
from tests.crash.load import DELAYED, PLAIN, Delay, by_level, by_time, load_until_lost
from tests.peers.brokers.duemq import DuemqBroker
from tests.peers.clients import make_client
from tests.support.store_problems import problems

pytestmark = pytest.mark.crash

SEGMENT = 1 << 20
QUEUE_SEGMENT = 20 * 1000
LEVELS = "1s 1s 2s"
TIMER_LOG_SEGMENT = 52 * 1000
PROGRESS = ("delayOffset.json", "timercheck", "timermetrics")


def broker_at(directory: Path, flush: str, path: str) -> DuemqBroker:
    properties = {
        "flushDiskType": flush,
        "enableScheduleAsyncDeliver": "true" if path == "async" else "false",
        "messageDelayLevel": LEVELS,
        "mappedFileSizeCommitLog": SEGMENT,
        "mappedFileSizeConsumeQueue": QUEUE_SEGMENT,
        "maxMessageSize": 65536,
        "flushIntervalConsumeQueue": 200,
        "flushDelayOffsetInterval": 300,
        "mappedFileSizeTimerLog": TIMER_LOG_SEGMENT,
    }
    return DuemqBroker(directory, properties, is_warm=True)


def tamper(store: Path, chance: random.Random, copies: dict[str, list[bytes]]) -> None:
    """Remove the progress files of levels and timers, put old copies of them back, or leave them; sometimes remove the
    files that timers can rebuild."""
    what = chance.randrange(3)
    for name in PROGRESS:
        file = store / "config" / name
        if file.exists():
            copies[name].append(file.read_bytes())
        if what == 0:
            file.unlink(missing_ok=True)
            file.with_name(f"{name}.bak").unlink(missing_ok=True)
        elif what == 1 and copies[name]:
            file.write_bytes(chance.choice(copies[name]))
    # The wheel can be rebuilt from the log, and both from the messages.
    if chance.random() < 0.3:
        (store / "timerwheel").unlink(missing_ok=True)
    if chance.random() < 0.15:
        shutil.rmtree(store / "timerlog", ignore_errors=True)


async def kill_repeatedly(
    directory: Path, flush: str, path: str, runs: int, seed: int, delay: Delay = by_level
) -> DuemqBroker:
    """Kill a broker `runs` times under load; return it, stopped, after its store was checked."""
    copies: dict[str, list[bytes]] = {name: [] for name in PROGRESS}
    chance = random.Random(seed)
    numbers = itertools.count(1)
    acknowledged: set[int] = set()
    broker = broker_at(directory, flush, path)
    for _ in range(runs):
        await broker.start()
        loading = asyncio.create_task(load_until_lost("127.0.0.1", broker.port, numbers, delay))
        await asyncio.sleep(chance.uniform(0.02, 0.6))  # the moment of the kill is the variable of this test
        await broker.kill()
        for load in await loading:
            acknowledged |= load.acknowledged
        tamper(broker.store, chance, copies)
    await broker.start()
    await wait_until_delivered(broker)
    await broker.stop()
    check_store(broker.store, acknowledged)
    return broker


async def wait_until_delivered(broker: DuemqBroker) -> None:
    """Wait until no level and no timer has a waiting message, by brokerStatus."""
    reader, writer = await asyncio.open_connection("127.0.0.1", broker.port)
    frames = FrameReader()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        writer.write(codec.encode(Command(code=RequestCode.GET_BROKER_RUNTIME_INFO)))
        found: list[Frame] = []
        while not found:
            found = frames.receive_data(await reader.read(1 << 16))
        table = loads(codec.decode(found[0]).body)["table"]
        levels = [table[f"scheduleMessageOffset_{level}"].split(",") for level in (1, 2, 3)]
        timers = table["timerCongestNum"], table["timerOffsetBehind"]
        if all(done == total for done, total in levels) and timers == ("0", "0"):
            writer.close()
            return
        await asyncio.sleep(0.1)
    pytest.fail("the delayed messages were not delivered")


def check_store(root: Path, acknowledged: set[int]) -> None:
    config = StoreConfig(str(root), commitlog_segment_size=SEGMENT, queue_segment_size=QUEUE_SEGMENT)
    table = DelayLevels(LEVELS)
    store = MessageStore(config, OsFiles(), ("127.0.0.1", 1), table.deliver_time)
    recovered = store.open()
    assert recovered.torn is None
    assert list(problems(store)) == []
    stored: Counter[int] = Counter()
    origins: Counter[int] = Counter()
    for topic in (PLAIN, DELAYED):
        for queue in store.queues.get(topic, {}).values():
            for offset in range(queue.min_offset, queue.next_offset):
                unit = queue.unit(offset)
                assert unit is not None
                message = store.message_at(unit[0], unit[1])
                assert message is not None
                stored[int(message.body)] += 1
                if topic == DELAYED:
                    due = message.get_property("TIMER_DELIVER_MS")
                    offset_of_origin = origin_of(message.prepared_transaction_offset)
                    if offset_of_origin is None and due is not None:
                        # Its time had passed when the broker received it.
                        assert message.get_property("REAL_TOPIC") is None
                        assert message.store_timestamp >= int(due)
                        continue
                    assert offset_of_origin is not None
                    origins[offset_of_origin] += 1
                    origin = store.message_at(offset_of_origin)
                    assert origin is not None
                    due_ms = int(due) if due is not None else origin.store_timestamp + 1000
                    assert message.store_timestamp >= due_ms, "early"
    store.abandon()
    assert acknowledged, "the load did not run"
    assert acknowledged - stored.keys() == set(), "acknowledged, and lost"
    assert [number for number, count in stored.items() if count > 1] == [], "stored twice"
    assert [offset for offset, count in origins.items() if count > 1] == [], "delivered twice"


FLUSHES = ["ASYNC_FLUSH", "SYNC_FLUSH"]
PATHS = ["sync", "async"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("flush", FLUSHES)
async def test_kills_under_load_lose_and_double_nothing(tmp_path: Path, flush: str, path: str) -> None:
    await kill_repeatedly(tmp_path, flush, path, 5, seed=1)


@pytest.mark.parametrize("flush", FLUSHES)
async def test_kills_under_a_load_of_timers_lose_and_double_nothing(tmp_path: Path, flush: str) -> None:
    await kill_repeatedly(tmp_path, flush, "async", 5, seed=2, delay=by_time)


@pytest.mark.soak
@pytest.mark.parametrize("flush", FLUSHES)
@pytest.mark.parametrize("round_number", range(13))
async def test_many_kills_under_a_load_of_timers_lose_and_double_nothing(
    tmp_path: Path, flush: str, round_number: int
) -> None:
    broker = await kill_repeatedly(tmp_path, flush, "async", 10, seed=200 + round_number, delay=by_time)
    await check_with_java(broker, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("flush", FLUSHES)
@pytest.mark.parametrize("round_number", range(13))
async def test_five_hundred_kills_under_load_lose_and_double_nothing(
    tmp_path: Path, flush: str, path: str, round_number: int
) -> None:
    broker = await kill_repeatedly(tmp_path, flush, path, 10, seed=100 + round_number)
    await check_with_java(broker, tmp_path)


async def check_with_java(broker: DuemqBroker, directory: Path) -> None:
    """Check that a Java client reads each message of the topic of delayed messages once."""
    await broker.start()
    java = make_client("java-4.9.7", directory / "java")
    await java.start()
    bodies: Counter[bytes] = Counter()
    for queue_id in range(4):
        bodies.update(message.body for message in await java.pull_all(broker.nameserver, DELAYED, queue_id))
    await java.stop()
    await broker.stop()
    assert bodies
    assert [body for body, count in bodies.items() if count > 1] == [], "read twice"
