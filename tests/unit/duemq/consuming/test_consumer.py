from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from msgspec.structs import replace

import duemq
from duemq import ArgumentError, ClosedError, ConnectError, Consumer, MessageQueue, ReceivedMessage, sync
from duemq.protocol.codes import FLAG_ONEWAY, RequestCode, ResponseCode
from duemq.protocol.frames import fastjson
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import JSON
from duemq.protocol.requests.bodies import BrokerQueue as Queue
from duemq.protocol.requests.bodies import reset_offset_body
from duemq.protocol.requests.headers import OffsetResponse, ResetOffset
from tests.unit.duemq.conftest import INTERVALS
from tests.unit.duemq.fake import NOW_MS, FakeBroker, Request, failure, pulled, success

PULL = RequestCode.PULL_MESSAGE
COMMIT = RequestCode.UPDATE_CONSUMER_OFFSET
LOAD = RequestCode.QUERY_CONSUMER_OFFSET
BACK = RequestCode.CONSUMER_SEND_MSG_BACK
MEMBERS = RequestCode.GET_CONSUMER_LIST_BY_GROUP
TAGS_A = "TAGS\x01a"
TAGS_B = "TAGS\x01b"
WITHOUT_COMMITS = replace(INTERVALS, commit=3600.0)
LAST_MEMBER = "\uffff"


def make_consumer(broker: FakeBroker, on_message: Any = None, *, tags: str = "*", **options: Any) -> Consumer:
    options = {"from_": "first", "_intervals": INTERVALS, "_clock": lambda: NOW_MS + 1_000, **options}
    consumer = Consumer("g", on_message, nameserver=broker.address, **options)
    consumer.subscribe("demo", tags)
    return consumer


async def take(consumer: Consumer, count: int) -> list[ReceivedMessage]:
    async with asyncio.timeout(10):
        return [await consumer.receive() for _ in range(count)]


def bodies(messages: list[ReceivedMessage]) -> list[bytes]:
    return sorted(message.body for message in messages)


def pulls(broker: FakeBroker, queue_id: int = 0, topic: str = "demo") -> list[Request]:
    queue = (topic, str(queue_id))
    return [each for each in broker.requests_of(PULL) if (each.ext["topic"], each.ext["queueId"]) == queue]


# --- receiving ----------------------------------------------------------------------------------------------------


async def test_messages_of_all_queues_are_received_and_committed_when_acknowledged(broker: FakeBroker) -> None:
    await broker.store("demo", b"a", b"b", queue_id=0)
    await broker.store("demo", b"c", queue_id=3)
    async with make_consumer(broker) as consumer:
        messages = await take(consumer, 3)
        assert bodies(messages) == [b"a", b"b", b"c"]
        assert consumer.assignment == {MessageQueue("demo", "broker-a", number) for number in range(4)}
        for message in messages:
            await message.ack()
        await consumer.caught_up()
        await broker.store("demo", b"d")
        assert [message.body for message in await take(consumer, 1)] == [b"d"]
    assert [broker.offsets["g", "demo", number] for number in range(4)] == [2, 0, 0, 1]


async def test_what_is_not_acknowledged_comes_again(broker: FakeBroker) -> None:
    await broker.store("demo", b"a", b"b", b"c")
    async with make_consumer(broker) as consumer:
        messages = await take(consumer, 3)
        await messages[0].ack()
        await messages[2].ack()
    assert broker.offsets["g", "demo", 0] == 1
    async with make_consumer(broker) as consumer:
        assert bodies(await take(consumer, 2)) == [b"b", b"c"]


async def test_iterating_ends_when_the_consumer_is_closed(broker: FakeBroker) -> None:
    await broker.store("demo", b"a", b"b")
    seen = []
    async with make_consumer(broker) as consumer:
        async for message in consumer:
            seen.append(message.body)
            await message.ack()
            if len(seen) == 2:
                await consumer.close()
    assert seen == [b"a", b"b"]
    with pytest.raises(ClosedError):
        await consumer.receive()


async def test_a_cancelled_receive_loses_no_message(broker: FakeBroker) -> None:
    broker.topics["demo"] = 4
    async with make_consumer(broker) as consumer:
        waiting = asyncio.create_task(consumer.receive())
        await broker.until(lambda: len(pulls(broker)) == 2)
        waiting.cancel()
        await broker.store("demo", b"a")
        assert bodies(await take(consumer, 1)) == [b"a"]


async def test_a_message_knows_what_became_of_it(broker: FakeBroker) -> None:
    await broker.store("demo", b"a", text=f"DELAY\x011\x02DUE_MS\x01{NOW_MS + 900}")
    async with make_consumer(broker) as consumer:
        (message,) = await take(consumer, 1)
        assert (message.lateness_ms, message.settled, message.lost) == (100, False, False)
        await message.ack()
        await message.ack()
        await message.retry()
        assert message.settled
    assert not broker.requests_of(BACK)


async def test_a_changed_subscription_is_newer_though_the_clock_was_set_back(broker: FakeBroker) -> None:
    times = iter([NOW_MS, NOW_MS - 3_600_000])
    now = NOW_MS

    def clock() -> int:
        nonlocal now
        now = next(times, now)
        return now

    consumer = make_consumer(broker, tags="a", _clock=clock)
    (first,) = (each for each in consumer._member._subscriptions.values() if each.topic == "demo")
    consumer.subscribe("demo", "b")
    second = consumer._member._subscriptions["demo"]
    assert (second.text, second.version > first.version) == ("b", True)


