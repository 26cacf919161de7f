"""A topic with its own table of levels: a broker process, with duemq's client and command line."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from duemq import Consumer, DelayError, Producer, ReceivedMessage
from duemq._net.connection import connect
from duemq._values.intervals import Intervals
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.requests.headers import CreateTopic
from duemq.testing import TestClock
from tests.peers.brokers.duemq import DuemqBroker

DUEMQ = str(Path(sys.executable).with_name("duemq"))
TOPIC = "reminders"
HOUR_MS = 3_600_000


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[DuemqBroker]:
    # Without timers, which would allow any delay.
    properties = {"testClock": "true", "messageDelayLevel": "1s 1h 2h 3h", "timerWheelEnable": "false"}
    broker = DuemqBroker(tmp_path, properties, is_warm=True)
    await broker.start()
    yield broker
    await broker.stop()


async def set_attributes(broker: DuemqBroker, attributes: str) -> None:
    """Make the topic, or change it, as mqadmin does."""
    admin = await connect(broker.address, codec="json", on_request=lambda command: None, timeout=5)
    header = CreateTopic(TOPIC, "TBW102", 1, 1, 6, "SINGLE_TAG", 0, False, attributes)
    answer = await admin.request(RequestCode.UPDATE_AND_CREATE_TOPIC, header, timeout=5)
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    admin.close()
    await admin.wait_closed()


async def test_a_delay_is_kept_whatever_the_topics_table_is(broker: DuemqBroker) -> None:
    clock = TestClock(broker.nameserver)
    consumer = Consumer("g", nameserver=broker.nameserver)
    consumer.subscribe(TOPIC)

    async def received() -> ReceivedMessage:
        message = await consumer.receive()
        await message.ack()
        return message

    await set_attributes(broker, "+delay.levels=1s 3h 2h")
    async with Producer(broker.nameserver, _intervals=Intervals(delays=0.0)) as producer, consumer:
        # The table as it was made, changed, and removed: in each of them 2h is another level.
        for change in ("+delay.levels=1s 3h 2h", "+delay.levels=2h 1s", "-delay.levels"):
            await set_attributes(broker, change)
            begin = (await clock.now()).timestamp() * 1000
            await producer.send(TOPIC, b"in two hours", delay="2h")
            await clock.advance("1h59m")
            await producer.send(TOPIC, b"a minute before")
            assert (await received()).body == b"a minute before", change
            await clock.advance("1m")
            message = await received()
            assert message.body == b"in two hours"
            # A difference of whole seconds would mean another level; 1 ms is the precision of the clock.
            assert message.store_time_ms - begin >= 2 * HOUR_MS - 1, change
        await set_attributes(broker, "+delay.levels=1s 3h")
        with pytest.raises(
            DelayError, match=r"1s 3h of the topic reminders; the broker's own .*: 1s 1h 2h 3h"
        ) as caught:
            await producer.send(TOPIC, b"x", delay="2h")
        assert caught.value.levels_ms == (1000, 3 * HOUR_MS)


async def test_the_command_chooses_by_the_topics_table(broker: DuemqBroker) -> None:
    await set_attributes(broker, "+delay.levels=2h 1s")

    async def send(delay: str) -> subprocess.CompletedProcess[str]:
        return await asyncio.to_thread(
            subprocess.run,
            [DUEMQ, "send", TOPIC, "x", "--in", delay, "--json", "--nameserver", broker.nameserver],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    done = await send("1s")
    assert done.returncode == 0, done.stderr
    message_id = json.loads(done.stdout)["message_id"]
    consumer = Consumer("g", nameserver=broker.nameserver)
    consumer.subscribe(TOPIC)
    async with consumer:
        message = await consumer.receive()
    assert message.message_id == message_id
    assert message.delay_level == 1, "the broker's level of 1s, by way of the topic's second"
    refused = await send("1h")
    assert (refused.returncode, refused.stdout) == (1, "")
    (line,) = refused.stderr.splitlines()
    assert (
        "only the delay levels 2h 1s of the topic reminders; the broker's own levels do not apply to it: 1s 1h 2h 3h"
        in line
    )
