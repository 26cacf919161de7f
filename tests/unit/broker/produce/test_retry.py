"""Messages that a consumer failed: sent back, or sent to %RETRY% by the client, until they are dead letters."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from duemq.broker.workers import Background
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames.command import Command
from duemq.protocol.records import record
from duemq.protocol.records.message_id import pack_host
from duemq.protocol.records.record import FLAG_STORE_IPV6, StoredMessage
from duemq.protocol.requests.headers import ConsumerSendMsgBack, CreateTopic, TopicName
from duemq.protocol.topics import SCHEDULE_TOPIC
from duemq.storage.queues.consume_queue import UNIT
from tests.support.broker import Peer, UnboundBroker
from tests.support.loop import turns
from tests.support.wire import ADDED, pull, request, send


def back(
    offset: int, level: int = 0, group: str = "g", limit: int | None = None, version: int = 407, oneway: bool = False
) -> Command:
    header = ConsumerSendMsgBack(offset, group, level, "ID", "T", False, limit)
    return request(RequestCode.CONSUMER_SEND_MSG_BACK, header, version=version, oneway=oneway)


def last(broker: UnboundBroker) -> StoredMessage:
    """The last stored message."""
    message = broker.store.message_at(broker.store.appender.last_physical_offset)
    assert message is not None
    return message


@pytest.fixture
async def original(broker: UnboundBroker, peer: Peer) -> StoredMessage:
    answer = await peer.ask(send("T", b"body", queue_id=1, properties="TAGS\x01tagA\x02UNIQ_KEY\x01U", flag=7))
    assert answer.code == 0
    return last(broker)


# --- sent back


async def test_a_message_sent_back_waits_for_its_level_and_then_comes_by_its_retry_topic(
    broker: UnboundBroker, peer: Peer, original: StoredMessage, loop: Any
) -> None:
    assert (await peer.ask(back(original.physical_offset))).code == 0
    waiting = last(broker)
    assert (waiting.topic, waiting.queue_id) == (SCHEDULE_TOPIC, 2)
    assert waiting.properties == {
        "TAGS": "tagA", "UNIQ_KEY": "U", **ADDED, "RETRY_TOPIC": "T", "DELAY": "3",
        "ORIGIN_MESSAGE_ID": original.offset_message_id, "REAL_TOPIC": "%RETRY%g", "REAL_QID": "0",
    }  # fmt: skip
    broker.clock.advance(10_000)
    loop.advance(10)
    answer = await peer.ask(pull("%RETRY%g", 0, suspend_ms=15_000))
    (message,) = record.decode_all(bytes(answer.body))
    assert (message.body, message.flag, message.reconsume_times) == (b"body", 7, 1)
    assert (message.born_timestamp, message.born_host) == (original.born_timestamp, original.born_host)
    assert message.get_property("RETRY_TOPIC") == "T"

    assert (await peer.ask(back(message.physical_offset))).code == 0
    again = last(broker)
    assert (again.queue_id, again.reconsume_times) == (3, 2)
    assert again.get_property("RETRY_TOPIC") == "T"
    assert again.get_property("ORIGIN_MESSAGE_ID") == original.offset_message_id


async def test_a_retry_topic_that_is_deleted_while_a_message_waits_for_it_is_made_again(
    broker: UnboundBroker, peer: Peer, original: StoredMessage, loop: Any
) -> None:
    """A retry topic that is deleted while a message waits for it is made again: the message goes into the queue that
    consumers read, not into one of the deleted topic."""
    broker.lanes.hold(Background.TABLES)
    peer.post(back(original.physical_offset, -1))
    await turns()
    peer.post(request(RequestCode.DELETE_TOPIC_IN_BROKER, TopicName("%DLQ%g")))
    await turns()
    assert "%DLQ%g" not in broker.topics.table
    broker.lanes.let_go(Background.TABLES)
    while len(peer.responses) < 3:
        await asyncio.sleep(0)
    assert [answer.code for answer in peer.responses[1:]] == [0, 0]
    assert broker.topics.table["%DLQ%g"].is_saved
    (message,) = record.decode_all(bytes((await peer.ask(pull("%DLQ%g"))).body))
    assert message.body == b"body"


@pytest.mark.parametrize(("level", "queue_id"), [(1, 0), (18, 17), (19, 17), (2**31 - 1, 17)])
async def test_the_consumer_may_choose_the_level(
    broker: UnboundBroker, peer: Peer, original: StoredMessage, level: int, queue_id: int
) -> None:
    assert (await peer.ask(back(original.physical_offset, level))).code == 0
    assert (last(broker).topic, last(broker).queue_id) == (SCHEDULE_TOPIC, queue_id)


@pytest.mark.parametrize("level", [-1, -(2**31)])
async def test_a_negative_level_makes_it_a_dead_letter_at_once(
    broker: UnboundBroker, peer: Peer, original: StoredMessage, level: int
) -> None:
    assert (await peer.ask(back(original.physical_offset, level))).code == 0
    dead = last(broker)
    assert (dead.topic, dead.queue_id, dead.reconsume_times) == ("%DLQ%g", 0, 1)
    topic = broker.topics.table["%DLQ%g"].config
    assert (topic.read_queue_nums, topic.write_queue_nums, topic.perm) == (1, 1, 6)


@pytest.mark.parametrize(
    ("times", "limit", "version", "is_dead"),
    [
        (15, None, 407, False),
        (16, None, 407, True),
        (3, 3, 407, True),
        (3, 3, 120, False),
        (3, 4, 121, False),
        (99, -1, 407, True),
    ],
)
async def test_after_the_last_try_it_is_a_dead_letter(
    broker: UnboundBroker, peer: Peer, times: int, limit: int | None, version: int, is_dead: bool
) -> None:
    """After the last try a message becomes a dead letter. The request's limit counts from client version 3.4.9 on, else
    that of the group."""
    await peer.ask(send("T", reconsume_times=times))
    assert (await peer.ask(back(last(broker).physical_offset, limit=limit, version=version))).code == 0
    assert last(broker).topic == ("%DLQ%g" if is_dead else SCHEDULE_TOPIC)


async def test_the_largest_count_of_tries_is_no_hindrance(broker: UnboundBroker, peer: Peer, logged: list[Any]) -> None:
    await peer.ask(send("T", reconsume_times=2**31 - 1))
    assert (await peer.ask(back(last(broker).physical_offset))).code == 0
    assert last(broker).topic == "%DLQ%g"
    assert last(broker).reconsume_times == 2**31 - 1
    assert not [line for line in logged if line["event"] == "request_failed"]


async def test_a_message_that_is_larger_than_may_be_sent_now_comes_back(broker: UnboundBroker, peer: Peer) -> None:
    await peer.ask(send("T", bytes(5000)))
    message = last(broker)
    broker.store.appender.max_body_size.value = 1000
    await peer.ask(back(message.physical_offset))
    assert len(last(broker).body) == 5000
    assert last(broker).topic == SCHEDULE_TOPIC


@pytest.mark.parametrize("offset", [1, -1, 10**6, 2**63 - 1, -(2**63)])
async def test_a_message_that_is_not_there_is_refused(
    broker: UnboundBroker, peer: Peer, original: StoredMessage, offset: int, logged: list[Any]
) -> None:
    answer = await peer.ask(back(offset))
    assert (answer.code, str(offset) in (answer.remark or "")) == (ResponseCode.SYSTEM_ERROR, True)
    assert not [line for line in logged if line["event"] == "request_failed"]


async def test_a_retry_keeps_only_the_flags_that_tell_how_to_read_it(broker: UnboundBroker, peer: Peer) -> None:
    """A retry keeps the flags for a compressed body and for many tags, and no others, such as those of clients that do
    not count here: 64 asks a broker to take a message apart."""
    await peer.ask(send("T", sys_flag=1 | 2 | 64 | 3 << 8))
    await peer.ask(back(last(broker).physical_offset))
    assert (last(broker).topic, last(broker).sys_flag) == (SCHEDULE_TOPIC, 1 | 2 | 3 << 8)


async def test_a_group_without_retry_queues_retries_nothing(
    broker: UnboundBroker, peer: Peer, original: StoredMessage
) -> None:
    await peer.ask(
        request(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=b'{"groupName":"g","retryQueueNums":0}')
    )
    assert (await peer.ask(back(original.physical_offset))).code == 0
    assert last(broker).physical_offset == original.physical_offset


@pytest.mark.parametrize("prefix", ["%RETRY%", "%DLQ%"])
async def test_a_retry_topic_without_queues_is_refused(
    broker: UnboundBroker, peer: Peer, original: StoredMessage, prefix: str, logged: list[Any]
) -> None:
    header = CreateTopic(f"{prefix}g", "TBW102", 0, 0, 6, "SINGLE_TAG")
    assert (await peer.ask(request(RequestCode.UPDATE_AND_CREATE_TOPIC, header))).code == 0
    level = -1 if prefix == "%DLQ%" else 0
    commands = [back(original.physical_offset, level), send("%RETRY%g", reconsume_times=99)]
    assert [(await peer.ask(command)).code for command in commands] == [ResponseCode.SYSTEM_ERROR] * 2
    assert not [line for line in logged if line["event"] == "request_failed"]


async def test_messages_sent_back_are_spread_over_the_retry_queues(
    broker: UnboundBroker, peer: Peer, original: StoredMessage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await peer.ask(
        request(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=b'{"groupName":"g","retryQueueNums":3}')
    )
    choices = iter([2, 0, 1])
    monkeypatch.setattr(random, "randrange", lambda _: next(choices))
    chosen = []
    for _ in range(3):
        assert (await peer.ask(back(original.physical_offset))).code == 0
        chosen.append(last(broker).get_property("REAL_QID"))
    assert chosen == ["2", "0", "1"]


async def test_a_one_way_send_back_is_stored_and_not_answered(
    broker: UnboundBroker, peer: Peer, original: StoredMessage
) -> None:
    peer.post(back(original.physical_offset, -1, oneway=True))
    await broker.router.finish(5)
    assert last(broker).topic == "%DLQ%g"
    assert len(peer.responses) == 1


async def test_a_retry_of_a_message_that_was_stored_at_an_ipv6_address_is_readable(
    broker: UnboundBroker, peer: Peer, original: StoredMessage
) -> None:
    """A retry of a message that was stored at an IPv6 address is readable: the store may have been another broker's,
    and the flags describe the new record's hosts."""
    foreign = record.decode(record.encode(original))
    foreign.store_host, foreign.sys_flag = pack_host("2001:db8::1", 1), FLAG_STORE_IPV6
    foreign.physical_offset = broker.store.log.end
    queue = broker.store.ensure_queue("T", 1)
    foreign.queue_offset = queue.next_offset
    data = record.encode(foreign)
    queue.tail += UNIT.pack(foreign.physical_offset, len(data), 0)
    queue.next_offset += 1
    broker.store.log.write(broker.store.log.end, data)
    broker.store.log.end += len(data)
    assert (await peer.ask(back(foreign.physical_offset))).code == 0
    assert (last(broker).topic, last(broker).sys_flag) == (SCHEDULE_TOPIC, 0)