# --- handlers -----------------------------------------------------------------------------------------------------


async def test_a_handler_gets_messages_and_its_return_commits(broker: FakeBroker) -> None:
    await broker.store("demo", *(b"%d" % number for number in range(100)))
    seen = set()

    async def on_message(message: ReceivedMessage) -> None:
        await asyncio.sleep(0)
        seen.add(message.body)

    async with make_consumer(broker, on_message, concurrency=7) as consumer:
        await consumer.caught_up()
        with pytest.raises(ClosedError, match="handler"):
            await consumer.receive()
    assert len(seen) == 100
    assert broker.offsets["g", "demo", 0] == 100


async def test_a_handler_that_raises_has_the_message_sent_back(broker: FakeBroker) -> None:
    await broker.store("demo", b"a", b"b", text="UNIQ_KEY\x01ID")

    async def on_message(message: ReceivedMessage) -> None:
        if message.body == b"a":
            raise ValueError("no")

    async with make_consumer(broker, on_message, max_reconsume_times=3) as consumer:
        await consumer.caught_up()
    (back,) = broker.requests_of(BACK)
    assert back.ext == {
        "offset": "0",
        "group": "g",
        "delayLevel": "0",
        "originMsgId": "ID",
        "originTopic": "demo",
        "unitMode": "false",
        "maxReconsumeTimes": "3",
    }
    assert broker.offsets["g", "demo", 0] == 2


async def test_a_retry_comes_through_the_groups_own_topic(broker: FakeBroker) -> None:
    broker.topics |= {"demo": 1, "%RETRY%g": 1}
    await broker.store("%RETRY%g", b"again", text="RETRY_TOPIC\x01demo\x02TAGS\x01a", reconsume_times=1)
    async with make_consumer(broker, tags="a") as consumer:
        (message,) = await take(consumer, 1)
        assert (message.topic, message.queue.topic, message.reconsume_times) == ("demo", "%RETRY%g", 1)
        await message.ack()
    assert broker.offsets["g", "%RETRY%g", 0] == 1


async def test_what_cannot_be_sent_back_is_handled_again_here(broker: FakeBroker) -> None:
    await broker.store("demo", b"a")
    broker.on(BACK, failure(ResponseCode.SYSTEM_ERROR), success())
    tries = []

    async def on_message(message: ReceivedMessage) -> None:
        tries.append(message.body)
        raise ValueError("no")

    async with make_consumer(broker, on_message) as consumer:
        await consumer.caught_up()
    assert len(tries) == 2
    assert broker.offsets["g", "demo", 0] == 1


@pytest.mark.parametrize("call", ["retry", "dead_letter", "delay"])
async def test_a_call_that_is_cancelled_while_it_sends_a_message_back_loses_no_message(
    broker: FakeBroker, call: str
) -> None:
    await broker.store("demo", b"a")
    asked = asyncio.Event()

    async def never(_: Any) -> None:
        asked.set()
        await asyncio.Event().wait()

    code = RequestCode.GET_BROKER_CONFIG if call == "delay" else BACK
    broker.on(code, never, broker.get_config if call == "delay" else success())
    calls = {
        "retry": lambda message: message.retry(1),
        "dead_letter": lambda message: message.dead_letter(),
        "delay": lambda message: message.retry(delay=1),
    }
    async with make_consumer(broker) as consumer:
        (first,) = await take(consumer, 1)
        sending = asyncio.ensure_future(calls[call](first))
        await asked.wait()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        (again,) = await take(consumer, 1)
        assert (again.body, again.settled) == (b"a", False)
        await again.ack()
        await consumer.caught_up()
    assert broker.offsets["g", "demo", 0] == 1


async def test_a_caller_chooses_when_a_retry_comes(broker: FakeBroker) -> None:
    await broker.store("demo", b"a", b"b")
    async with make_consumer(broker) as consumer:
        first, second = await take(consumer, 2)
        await first.retry(5)
        await second.retry(-1)
    assert [back.ext["delayLevel"] for back in broker.requests_of(BACK)] == ["5", "-1"]


async def test_a_handler_whose_own_wait_was_cancelled_has_failed_and_the_worker_goes_on(broker: FakeBroker) -> None:
    await broker.store("demo", b"a", b"b")
    seen = []

    async def on_message(message: ReceivedMessage) -> None:
        seen.append(message.body)
        if message.body == b"a":
            raise asyncio.CancelledError

    async with make_consumer(broker, on_message, concurrency=1) as consumer:
        await consumer.caught_up()
    assert seen == [b"a", b"b"]
    assert len(broker.requests_of(BACK)) == 1


async def test_closing_waits_for_handlers_and_commits_what_they_did(broker: FakeBroker) -> None:
    await broker.store("demo", *(b"%d" % number for number in range(10)))
    started, go_on = asyncio.Event(), asyncio.Event()

    async def on_message(_: ReceivedMessage) -> None:
        started.set()
        await go_on.wait()

    consumer = make_consumer(broker, on_message, concurrency=2)
    await consumer.start()
    await started.wait()
    closing = asyncio.create_task(consumer.close())
    await asyncio.sleep(0)
    go_on.set()
    await closing
    await consumer.close()
    assert broker.offsets["g", "demo", 0] == 2  # the other eight had not begun


