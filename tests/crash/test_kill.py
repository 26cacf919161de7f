"""Goal: a broker killed with -9 at any moment under load loses nothing that it acknowledged and delivers nothing twice.

Method: a real broker process takes pipelined sends, plain and delayed at three levels, over several connections, and is
killed after a random time; it starts again on its store, and again, with the load going on. Before a start the file of
the levels' progress may be gone, or be an old copy. In the end the store is read: every acknowledged message is there
once, the delayed ones have been delivered into their topic, each by one record, the consume queues say what the
commitlog says.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from protocol import codec
from protocol.codes import RequestCode
from protocol.command import Command
from protocol.fastjson import loads
from protocol.frame import Frame, FrameReader
from scheduler.delay_levels import DelayLevels
from storage.check import problems
from storage.clock import SystemClock
from storage.copies import origin_of
from storage.files import OsFiles
from storage.store import MessageStore, StoreConfig
from tests.crash.load import DELAYED, PLAIN, load_until_lost
from tests.peers.clients import make_client
from tests.peers.duemq_broker import DuemqBroker

pytestmark = pytest.mark.crash

SEGMENT = 1 << 20
QUEUE_SEGMENT = 20 * 1000
LEVELS = "1s 1s 2s"


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
    }
    return DuemqBroker(directory, properties)


def tamper(store: Path, chance: random.Random, copies: list[bytes]) -> None:
    """Remove the file of the levels' progress, put an old copy of it back, or leave it."""
    file = store / "config" / "delayOffset.json"
    if file.exists():
        copies.append(file.read_bytes())
    what = chance.randrange(3)
    if what == 0:
        file.unlink(missing_ok=True)
        file.with_name("delayOffset.json.bak").unlink(missing_ok=True)
    elif what == 1 and copies:
        file.write_bytes(chance.choice(copies))


async def kill_repeatedly(directory: Path, flush: str, path: str, runs: int, seed: int) -> DuemqBroker:
    """Gives the broker, stopped, after its store was checked."""
    copies: list[bytes] = []
    chance = random.Random(seed)
    numbers = itertools.count(1)
    acknowledged: set[int] = set()
    broker = broker_at(directory, flush, path)
    for _ in range(runs):
        await broker.start()
        loading = asyncio.create_task(load_until_lost("127.0.0.1", broker.port, numbers))
        await asyncio.sleep(chance.uniform(0.02, 0.6))  # the moment of death is what the test varies
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
    """Until no level has anything waiting, as brokerStatus tells."""
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
        if all(done == total for done, total in levels):
            writer.close()
            return
        await asyncio.sleep(0.1)
    pytest.fail("the delayed messages were not delivered")


def check_store(root: Path, acknowledged: set[int]) -> None:
    config = StoreConfig(str(root), commitlog_segment_size=SEGMENT, queue_segment_size=QUEUE_SEGMENT)
    table = DelayLevels(LEVELS)
    store = MessageStore(config, OsFiles(), SystemClock(), ("127.0.0.1", 1), table.deliver_time)
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
                    offset_of_origin = origin_of(message.prepared_transaction_offset)
                    assert offset_of_origin is not None
                    origins[offset_of_origin] += 1
                    origin = store.message_at(offset_of_origin)
                    assert origin is not None
                    assert message.store_timestamp >= origin.store_timestamp + 1000, "early"
    store.close()
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
    """What a Java client reads of the topic of delayed messages: each once."""
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
