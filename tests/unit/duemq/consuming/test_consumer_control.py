"""What a caller may do with a running consumer: seek, pause, resume; and what it is told of its queues."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace

from duemq import ArgumentError, ClosedError, Consumer, MessageQueue, NoRouteError, ReceivedMessage
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.requests.headers import OffsetResponse
from tests.unit.duemq.consuming.test_consumer import (
    COMMIT,
    LAST_MEMBER,
    LOAD,
    PULL,
    WITHOUT_COMMITS,
    bodies,
    commits,
    make_consumer,
    pulls,
    take,
)
from tests.unit.duemq.fake import FakeBroker, failure, success

Q0, Q1 = MessageQueue("demo", "broker-a", 0), MessageQueue("demo", "broker-a", 1)


def share_with_another(broker: FakeBroker) -> None:
    broker.members.append(LAST_MEMBER)
    broker.notify(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": "g"})


def share_no_longer(broker: FakeBroker) -> None:
    broker.members.remove(LAST_MEMBER)
    broker.notify(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": "g"})


# --- seek ---------------------------------------------------------------------------------------------------------


async def test_a_consumer_goes_back_and_forward(broker: FakeBroker) -> None:
    broker.topics["demo"] = 1
    await broker.store("demo", *(b"%d" % number for number in range(10)))
    async with make_consumer(broker, _intervals=WITHOUT_COMMITS) as consumer:
        before = await take(consumer, 10)
        for message in before[:9]:
            await message.ack()
        await consumer.seek(Q0, offset=7)
        assert broker.offsets["g", "demo", 0] == 7, "it is stored at once"
        assert before[9].lost
        await before[9].ack()
        assert bodies(await take(consumer, 3)) == [b"7", b"8", b"9"]
        await consumer.seek("demo", "first")
        assert len(await take(consumer, 10)) == 10
        await consumer.seek("demo", "last")
        await broker.store("demo", b"new")
        (news,) = await take(consumer, 1)
        assert news.body == b"new"
        await news.ack()
    assert broker.offsets["g", "demo", 0] == 11


async def test_a_seek_by_time_asks_the_broker(broker: FakeBroker) -> None:
    broker.topics["demo"] = 2
    await broker.store("demo", *(b"%d" % number for number in range(5)))
    broker.on(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, success(OffsetResponse(offset=3)))
    async with make_consumer(broker) as consumer:
        await take(consumer, 5)
        await consumer.seek("demo", time=datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC))
        assert bodies(await take(consumer, 2)) == [b"3", b"4"]
    asked = broker.requests_of(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP)
    assert sorted((each.ext["queueId"], each.ext["timestamp"]) for each in asked) == [
        ("0", "1700000000000"),
        ("1", "1700000000000"),
    ]


async def test_a_seek_right_after_the_start_waits_for_the_queues(broker: FakeBroker) -> None:
    await broker.store("demo", b"a", b"b")
    consumer = make_consumer(broker, from_="last")
    async with consumer:
        await consumer.seek("demo", "first")
        assert bodies(await take(consumer, 2)) == [b"a", b"b"]


async def test_a_seek_holds_though_its_offset_cannot_be_stored_at_once(broker: FakeBroker) -> None:
    broker.topics["demo"] = 1
    await broker.store("demo", b"a", b"b")
    async with make_consumer(broker) as consumer:
        for message in await take(consumer, 2):
            await message.ack()
        broker.on(COMMIT, failure(ResponseCode.SYSTEM_ERROR))
        await consumer.seek("demo", offset=1)
        assert bodies(await take(consumer, 1)) == [b"b"]
        del broker.overrides[COMMIT]
        await broker.until(lambda: broker.offsets.get(("g", "demo", 0)) == 1)


async def test_a_seek_that_makes_no_sense_is_refused(broker: FakeBroker) -> None:
    broker.topics["demo"] = 4
    consumer = make_consumer(broker)
    with pytest.raises(ClosedError, match="start the consumer first"):
        await consumer.seek("demo", "first")
    broker.members.append(LAST_MEMBER)
    async with consumer:
        wrong: list[tuple[Any, dict[str, Any]]] = [
            ("demo", {}),
            ("demo", {"offset": 1, "position": "first"}),
            ("demo", {"offset": -1}),
            ("demo", {"position": "middle"}),
            ("demo", {"time": -1}),
            ("other", {"offset": 1}),
            (7, {"offset": 1}),
            (MessageQueue("demo", "broker-a", 3), {"offset": 1}),
        ]
        for target, arguments in wrong:
            with pytest.raises(ArgumentError):
                await consumer.seek(target, **arguments)
        consumer.subscribe("missing")
        with pytest.raises(NoRouteError):
            await consumer.seek("missing", "first")
    with pytest.raises(ClosedError):
        await consumer.seek("demo", "first")


# --- pause and resume -------------------------------------------------------------------------------------------


async def test_nothing_of_a_paused_queue_is_handed_out_or_read(broker: FakeBroker) -> None:
    broker.topics["demo"] = 2
    await broker.store("demo", b"0a", b"0b", queue_id=0)
    async with make_consumer(broker) as consumer:
        (first,) = await take(consumer, 1)
        assert first.body == b"0a"
        await broker.until(lambda: len(pulls(broker)) == 2)
        consumer.pause(Q0)
        await broker.store("demo", b"0c", queue_id=0)  # the pull that is held brings it
        await broker.store("demo", b"1a", queue_id=1)
        (other,) = await take(consumer, 1)
        assert other.body == b"1a"
        await broker.until(lambda: len(pulls(broker, 1)) == 3)
        assert len(pulls(broker)) == 2
        assert consumer.assignment == {Q0, Q1}
        consumer.resume(Q0)
        assert [message.body for message in await take(consumer, 2)] == [b"0b", b"0c"]
        await broker.until(lambda: len(pulls(broker)) == 3)


async def test_pausing_again_and_again_reads_no_more_than_there_is_room_for(broker: FakeBroker) -> None:
    """What a paused queue had takes its room again when it is resumed."""
    await broker.store("demo", *(b"%d" % number for number in range(200)))
    queue = MessageQueue("demo", "broker-a", 0)
    async with make_consumer(broker, max_cached_messages=20) as consumer:
        first = (await take(consumer, 1))[0]
        for _ in range(5):
            consumer.pause(queue)
            await consumer._member._api.end_offset(queue)
            consumer.resume(queue)
            await consumer._member._api.end_offset(queue)  # answered after a pull that was made before
        assert len(pulls(broker)) == 1
        for message in [first, *await take(consumer, 31)]:
            await message.ack()
        await broker.until(lambda: len(pulls(broker)) == 2)


async def test_a_topic_may_be_paused_before_the_start_and_resumed_in_part(broker: FakeBroker) -> None:
    broker.topics["demo"] = 2
    await broker.store("demo", b"0", queue_id=0)
    await broker.store("demo", b"1", queue_id=1)
    consumer = make_consumer(broker)
    consumer.pause("demo")
    async with consumer:
        await broker.until_requests(LOAD, 2)
        consumer.resume(Q1)
        assert bodies(await take(consumer, 1)) == [b"1"]
        assert not pulls(broker, 0)
        consumer.resume()
        assert bodies(await take(consumer, 1)) == [b"0"]
        consumer.pause()
        await broker.store("demo", b"later", queue_id=1)
        await broker.until(lambda: len(pulls(broker, 1)) >= 2)
        consumer.resume("demo")
        assert bodies(await take(consumer, 1)) == [b"later"]
        for wrong in (7, "no topic!", None):
            with pytest.raises(ArgumentError):
                consumer.pause(wrong)  # type: ignore[arg-type]


async def test_a_queue_that_was_given_away_is_still_paused_when_it_comes_back(broker: FakeBroker) -> None:
    broker.topics["demo"] = 2
    async with make_consumer(broker) as consumer:
        await broker.until(lambda: bool(pulls(broker, 1)))
        consumer.pause(Q1)
        share_with_another(broker)
        await wait_until(lambda: consumer.assignment == {Q0})
        share_no_longer(broker)
        await wait_until(lambda: consumer.assignment == {Q0, Q1})
        count = len(pulls(broker, 1))
        await broker.store("demo", b"1", queue_id=1)
        await broker.store("demo", b"0", queue_id=0)
        assert bodies(await take(consumer, 1)) == [b"0"]
        assert len(pulls(broker, 1)) == count
        consumer.resume(Q1)
        assert bodies(await take(consumer, 1)) == [b"1"]


async def test_the_queues_of_a_paused_topic_that_come_later_are_paused(broker: FakeBroker) -> None:
    broker.topics["demo"] = 2
    broker.members.append(LAST_MEMBER)
    async with make_consumer(broker) as consumer:
        await wait_until(lambda: consumer.assignment == {Q0})
        consumer.pause("demo")
        consumer.resume(Q0)
        share_no_longer(broker)
        await wait_until(lambda: consumer.assignment == {Q0, Q1})
        await broker.store("demo", b"1", queue_id=1)
        for _ in range(10):
            await broker.store("demo", b"0", queue_id=0)
            assert bodies(await take(consumer, 1)) == [b"0"]
        assert not pulls(broker, 1)
        consumer.pause("demo")
        await broker.store("demo", b"later", queue_id=0)
        consumer.resume(Q1)
        assert bodies(await take(consumer, 1)) == [b"1"]
        consumer.resume("demo")
        assert bodies(await take(consumer, 1)) == [b"later"]


async def test_a_seek_to_the_end_leaves_room_though_nobody_receives(broker: FakeBroker) -> None:
    broker.topics["demo"] = 1
    await broker.store("demo", *(b"%d" % number for number in range(50)))
    async with make_consumer(broker, max_cached_messages=2) as consumer:
        await broker.until(lambda: bool(pulls(broker)))
        await consumer.seek("demo", "last")
        async with asyncio.timeout(10):
            await consumer.caught_up()


async def wait_until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


# --- assignment -------------------------------------------------------------------------------------------------


async def test_a_listener_is_told_before_queues_are_read_and_before_they_are_given_away(broker: FakeBroker) -> None:
    broker.topics |= {"demo": 2, "%RETRY%g": 1}
    await broker.store("demo", b"a", b"b", queue_id=1)
    told: list[tuple[str, set[int]]] = []
    go_on = asyncio.Event()

    async def on_assigned(queues: frozenset[MessageQueue]) -> None:
        assert {queue.topic for queue in queues} == {"demo"}
        told.append(("assigned", {queue.queue_id for queue in queues}))
        assert not [request for request in broker.requests_of(PULL) if request.ext["topic"] == "demo"]
        await consumer.seek(Q1, offset=1)

    async def on_revoked(queues: frozenset[MessageQueue]) -> None:
        told.append(("revoked", {queue.queue_id for queue in queues}))
        assert queues <= consumer.assignment, "they are still this member's"
        if not go_on.is_set():
            await held[0].ack()
            assert (await consumer.commit())[Q1] == 2
            await go_on.wait()

    consumer = make_consumer(broker, on_assigned=on_assigned, on_revoked=on_revoked, _intervals=WITHOUT_COMMITS)
    async with consumer:
        held = await take(consumer, 1)
        assert held[0].body == b"b", "the listener sought behind the first"
        share_with_another(broker)
        await wait_until(lambda: broker.offsets.get(("g", "demo", 1)) == 2)
        await broker.store("demo", b"c", queue_id=1)
        await broker.store("demo", b"other", queue_id=0)
        assert bodies(await take(consumer, 1)) == [b"other"], "nothing more of the other queue is handed out"
        go_on.set()
        await wait_until(lambda: consumer.assignment == {Q0})
    assert told == [("assigned", {0, 1}), ("revoked", {1}), ("revoked", {0})]
    assert broker.offsets["g", "demo", 1] == 2


async def test_a_listener_that_fails_or_hangs_does_not_hold_up_the_queues(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    broker.topics["demo"] = 1
    await broker.store("demo", b"a")

    async def fails(_: frozenset[MessageQueue]) -> None:
        raise ValueError("broken")

    async def hangs(_: frozenset[MessageQueue]) -> None:
        await asyncio.Event().wait()

    async with make_consumer(broker, on_assigned=fails, on_revoked=hangs, close_timeout=0.01) as consumer:
        assert bodies(await take(consumer, 1)) == [b"a"]
    assert "on_assigned failed" in caplog.text
    assert "on_revoked did not return within 0.01 s" in caplog.text


@pytest.mark.parametrize("name", ["on_assigned", "on_revoked"])
async def test_a_listener_may_close_its_consumer(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    broker.topics |= {"demo": 2, "later": 1}
    told: list[set[MessageQueue]] = []

    async def closes(queues: frozenset[MessageQueue]) -> None:
        told.append(set(queues))
        await consumer.close()

    listeners: dict[str, Any] = {name: closes}
    consumer = make_consumer(broker, _intervals=WITHOUT_COMMITS, **listeners)
    consumer.subscribe("later")
    await consumer.start()
    if name == "on_revoked":
        await wait_until(lambda: len(consumer.assignment) == 3)
        share_with_another(broker)
    async with asyncio.timeout(5):
        await consumer.wait_closed()
    await wait_until(lambda: not [task for task in asyncio.all_tasks() if task.get_name().startswith("duemq")])
    assert "demo" in {queue.topic for queue in told[0]}
    if name == "on_revoked":
        assert told == [{Q1}, {Q0, MessageQueue("later", "broker-a", 0)}], "each queue is told of once"
    assert not caplog.records
    await broker.until(lambda: not broker.connections)


async def test_closing_tells_the_listener_when_the_handlers_have_ended(broker: FakeBroker) -> None:
    await broker.store("demo", b"a")
    events: list[str] = []
    started = asyncio.Event()

    async def on_message(_: ReceivedMessage) -> None:
        started.set()
        await asyncio.sleep(0)
        events.append("handled")

    async def on_revoked(_: frozenset[MessageQueue]) -> None:
        events.append("revoked")
        events.append(f"stored {commits(broker, 0)}")

    intervals = replace(WITHOUT_COMMITS)
    async with make_consumer(broker, on_message, on_revoked=on_revoked, _intervals=intervals):
        await started.wait()
    assert events == ["handled", "revoked", "stored []"]
    assert broker.offsets["g", "demo", 0] == 1


async def test_a_close_that_is_cancelled_stores_the_offsets_and_leaves(broker: FakeBroker) -> None:
    await broker.store("demo", b"a", b"hangs")
    started = asyncio.Event()

    async def on_message(message: ReceivedMessage) -> None:
        if message.body == b"hangs":
            started.set()
            await asyncio.Event().wait()

    consumer = make_consumer(broker, on_message, concurrency=1, _intervals=WITHOUT_COMMITS)
    await consumer.start()
    await started.wait()
    closing = asyncio.create_task(consumer.close())
    await asyncio.sleep(0.01)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await consumer.wait_closed()
    assert broker.offsets["g", "demo", 0] == 1
    assert not broker.members
    await broker.until(lambda: not broker.connections)


def test_listeners_are_coroutine_functions() -> None:
    def on_assigned(_: frozenset[MessageQueue]) -> None:
        pass

    with pytest.raises(ArgumentError, match="on_assigned"):
        Consumer("g", on_assigned=on_assigned)  # type: ignore[arg-type]