async def test_closing_gives_up_on_handlers_that_do_not_end(broker: FakeBroker) -> None:
    await broker.store("demo", b"a")
    started = asyncio.Event()

    async def on_message(_: ReceivedMessage) -> None:
        started.set()
        await asyncio.Event().wait()

    async with make_consumer(broker, on_message, close_timeout=0.01):
        await started.wait()
    assert broker.offsets["g", "demo", 0] == 0


async def test_a_handler_may_close_its_consumer(broker: FakeBroker) -> None:
    await broker.store("demo", b"a")

    async def on_message(_: ReceivedMessage) -> None:
        await consumer.close()

    consumer = make_consumer(broker, on_message)
    async with asyncio.timeout(10), consumer:
        await consumer.wait_closed()


# --- the group ----------------------------------------------------------------------------------------------------


async def test_a_member_introduces_itself_before_anything_else(broker: FakeBroker) -> None:
    broker.topics["demo"] = 1
    async with make_consumer(broker, tags="b||a", from_="last"):
        await broker.until_requests(PULL)
    (data,) = fastjson.loads(broker.requests_of(RequestCode.HEART_BEAT)[0].body)["consumerDataSet"]
    assert (data["groupName"], data["consumeType"], data["messageModel"]) == ("g", "CONSUME_PASSIVELY", "CLUSTERING")
    assert data["consumeFromWhere"] == "CONSUME_FROM_LAST_OFFSET"
    subscriptions = {each["topic"]: (each["subString"], each["codeSet"]) for each in data["subscriptionDataSet"]}
    assert subscriptions == {"demo": ("a || b", [97, 98]), "%RETRY%g": ("*", [])}