# --- sent to the retry topic by the client


async def test_the_clients_own_way_of_retrying_is_taken(broker: UnboundBroker, peer: Peer) -> None:
    text = "RETRY_TOPIC\x01T\x02DELAY\x014"
    answer = await peer.ask(send("%RETRY%g", properties=text, reconsume_times=3, max_reconsume_times=16))
    assert answer.code == 0
    message = last(broker)
    assert (message.topic, message.queue_id, message.reconsume_times) == (SCHEDULE_TOPIC, 3, 3)
    assert message.get_property("REAL_TOPIC") == "%RETRY%g"


@pytest.mark.parametrize(
    ("times", "limit", "version", "is_dead"),
    [(15, None, 407, False), (16, None, 407, True), (3, 3, 407, True), (3, 3, 120, False)],
)
async def test_the_clients_own_retries_end_as_dead_letters(
    broker: UnboundBroker, peer: Peer, times: int, limit: int | None, version: int, is_dead: bool
) -> None:
    """A client's own retries end as dead letters without delay, whatever level they ask for."""
    command = send(
        "%RETRY%g", properties="DELAY\x014", reconsume_times=times, max_reconsume_times=limit, version=version
    )
    assert (await peer.ask(command)).code == 0
    message = last(broker)
    assert message.topic == ("%DLQ%g" if is_dead else SCHEDULE_TOPIC)
    assert (message.get_property("DELAY") is None) == is_dead


async def test_a_batch_of_retries_is_refused(peer: Peer) -> None:
    assert (await peer.ask(send("%RETRY%g"))).code == 0
    assert (await peer.ask(send("%RETRY%g", batch=True))).code == ResponseCode.MESSAGE_ILLEGAL
