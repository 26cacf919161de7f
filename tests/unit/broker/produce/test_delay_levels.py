"""Delay levels over the wire: tables of topics, live changes, the output of brokerStatus."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.fastjson import loads
from duemq.protocol.records.record import StoredMessage
from duemq.protocol.requests.headers import ConsumerSendMsgBack, CreateTopic
from duemq.protocol.topics import SCHEDULE_TOPIC
from duemq.storage.log.copies import origin_of
from tests.support.broker import Peer, UnboundBroker
from tests.support.loop import SteppedLoop
from tests.support.wire import request, send

START_MS = 1_700_000_000_000


def create(topic: str, attributes: str) -> Command:
    return request(
        RequestCode.UPDATE_AND_CREATE_TOPIC, CreateTopic(topic, "TBW102", 4, 4, 6, "SINGLE_TAG", 0, False, attributes)
    )


def deliver_times(broker: UnboundBroker, level: int) -> list[int]:
    """Return the deliver times of a level's messages, ms after the start."""
    queue = broker.store.ensure_queue(SCHEDULE_TOPIC, level - 1)
    units = [queue.unit(offset) for offset in range(queue.next_offset)]
    return [unit[2] - START_MS for unit in units if unit is not None]


async def change(peer: Peer, text: str) -> Command:
    return await peer.ask(request(RequestCode.UPDATE_BROKER_CONFIG, body=text.encode()))


async def test_a_topic_may_have_a_table_of_its_own(broker: UnboundBroker, peer: Peer) -> None:
    assert (await peer.ask(create("T", "+delay.levels=10s 1h"))).code == ResponseCode.SUCCESS
    for level in (1, 2, 9):
        assert (await peer.ask(send("T", properties=f"DELAY\x01{level}"))).code == ResponseCode.SUCCESS
    assert (await peer.ask(send("other", properties="DELAY\x011"))).code == ResponseCode.SUCCESS
    assert deliver_times(broker, 3) == [10_000]
    assert deliver_times(broker, 17) == [3_600_000, 3_600_000], "2, and 9 which is capped to it"
    assert deliver_times(broker, 1) == [1000]


async def test_when_a_message_with_a_level_is_due_is_told_by_the_brokers_clock(
    broker: UnboundBroker, peer: Peer
) -> None:
    """The broker replaces DUE_MS of a message with a level by its own deliver time: duemq's producer sends an estimate
    by its own clock, which may be slow or fast. A retry keeps the first deliver time."""

    def due_ms(message: StoredMessage | None) -> str | None:
        assert message is not None
        return message.properties.get("DUE_MS")

    assert (await peer.ask(create("T", "+delay.levels=10s 1h"))).code == ResponseCode.SUCCESS
    for topic, level, delay_ms in (("other", 1, 1000), ("other", 99, 7_200_000), ("T", 1, 10_000)):
        assert (await peer.ask(send(topic, properties=f"DELAY\x01{level}\x02DUE_MS\x01123\x02A\x01b"))).code == 0
        offset = broker.store.appender.last_physical_offset
        assert due_ms(broker.store.message_at(offset)) == str(START_MS + delay_ms)
    assert (await peer.ask(send("other", properties="DELAY\x011"))).code == 0
    assert due_ms(broker.store.message_at(broker.store.appender.last_physical_offset)) is None
    assert (await peer.ask(send("other", properties="DUE_MS\x01123"))).code == 0
    offset = broker.store.appender.last_physical_offset
    assert due_ms(broker.store.message_at(offset)) == "123"
    back = request(RequestCode.CONSUMER_SEND_MSG_BACK, ConsumerSendMsgBack(offset, "g", 3))
    assert (await peer.ask(back)).code == 0
    assert due_ms(broker.store.message_at(broker.store.appender.last_physical_offset)) == "123"


