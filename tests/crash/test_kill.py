"""Goal: a broker killed with -9 at any moment under load loses nothing that it acknowledged.

Method: a real broker process takes pipelined sends, plain and delayed, over several connections, and is killed after a
random time; it starts again on its store, and again, with the load going on. In the end its store is read: every
acknowledged message is there, the delayed ones have been delivered into their topic, the consume queues say what the
commitlog says.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
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
from storage.files import OsFiles
from storage.store import MessageStore, StoreConfig
from tests.crash.load import DELAYED, PLAIN, load_until_lost
from tests.peers.duemq_broker import DuemqBroker

pytestmark = pytest.mark.crash

SEGMENT = 1 << 20
QUEUE_SEGMENT = 20 * 1000
LEVELS = "1s 1s 2s"


def broker_at(directory: Path, flush: str) -> DuemqBroker:
    properties = {
        "flushDiskType": flush,
        "messageDelayLevel": LEVELS,
        "mappedFileSizeCommitLog": SEGMENT,
        "mappedFileSizeConsumeQueue": QUEUE_SEGMENT,
        "maxMessageSize": 65536,
        "flushIntervalConsumeQueue": 200,
        "flushDelayOffsetInterval": 300,
    }
    return DuemqBroker(directory, properties)


async def kill_repeatedly(directory: Path, flush: str, runs: int, seed: int) -> None:
    chance = random.Random(seed)
    numbers = itertools.count(1)
    acknowledged: set[int] = set()
    broker = broker_at(directory, flush)
    for _ in range(runs):
        await broker.start()
        loading = asyncio.create_task(load_until_lost("127.0.0.1", broker.port, numbers))
        await asyncio.sleep(chance.uniform(0.02, 0.6))  # the moment of death is what the test varies
        await broker.kill()
        for load in await loading:
            acknowledged |= load.acknowledged
    await broker.start()
    await wait_until_delivered(broker)
    await broker.stop()
    check_store(broker.store, acknowledged)


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
    stored: set[int] = set()
    for topic in (PLAIN, DELAYED):
        for queue in store.queues.get(topic, {}).values():
            for offset in range(queue.min_offset, queue.next_offset):
                unit = queue.unit(offset)
                assert unit is not None
                message = store.message_at(unit[0], unit[1])
                assert message is not None
                stored.add(int(message.body))
                if topic == DELAYED:
                    origin = store.message_at(message.prepared_transaction_offset)
                    assert origin is not None
                    assert message.store_timestamp >= origin.store_timestamp + 1000, "early"
    store.close()
    assert acknowledged, "the load did not run"
    assert acknowledged - stored == set(), "acknowledged, and lost"


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
async def test_ten_kills_under_load_lose_nothing(tmp_path: Path, flush: str) -> None:
    await kill_repeatedly(tmp_path, flush, 10, seed=1)


@pytest.mark.soak
@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
@pytest.mark.parametrize("round_number", range(25))
async def test_five_hundred_kills_under_load_lose_nothing(tmp_path: Path, flush: str, round_number: int) -> None:
    await kill_repeatedly(tmp_path, flush, 10, seed=100 + round_number)