async def test_queues_are_shared_and_taken_over_when_a_member_leaves(broker: FakeBroker) -> None:
    broker.topics["demo"] = 4
    broker.members.append(LAST_MEMBER)
    async with make_consumer(broker) as consumer:
        await broker.until(lambda: len(broker.requests_of(PULL)) >= 4)
        assert {queue.queue_id for queue in consumer.assignment} == {0, 1}
        broker.members.pop(0)
        broker.notify(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": "g"})
        await broker.until(lambda: bool(pulls(broker, 3)))
        assert {queue.queue_id for queue in consumer.assignment} == {0, 1, 2, 3}


async def test_a_queue_that_goes_to_another_member_is_committed_and_its_messages_are_lost(broker: FakeBroker) -> None:
    broker.topics["demo"] = 2
    await broker.store("demo", b"a", b"b", b"c", queue_id=1)
    async with make_consumer(broker, _intervals=WITHOUT_COMMITS) as consumer:
        first, second = await take(consumer, 2)
        await first.ack()
        broker.members.append(LAST_MEMBER)
        broker.notify(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": "g"})
        await broker.until(lambda: broker.offsets.get(("g", "demo", 1)) == 1)
        assert {queue.queue_id for queue in consumer.assignment} == {0}
        assert second.lost
        broker.offsets["g", "demo", 1] = 3  # commits of the new owner
        await second.ack()
        await second.retry()
        await broker.store("demo", b"d", queue_id=0)
        assert bodies(await take(consumer, 1)) == [b"d"]  # and not c, read before, which the other member has now
    assert broker.offsets["g", "demo", 1] == 3
    assert not broker.requests_of(BACK)


# --- a process that stopped for a while


class StoppedClock:
    """A monotonic clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def stop_process(self) -> None:
        """Stop for so long that brokers forget a member: 120 s without a heartbeat, as RocketMQ's do."""
        self.now += 121


def commits(broker: FakeBroker, since: int) -> list[int]:
    """The offsets committed for queue 0 since a request number."""
    stored = [request for request in broker.requests[since:] if request.code == COMMIT]
    return [int(each.ext["commitOffset"]) for each in stored if each.ext["queueId"] == "0"]


async def finish_one_of_two(broker: FakeBroker, consumer: Consumer) -> ReceivedMessage:
    """Receive the two messages of queue 0, and acknowledge the first, whose offset is committed then; return the
    other."""
    first, second = await take(consumer, 2)
    await first.ack()
    await broker.until(lambda: broker.offsets.get(("g", "demo", 0)) == 1)
    return second


async def test_a_member_that_stopped_for_long_goes_on_where_the_group_is(broker: FakeBroker) -> None:
    """A member that stopped for long goes on at the group's offset: others had its queues meanwhile, and it neither
    handles their messages again nor commits an older offset."""
    broker.topics["demo"] = 1
    await broker.store("demo", b"0", b"1")
    clock = StoppedClock()
    async with make_consumer(broker, _monotonic=clock) as consumer:
        lost = await finish_one_of_two(broker, consumer)
        await broker.until(lambda: len(pulls(broker)) >= 2)
        clock.stop_process()
        since = len(broker.requests)
        broker.offsets["g", "demo", 0] = 4
        await broker.store("demo", b"2", b"3", b"4")
        (news,) = await take(consumer, 1)
        assert (news.body, news.queue_offset, lost.lost) == (b"4", 4, True)
        await lost.ack()
        await news.ack()
        await broker.until(lambda: broker.offsets["g", "demo", 0] == 5)
        assert min(commits(broker, since)) == 5


@pytest.mark.parametrize("moves", [False, True], ids=["stored", "given away"])
async def test_an_offset_of_before_a_stop_is_not_stored_over_a_newer_one(broker: FakeBroker, moves: bool) -> None:
    """An offset from before a stop is not committed over a newer one, also without an answered pull: neither when an
    earlier message is acknowledged, nor when the queue goes to another member."""
    broker.topics["demo"] = 1
    await broker.store("demo", b"0", b"1")
    clock = StoppedClock()
    # No commit is on its way when the process stops.
    intervals = WITHOUT_COMMITS if moves else replace(INTERVALS, commit_all_every=10**9)
    async with make_consumer(broker, _monotonic=clock, _intervals=intervals) as consumer:
        first, _ = await take(consumer, 2)
        await broker.until(lambda: len(pulls(broker)) >= 2)
        if not moves:
            await broker.until(lambda: broker.offsets.get(("g", "demo", 0)) == 0)  # where it began, committed once
        clock.stop_process()
        since = len(broker.requests)
        broker.offsets["g", "demo", 0] = 2
        await first.ack()
        if moves:
            broker.members.insert(0, "0")
            broker.notify(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": "g"})
        await broker.until(lambda: any(each.code == LOAD for each in broker.requests[since:]))
        if moves:
            async with asyncio.timeout(10):
                while consumer.assignment:
                    await asyncio.sleep(0)
        else:
            await broker.until(lambda: len(pulls(broker)) >= 3)
            assert pulls(broker)[2].ext["queueOffset"] == "2"
    assert all(offset >= 2 for offset in commits(broker, since))
    assert broker.offsets["g", "demo", 0] == 2


async def test_a_member_that_stopped_for_long_goes_on_as_before_where_nobody_else_did(broker: FakeBroker) -> None:
    """A member that stopped for long goes on as before if no other member took over: it keeps the messages it had read,
    and reads none twice."""
    broker.topics["demo"] = 1
    await broker.store("demo", b"0", b"1")
    clock = StoppedClock()
    async with make_consumer(broker, _monotonic=clock) as consumer:
        second = await finish_one_of_two(broker, consumer)
        await broker.until(lambda: len(pulls(broker)) >= 2)
        clock.stop_process()
        await second.ack()
        await broker.until(lambda: broker.offsets["g", "demo", 0] == 2)
        clock.stop_process()
        await broker.store("demo", b"2")
        (third,) = await take(consumer, 1)
        assert (third.body, second.lost) == (b"2", False)
        await third.ack()
    assert broker.offsets["g", "demo", 0] == 3
    assert [request.ext["queueOffset"] for request in pulls(broker)][:3] == ["0", "2", "3"]


async def test_while_the_groups_offset_cannot_be_asked_for_none_is_stored(broker: FakeBroker) -> None:
    broker.topics["demo"] = 1
    await broker.store("demo", b"0", b"1")
    clock = StoppedClock()
    async with make_consumer(broker, _monotonic=clock) as consumer:
        second = await finish_one_of_two(broker, consumer)
        clock.stop_process()
        since = len(broker.requests)
        broker.on(LOAD, failure(ResponseCode.SYSTEM_ERROR, "not now"))
        await second.ack()
        await broker.until(lambda: sum(each.code == LOAD for each in broker.requests[since:]) >= 3)
        assert commits(broker, since) == []
        del broker.overrides[LOAD]
        await broker.until(lambda: broker.offsets["g", "demo", 0] == 2)


def tell_to_reset(broker: FakeBroker, ext: dict[str, str], body: bytes) -> None:
    """Send the notice to the member once, over the connection of its heartbeats."""
    code = RequestCode.RESET_CONSUMER_CLIENT_OFFSET
    command = Command(code=code, opaque=9, ext=ext, flag=FLAG_ONEWAY, language="JAVA", body=body)
    broker.requests_of(RequestCode.HEART_BEAT)[-1].connection.send(command, JSON)


def reset(broker: FakeBroker, group: str, **offsets: int) -> None:
    """Reset a group as an administrator does: offsets by "q<queue id>"."""
    table = {Queue("broker-a", int(name[1:]), "demo"): offset for name, offset in offsets.items()}
    tell_to_reset(broker, ResetOffset("demo", group, 0).to_ext(), reset_offset_body(table))


async def test_an_administrator_sends_the_group_to_other_offsets(broker: FakeBroker) -> None:
    await broker.store("demo", b"a", b"b", b"c", queue_id=1)
    async with make_consumer(broker, _intervals=WITHOUT_COMMITS) as consumer:
        first, second, third = await take(consumer, 3)
        await first.ack()
        await second.ack()
        reset(broker, "other", q1=0)
        reset(broker, "g", q1=1, q9=5)
        again = await take(consumer, 2)
        assert [message.body for message in again] == [b"b", b"c"]
        assert broker.offsets["g", "demo", 1] == 1
        assert ("g", "demo", 9) not in broker.offsets
        assert third.lost
        await third.ack()  # this offset says nothing about the message delivered again
        await again[0].ack()
    assert broker.offsets["g", "demo", 1] == 2


async def test_a_reset_that_cannot_be_read_changes_nothing(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    await broker.store("demo", b"a")
    async with make_consumer(broker) as consumer:
        await (await take(consumer, 1))[0].ack()
        ext = ResetOffset("demo", "g", 0).to_ext()
        for body in (b"", b'{"offsetTable":[]}', b'{"offsetTable":{"x":1}}', b'{"offsetTable":{{"queueId":1}:2}}'):
            tell_to_reset(broker, ext, body)
        tell_to_reset(broker, {}, reset_offset_body({}))
        await broker.store("demo", b"b")
        assert bodies(await take(consumer, 1)) == [b"b"]
    assert caplog.text.count("cannot read a broker's request to reset offsets") == 5


async def test_while_the_group_cannot_be_asked_the_queues_stay(broker: FakeBroker) -> None:
    await broker.store("demo", b"a")
    async with make_consumer(broker) as consumer:
        await take(consumer, 1)
        broker.on(MEMBERS, failure(ResponseCode.SYSTEM_ERROR, "no consumer for this group"))
        asked = len(broker.requests_of(MEMBERS))
        broker.notify(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": "g"})
        await broker.until_requests(MEMBERS, asked + 2)
        assert len(consumer.assignment) == 4


async def test_a_member_that_leaves_says_so_after_its_commits(broker: FakeBroker) -> None:
    await broker.store("demo", b"a")
    async with make_consumer(broker, _intervals=WITHOUT_COMMITS) as consumer:
        await (await take(consumer, 1))[0].ack()
        assert not broker.requests_of(COMMIT)
    codes = [request.code for request in broker.requests if request.code in (COMMIT, RequestCode.UNREGISTER_CLIENT)]
    assert codes == [COMMIT] * 4 + [RequestCode.UNREGISTER_CLIENT]
    assert broker.requests[-1].ext["consumerGroup"] == "g"
    assert not broker.members


async def test_two_brokers_are_both_told_and_read(broker: FakeBroker) -> None:
    async with FakeBroker("broker-b") as other:
        broker.brokers = [broker, other]
        broker.topics["demo"] = 1
        other.members = broker.members
        await broker.store("demo", b"a")
        await other.store("demo", b"b")
        async with make_consumer(broker) as consumer:
            messages = await take(consumer, 2)
            assert {message.queue.broker: message.body for message in messages} == {"broker-a": b"a", "broker-b": b"b"}
        assert other.requests_of(RequestCode.HEART_BEAT)
        assert other.requests_of(RequestCode.UNREGISTER_CLIENT)


async def test_a_topic_that_does_not_exist_yet_is_waited_for_and_read_from_its_beginning(broker: FakeBroker) -> None:
    async with make_consumer(broker, from_="last") as consumer:
        await broker.until_requests(RequestCode.GET_ROUTEINFO_BY_TOPIC, 3)
        await broker.store("demo", b"the first of all")
        assert bodies(await take(consumer, 1)) == [b"the first of all"]


async def test_a_topic_that_is_subscribed_before_it_exists_is_read_from_its_beginning(broker: FakeBroker) -> None:
    async with make_consumer(broker, from_="last") as consumer:
        consumer.subscribe("later")
        await broker.until(
            lambda: any(each.ext["topic"] == "later" for each in broker.requests_of(RequestCode.GET_ROUTEINFO_BY_TOPIC))
        )
        await broker.store("later", b"the first of all")
        assert bodies(await take(consumer, 1)) == [b"the first of all"]


async def test_a_subscription_can_be_added_and_changed_later(broker: FakeBroker) -> None:
    await broker.store("demo", b"a", text=TAGS_A)
    await broker.store("other", b"b", text=TAGS_B)
    async with make_consumer(broker, tags="a") as consumer:
        await (await take(consumer, 1))[0].ack()
        consumer.subscribe("other", "b")
        assert bodies(await take(consumer, 1)) == [b"b"]
        beats = [fastjson.loads(beat.body) for beat in broker.requests_of(RequestCode.HEART_BEAT)]
        assert len(beats[-1]["consumerDataSet"][0]["subscriptionDataSet"]) == 3


# --- reading ------------------------------------------------------------------------------------------------------


async def test_the_first_pull_returns_at_once_and_the_next_are_held(broker: FakeBroker) -> None:
    broker.topics["demo"] = 1
    async with make_consumer(broker):
        await broker.until(lambda: len(pulls(broker)) == 2)
    first, second = (request.ext for request in pulls(broker))
    assert (first["sysFlag"], second["sysFlag"]) == ("4", "6")
    assert (second["suspendTimeoutMillis"], second["maxMsgNums"], second["subscription"]) == ("60000", "32", "*")


async def test_tags_are_compared_again_here_and_passed_over_messages_are_committed(broker: FakeBroker) -> None:
    await broker.store("demo", b"1", text=TAGS_A)
    await broker.store("demo", b"2", text=TAGS_B)
    await broker.store("demo", b"3")
    async with make_consumer(broker, tags="a") as consumer:
        await (await take(consumer, 1))[0].ack()
        await consumer.caught_up()
    assert broker.offsets["g", "demo", 0] == 3


@pytest.mark.parametrize(
    ("from_", "code", "offset"),
    [("first", RequestCode.GET_MIN_OFFSET, 3), ("last", RequestCode.GET_MAX_OFFSET, 7),
     (1_700_000_000, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, 5)],
)  # fmt: skip
async def test_a_new_group_begins_where_it_is_told(
    broker: FakeBroker, from_: Any, code: RequestCode, offset: int
) -> None:
    await broker.store("demo", *(b"%d" % number for number in range(10)))
    broker.on(code, success(OffsetResponse(offset=offset)))
    async with make_consumer(broker, from_=from_) as consumer:
        assert (await take(consumer, 1))[0].queue_offset == offset
    if isinstance(from_, int):
        assert broker.requests_of(code)[0].ext["timestamp"] == "1700000000000"


async def test_what_is_sent_once_the_start_is_over_is_read(broker: FakeBroker) -> None:
    await broker.store("demo", b"before")
    async with make_consumer(broker, from_="last") as consumer:
        await broker.store("demo", b"after")
        assert bodies(await take(consumer, 1)) == [b"after"]


async def test_a_broker_that_cannot_say_where_to_begin_is_asked_again(broker: FakeBroker) -> None:
    await broker.store("demo", b"before")
    broker.on(RequestCode.GET_MAX_OFFSET, failure(ResponseCode.SYSTEM_ERROR), success(OffsetResponse(offset=1)))
    async with make_consumer(broker, from_="last") as consumer:
        await consumer.caught_up()
        await broker.store("demo", b"after")
        assert bodies(await take(consumer, 1)) == [b"after"]


async def test_a_new_group_asks_whether_it_has_offsets_and_not_for_zero(broker: FakeBroker) -> None:
    await broker.store("demo", b"a")
    async with make_consumer(broker, from_="last") as consumer:
        await consumer.caught_up()
    assert broker.requests_of(RequestCode.QUERY_CONSUMER_OFFSET)[0].ext["setZeroIfNotFound"] == "false"
    assert broker.offsets["g", "demo", 0] == 1


@pytest.mark.parametrize("from_", ["last", 4_000_000_000])
async def test_a_queue_that_is_newer_than_the_group_is_read_from_its_beginning(broker: FakeBroker, from_: Any) -> None:
    broker.topics["demo"] = 2
    broker.offsets["g", "demo", 0] = 0
    await broker.store("demo", b"added while the group was away", queue_id=1)
    async with make_consumer(broker, from_=from_) as consumer:
        assert bodies(await take(consumer, 1)) == [b"added while the group was away"]
        broker.topics["demo"] = 3
        await broker.store("demo", b"added now", queue_id=2)
        await consumer._member._client.routes.refresh()
        broker.notify(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": "g"})
        assert bodies(await take(consumer, 1)) == [b"added now"]


async def test_a_known_group_goes_on_where_it_was(broker: FakeBroker) -> None:
    await broker.store("demo", b"a", b"b", b"c")
    broker.offsets["g", "demo", 0] = 2
    async with make_consumer(broker, from_="first") as consumer:
        assert (await take(consumer, 1))[0].body == b"c"


async def test_minus_one_of_a_queue_without_a_file_is_its_beginning(broker: FakeBroker) -> None:
    broker.topics["demo"] = 1
    broker.on(RequestCode.GET_MIN_OFFSET, success(OffsetResponse(offset=-1)))
    async with make_consumer(broker):
        await broker.until_requests(PULL)
    assert pulls(broker)[0].ext["queueOffset"] == "0"


async def test_an_offset_that_is_gone_is_corrected_and_committed(broker: FakeBroker) -> None:
    await broker.store("demo", b"a", b"b")
    broker.offsets["g", "demo", 0] = 50
    async with make_consumer(broker) as consumer:
        await broker.until(lambda: broker.offsets["g", "demo", 0] == 2)
        await broker.store("demo", b"c")
        assert bodies(await take(consumer, 1)) == [b"c"]


async def test_pulls_that_fail_are_tried_again(broker: FakeBroker) -> None:
    await broker.store("demo", b"a")
    broker.on(PULL, failure(ResponseCode.SYSTEM_ERROR), failure(26, "no group"), success(), broker.pull)
    async with make_consumer(broker) as consumer:
        assert bodies(await take(consumer, 1)) == [b"a"]


async def test_a_broker_that_comes_back_is_read_on(broker: FakeBroker) -> None:
    await broker.store("demo", b"a")
    async with make_consumer(broker) as consumer:
        await (await take(consumer, 1))[0].ack()
        broker.cut()
        await broker.store("demo", b"b")
        assert bodies(await take(consumer, 1)) == [b"b"]


async def test_a_broken_record_is_passed_over_and_those_around_it_are_not(broker: FakeBroker) -> None:
    await broker.store("demo", b"a", b"broken", b"c")
    queue = broker.queues["demo", 0]

    async def break_one(request: Request) -> Command | None:
        begin = int(request.ext["queueOffset"])
        if request.ext["queueId"] != "0" or begin >= 3:
            return await broker.pull(request)
        answer = pulled(ResponseCode.SUCCESS, 3, 3, queue[begin:])
        answer.body = bytes(answer.body).replace(b"broken", b"BROKEN")
        return answer

    broker.on(PULL, break_one)
    async with make_consumer(broker) as consumer:
        messages = await take(consumer, 2)
        assert [message.body for message in messages] == [b"a", b"c"]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda queue: pulled(ResponseCode.SUCCESS, 3, 3, queue),
        lambda queue: pulled(ResponseCode.SUCCESS, 3, 3),
        lambda _: pulled(ResponseCode.PULL_NOT_FOUND, 0, 3),
        lambda _: pulled(ResponseCode.PULL_RETRY_IMMEDIATELY, 0, 3),
        lambda _: pulled(ResponseCode.PULL_OFFSET_MOVED, -1, 3),
    ],
    ids=["others", "none", "before", "before, filtered", "negative"],
)
async def test_an_answer_that_cannot_be_right_passes_over_no_message(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture, wrong: Callable[[Any], Command]
) -> None:
    """Of three messages, the group has consumed the first."""
    await broker.store("demo", b"a", b"b", b"c")
    broker.offsets["g", "demo", 0] = 1
    answers = iter([wrong(broker.queues["demo", 0])])

    async def answer(request: Request) -> Command | None:
        if request.ext["queueId"] == "0" and (first := next(answers, None)) is not None:
            return first
        return await broker.pull(request)

    broker.on(PULL, answer)
    async with make_consumer(broker) as consumer:
        assert bodies(await take(consumer, 2)) == [b"b", b"c"]
    assert "a pull of demo@broker-a:0 from offset 1" in caplog.text


async def test_a_replica_is_read_where_the_broker_suggests_it(broker: FakeBroker) -> None:
    async with FakeBroker() as replica:
        replica.queues = broker.queues
        await broker.store("demo", b"a")

        def route(request: Request) -> Command | None:
            answer = broker.route(request)
            assert answer is not None
            both = f'0:"{broker.address}",1:"{replica.address}"'.encode()
            answer.body = bytes(answer.body).replace(f'0:"{broker.address}"'.encode(), both)
            return answer

        broker.on(RequestCode.GET_ROUTEINFO_BY_TOPIC, route)
        broker.on(PULL, lambda request: pulled(ResponseCode.PULL_RETRY_IMMEDIATELY, 0, 0, broker_id=1))
        async with make_consumer(broker) as consumer:
            await (await take(consumer, 1))[0].ack()
        assert broker.offsets["g", "demo", 0] == 1
        assert replica.requests_of(RequestCode.HEART_BEAT)
        assert not replica.requests_of(COMMIT)


async def test_reading_waits_while_too_much_is_unfinished(broker: FakeBroker) -> None:
    broker.topics["demo"] = 1
    await broker.store("demo", *(b"%d" % number for number in range(100)))
    async with make_consumer(broker, max_cached_messages=40) as consumer:
        messages = await take(consumer, 64)
        assert len(pulls(broker)) == 2  # 32 each; then there is no room
        for message in messages[:25]:
            await message.ack()
        await broker.until(lambda: len(pulls(broker)) == 3)


async def test_reading_waits_for_a_message_that_hinders_commits_of_those_behind_it(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """Reading waits for a message that holds up the commits of later ones: one handler that hangs must not make the
    consumer keep everything after its message, and a crash redeliver all of it."""
    let_go = asyncio.Event()
    handled: list[bytes] = []

    async def on_message(message: ReceivedMessage) -> None:
        if message.body == b"slow":
            await let_go.wait()
        handled.append(message.body)

    await broker.store("demo", b"slow", *(b"%d" % number for number in range(500)))
    await broker.store("demo", b"other", queue_id=1)
    async with make_consumer(broker, on_message, max_ahead=100) as consumer:
        await broker.until(lambda: "is unfinished" in caplog.text)
        count = len(pulls(broker))
        await broker.store("demo", b"more", queue_id=1)
        await broker.until(lambda: b"more" in handled)
        assert len(pulls(broker)) == count
        assert 100 < len(handled) < 100 + 2 * 32 + 2
        let_go.set()
        await broker.until(lambda: len(handled) == 503)
        await consumer.caught_up()
    assert broker.offsets["g", "demo", 0] == 501
    lines = [record.getMessage() for record in caplog.records if "is unfinished" in record.getMessage()]
    assert len(lines) == 1
    assert "the message at offset 0" in lines[0]


async def test_commits_that_fail_are_made_again(broker: FakeBroker) -> None:
    await broker.store("demo", b"a")
    broker.on(COMMIT, failure(ResponseCode.SYSTEM_ERROR), failure(ResponseCode.SYSTEM_ERROR), broker.update_offset)
    async with make_consumer(broker) as consumer:
        await (await take(consumer, 1))[0].ack()
        await broker.until(lambda: broker.offsets.get(("g", "demo", 0)) == 1)


# --- broadcasting -------------------------------------------------------------------------------------------------


async def test_each_broadcasting_member_gets_everything(broker: FakeBroker, tmp_path: Path) -> None:
    await broker.store("demo", b"a", queue_id=0)
    await broker.store("demo", b"b", queue_id=3)
    broker.members += ["somebody", "else"]
    options: dict[str, Any] = {"model": "broadcasting", "offset_file": tmp_path / "offsets"}
    async with make_consumer(broker, **options) as consumer:
        first, second = await take(consumer, 2)
        await first.ack()
        await second.retry()  # dropped: there are no retries
        await consumer.caught_up()
        (data,) = fastjson.loads(broker.requests_of(RequestCode.HEART_BEAT)[0].body)["consumerDataSet"]
        assert data["messageModel"] == "BROADCASTING"
        assert [each["topic"] for each in data["subscriptionDataSet"]] == ["demo"]
    await broker.store("demo", b"c", queue_id=0)
    async with make_consumer(broker, **options) as consumer:
        assert bodies(await take(consumer, 1)) == [b"c"]
    for code in (COMMIT, BACK, MEMBERS, RequestCode.QUERY_CONSUMER_OFFSET):
        assert not broker.requests_of(code)


# --- options and life ---------------------------------------------------------------------------------------------


async def async_handler(_: ReceivedMessage) -> None:
    pass


class Handler:
    async def __call__(self, _: ReceivedMessage) -> None:
        pass


def says_it_is_async(message: ReceivedMessage) -> Awaitable[None]:
    return async_handler(message)


def sync_handler(_: ReceivedMessage) -> None:
    pass


@pytest.mark.parametrize(
    "handler",
    [None, async_handler, Handler(), says_it_is_async, lambda each: async_handler(each), AsyncMock()],  # noqa: PLW0108
)
async def test_a_handler_returns_what_can_be_awaited(broker: FakeBroker, handler: Callable[..., Any] | None) -> None:
    await broker.store("demo", b"a")
    async with make_consumer(broker, handler) as consumer:
        if handler is None:
            await (await consumer.receive()).ack()
        await consumer.caught_up()
    assert not broker.requests_of(BACK)


@pytest.mark.parametrize("handler", [lambda message: None, functools.partial(sync_handler)])
async def test_a_handler_that_returns_nothing_to_await_has_failed(
    broker: FakeBroker, handler: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    await broker.store("demo", b"a")
    async with make_consumer(broker, handler) as consumer:
        await consumer.caught_up()
    assert len(broker.requests_of(BACK)) == 1
    assert "returned None, which is not awaitable" in caplog.text


@pytest.mark.parametrize(
    "options",
    [
        {"group": "a b"},
        {"on_message": sync_handler},
        {"on_message": print},
        {"on_message": "handler"},
        {"model": "both"},
        {"concurrency": 0},
        {"concurrency": 1001},
        {"offset_file": "x"},
        {"group": "g" * 121},
        {"concurrency": 1.5},
        {"max_ahead": 0},
        {"max_ahead": float("nan")},
        {"max_cached_messages": 0},
        {"max_cached_bytes": -1},
        {"max_reconsume_times": -1},
        {"max_reconsume_times": 2**31},
        {"max_reconsume_times": True},
        {"max_reconsume_times": 1.5},
        {"close_timeout": -1},
        {"close_timeout": float("nan")},
        {"from_": "middle"},
        {"from_": -1},
        {"codec": "xml"},
        {"nameserver": ""},
    ],
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        Consumer(**{"group": "g", **options})


async def test_a_consumer_is_started_once_and_before_its_use(broker: FakeBroker) -> None:
    consumer = make_consumer(broker)
    with pytest.raises(ClosedError, match="start the consumer first"):
        await consumer.receive()
    async with consumer:
        with pytest.raises(ClosedError, match="only once"):
            await consumer.start()
    with pytest.raises(ClosedError):
        await consumer.caught_up()


async def test_without_a_name_server_the_start_fails() -> None:
    async with FakeBroker() as gone:
        pass
    with pytest.raises(ConnectError):
        await make_consumer(gone).start()


async def test_a_consumer_that_was_never_started_closes(broker: FakeBroker) -> None:
    await make_consumer(broker).close()
    assert not broker.requests


async def test_after_a_failure_the_first_pull_is_not_held(broker: FakeBroker, caplog: pytest.LogCaptureFixture) -> None:
    broker.topics["demo"] = 1
    async with make_consumer(broker):
        await broker.until(lambda: len(pulls(broker)) == 2)
        broker.cut()
        await broker.until(lambda: len(pulls(broker)) == 4)
    assert [request.ext["sysFlag"] for request in pulls(broker)] == ["4", "6", "4", "6"]
    assert caplog.messages[-1] == "reading demo@broker-a:0: resolved"


async def test_many_messages_are_received_at_once_and_committed_on_demand(broker: FakeBroker) -> None:
    await broker.store("demo", *(b"%d" % number for number in range(5)))
    consumer = make_consumer(broker, _intervals=replace(INTERVALS, commit=60.0))
    async with consumer:
        first = await consumer.receive_many(1)
        await broker.until(lambda: len(pulls(broker)) >= 2)
        rest = await consumer.receive_many(100)
        assert bodies([*first, *rest]) == [b"0", b"1", b"2", b"3", b"4"]
        queue = first[0].queue
        assert (await consumer.commit()).get(queue, 0) == 0
        for message in [*first, *rest[:2]]:
            await message.ack()
        assert (await consumer.commit())[queue] == 3
        assert broker.offsets["g", "demo", 0] == 3


def test_rocketmqs_name_for_it_is_known() -> None:
    assert duemq.PushConsumer is Consumer
    assert sync.PushConsumer is sync.Consumer