async def test_delays_of_a_topic_are_among_the_brokers(broker: UnboundBroker, peer: Peer) -> None:
    answer = await peer.ask(create("T", "+delay.levels=7s"))
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "messageDelayLevel has no level of 7 s" in (answer.remark or "")
    answer = await peer.ask(create("T", "+delay.levels=soon"))
    assert "'soon' is not a delay" in (answer.remark or "")
    assert broker.topics.get("T") is None
    assert (await change(peer, "messageDelayLevel=1s 7s")).code == ResponseCode.SUCCESS
    assert (await peer.ask(create("T", "+delay.levels=7s"))).code == ResponseCode.SUCCESS
    assert (await change(peer, "messageDelayLevel=1s 8s")).code == ResponseCode.SUCCESS
    answer = await peer.ask(send("T", properties="DELAY\x011"))
    assert answer.code == ResponseCode.MESSAGE_ILLEGAL
    assert "level 1 of the topic T is 7 s" in (answer.remark or "")


async def test_levels_change_while_running(broker: UnboundBroker, peer: Peer, logged: list[Any]) -> None:
    await peer.ask(send("T", b"promised", properties="DELAY\x012"))
    assert (await change(peer, "messageDelayLevel=1s 2s 1d")).code == ResponseCode.SUCCESS
    for level in (2, 3, 18):
        await peer.ask(send("T", properties=f"DELAY\x01{level}"))
    assert deliver_times(broker, 2) == [5000, 2000]
    assert deliver_times(broker, 3) == [86_400_000, 86_400_000]
    assert [line["new"] for line in logged if line["event"] == "delay_levels_changed"] == ["1s 2s 1d"]
    answer = await change(peer, "messageDelayLevel=1s 2 minutes")
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert broker.levels.table.text == "1s 2s 1d"


async def test_a_change_of_the_levels_is_answered_when_a_crash_does_not_undo_it(
    broker: UnboundBroker, peer: Peer, loop: SteppedLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await change(peer, "messageDelayLevel=1s 3s")).code == ResponseCode.SUCCESS
    assert broker.levels.is_noted(broker.store.checkpoint)
    monkeypatch.setattr(broker.levels, "is_noted", lambda checkpoint: False)
    answer = asyncio.ensure_future(change(peer, "messageDelayLevel=1s 4s"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not answer.done()
    loop.advance(broker.config.sync_flush_timeout_ms / 1000)
    assert (await answer).code == ResponseCode.FLUSH_DISK_TIMEOUT
    assert broker.levels.table.text == "1s 4s"


async def test_a_level_message_promises_its_time_and_its_delivery_names_it(
    broker: UnboundBroker, peer: Peer, loop: Any
) -> None:
    await peer.ask(send("T", b"first", properties="DELAY\x011"))
    unit = broker.store.ensure_queue(SCHEDULE_TOPIC, 0).unit(0)
    assert unit is not None
    scheduled = broker.store.message_at(unit[0])
    assert scheduled is not None
    assert scheduled.prepared_transaction_offset == START_MS + 1000
    broker.clock.advance(1000)
    loop.advance(1.0)
    for _ in range(5):
        await asyncio.sleep(0)
    delivered = broker.store.ensure_queue("T", 0).unit(0)
    assert delivered is not None
    message = broker.store.message_at(delivered[0])
    assert message is not None
    assert origin_of(message.prepared_transaction_offset) == unit[0]


async def test_broker_status_shows_each_level(broker: UnboundBroker, peer: Peer) -> None:
    await peer.ask(send("T", properties="DELAY\x014"))
    broker.clock.advance(31_500)
    answer = await peer.ask(request(RequestCode.GET_BROKER_RUNTIME_INFO))
    table = loads(answer.body)["table"]
    assert table["scheduleMessageOffset_4"] == "0,1"
    assert table["scheduleLevel_4"].startswith(f"pending=1 nextDue={START_MS + 30_000} lateMillis=1500 ")
    assert table["scheduleLevel_5"].startswith("pending=0 nextDue=- lateMillis=0 ")


async def test_the_delivery_path_changes_while_running(broker: UnboundBroker, peer: Peer) -> None:
    assert broker.levels.delivery.config.is_async, "the faster one is the default"
    text = "enableScheduleAsyncDeliver=false\nscheduleAsyncDeliverMaxPendingLimit=5\nscheduleDeliverBatchSize=7\n"
    assert (await change(peer, text)).code == ResponseCode.SUCCESS
    found = broker.levels.delivery.config
    assert (found.is_async, found.pending_limit, found.batch_size) == (False, 5, 7)
