"""Ordered consumers: one message of a queue at a time, tried again in its place, by the member that holds the lock."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from duemq import ArgumentError, Consumer, MessageQueue, ReceivedMessage
from duemq.protocol.codes import RequestCode, ResponseCode
from tests.unit.duemq.conftest import INTERVALS
from tests.unit.duemq.consuming.test_consumer import (
    BACK,
    LAST_MEMBER,
    PULL,
    StoppedClock,
    bodies,
    make_consumer,
    pulls,
    take,
)
from tests.unit.duemq.consuming.test_consumer_control import share_no_longer, share_with_another, wait_until
from tests.unit.duemq.fake import FakeBroker, Request, failure

LOCK, UNLOCK = RequestCode.LOCK_BATCH_MQ, RequestCode.UNLOCK_BATCH_MQ
QUICK = replace(INTERVALS, retry_in_place=0.001)


def make_ordered(broker: FakeBroker, on_message: Any = None, **options: Any) -> Consumer:
    return make_consumer(broker, on_message, **{"ordered": True, "_intervals": QUICK, **options})


async def test_messages_of_a_queue_are_handled_one_after_the_other_and_queues_beside_each_other(
    broker: FakeBroker,
) -> None:
    broker.topics["demo"] = 3
    for queue_id in range(3):
        await broker.store("demo", *(b"%d/%d" % (queue_id, number) for number in range(50)), queue_id=queue_id)
    together: set[int] = set()
    most = 0
    handled: dict[int, list[int]] = {0: [], 1: [], 2: []}

    async def on_message(message: ReceivedMessage) -> None:
        nonlocal most
        assert message.queue.queue_id not in together
        together.add(message.queue.queue_id)
        most = max(most, len(together))
        for _ in range(message.queue_offset % 5):
            await asyncio.sleep(0)
        together.discard(message.queue.queue_id)
        handled[message.queue.queue_id].append(message.queue_offset)

    async with make_ordered(broker, on_message) as consumer:
        await consumer.caught_up()
    assert all(order == list(range(50)) for order in handled.values())
    assert most == 3


async def test_a_message_that_fails_is_tried_again_in_its_place_and_then_given_up(broker: FakeBroker) -> None:
    broker.topics["demo"] = 1
    await broker.store("demo", b"a", b"b", b"c")
    tries: list[tuple[bytes, int]] = []

    async def on_message(message: ReceivedMessage) -> None:
        tries.append((message.body, message.reconsume_times))
        if message.body == b"b":
            raise ValueError("no")

    async with make_ordered(broker, on_message, max_reconsume_times=2) as consumer:
        await consumer.caught_up()
    assert tries == [(b"a", 0), (b"b", 0), (b"b", 1), (b"b", 2), (b"c", 0)]
    (back,) = broker.requests_of(BACK)
    assert back.ext["delayLevel"] == "-1"
    assert broker.offsets["g", "demo", 0] == 3


async def test_a_caller_gets_one_message_of_a_queue_until_it_settles_it(broker: FakeBroker) -> None:
    broker.topics["demo"] = 2
    await broker.store("demo", b"0a", b"0b", queue_id=0)
    await broker.store("demo", b"1a", b"1b", queue_id=1)
    async with make_ordered(broker) as consumer:
        first, other = sorted(await take(consumer, 2), key=lambda message: message.body)
        assert (first.body, other.body) == (b"0a", b"1a")
        assert consumer._inbox.get_more(9) == []
        await first.retry(delay=0)
        (again,) = await take(consumer, 1)
        assert (again.body, again.reconsume_times) == (b"0a", 1)
        await first.ack()  # it is settled, and says nothing about the new try
        assert consumer._inbox.get_more(9) == []
        with pytest.raises(ArgumentError, match="give delay="):
            await again.retry(3)
        await again.ack()
        assert bodies(await take(consumer, 1)) == [b"0b"]
        await other.dead_letter()
        assert bodies(await consumer.receive_many(9)) == [b"1b"]
    assert [back.ext["delayLevel"] for back in broker.requests_of(BACK)] == ["-1"]


async def test_a_queue_that_is_held_up_takes_no_room_of_others(broker: FakeBroker) -> None:
    broker.topics["demo"] = 2
    await broker.store("demo", b"stuck", *(b"%d" % number for number in range(300)), queue_id=0)
    await broker.store("demo", *(b"%d" % number for number in range(300)), queue_id=1)
    let_go = asyncio.Event()

    async def on_message(message: ReceivedMessage) -> None:
        if message.body == b"stuck":
            await let_go.wait()

    async with make_ordered(broker, on_message, max_cached_messages=64) as consumer:
        await broker.until(lambda: broker.offsets.get(("g", "demo", 1)) == 300)
        assert broker.offsets.get(("g", "demo", 0), 0) == 0
        assert consumer._inbox.messages <= 64
        let_go.set()
        await consumer.caught_up()
    assert broker.offsets["g", "demo", 0] == 301


# --- locks --------------------------------------------------------------------------------------------------------


async def test_queues_are_locked_before_they_are_read_and_unlocked_at_the_close(broker: FakeBroker) -> None:
    broker.topics["demo"] = 2
    await broker.store("demo", b"a")
    async with make_ordered(broker) as consumer:
        await (await take(consumer, 1))[0].ack()
        assert set(broker.locks) == {("g", "demo", 0), ("g", "demo", 1)}
    codes = [request.code for request in broker.requests]
    assert codes.index(LOCK) < codes.index(PULL)
    assert codes.index(UNLOCK) > max(
        number for number, code in enumerate(codes) if code == RequestCode.UPDATE_CONSUMER_OFFSET
    )
    assert broker.locks == {}
    (body,) = {request.body for request in broker.requests_of(LOCK)}
    assert b'"consumerGroup":"g"' in body
    assert b'"brokerName":"broker-a"' in body


async def test_locks_that_are_requested_during_the_close_are_released(broker: FakeBroker) -> None:
    """The broker kept them for a minute, in which no other member got these queues."""
    broker.topics["demo"] = 2

    async def lock_slowly(request: Request) -> Any:
        answer = broker.lock(request)
        await asyncio.sleep(0.2)
        return answer

    broker.on(LOCK, lock_slowly)
    async with make_ordered(broker):
        await broker.until_requests(LOCK, 1)
        await wait_until(lambda: broker.locks)
    assert broker.locks == {}


async def test_a_close_while_a_queue_is_given_away_stores_its_offset_and_releases_its_lock(broker: FakeBroker) -> None:
    """The store was cancelled, and the queue was no longer among those whose offsets the close stores."""
    broker.topics["demo"] = 2
    await broker.store("demo", b"a", queue_id=1)

    async def store_slowly(request: Request) -> Any:
        await asyncio.sleep(0.1)
        return broker.update_offset(request)

    async with make_ordered(broker, _intervals=replace(QUICK, commit=60.0)) as consumer:
        await (await take(consumer, 1))[0].ack()
        broker.on(RequestCode.UPDATE_CONSUMER_OFFSET, store_slowly)
        share_with_another(broker)
        await wait_until(lambda: len(consumer.assignment) < 2)
    assert broker.offsets["g", "demo", 1] == 1
    assert broker.locks == {}


async def test_a_queue_whose_lock_another_member_has_is_not_read_until_it_is_free(broker: FakeBroker) -> None:
    broker.topics["demo"] = 2
    broker.locks["g", "demo", 1] = "other"
    await broker.store("demo", b"0", queue_id=0)
    await broker.store("demo", b"1", queue_id=1)
    async with make_ordered(broker) as consumer:
        assert bodies(await take(consumer, 1)) == [b"0"]
        await broker.until_requests(LOCK, 4)
        assert not pulls(broker, 1)
        broker.offsets["g", "demo", 1] = 0
        broker.locks.clear()
        assert bodies(await take(consumer, 1)) == [b"1"]


async def test_a_queue_is_given_away_when_its_handler_has_ended_and_its_offset_is_stored(broker: FakeBroker) -> None:
    broker.topics["demo"] = 2
    await broker.store("demo", b"a", b"b", queue_id=1)
    started, go_on = asyncio.Event(), asyncio.Event()
    revoked: list[MessageQueue] = []
    handled: list[bytes] = []

    async def on_message(message: ReceivedMessage) -> None:
        handled.append(message.body)
        started.set()
        await go_on.wait()

    async def on_revoked(queues: frozenset[MessageQueue]) -> None:
        revoked.extend(queues)

    async with make_ordered(broker, on_message, on_revoked=on_revoked) as consumer:
        await started.wait()
        share_with_another(broker)
        await wait_until(lambda: bool(consumer._member._held_back))
        assert ("g", "demo", 1) in broker.locks
        assert not revoked
        go_on.set()
        await broker.until(lambda: ("g", "demo", 1) not in broker.locks)
        assert (handled, broker.offsets["g", "demo", 1]) == ([b"a"], 1)
        assert revoked == [MessageQueue("demo", "broker-a", 1)]
        share_no_longer(broker)
        await broker.until(lambda: broker.offsets["g", "demo", 1] == 2)
    assert handled == [b"a", b"b"]


async def test_a_handler_that_does_not_end_keeps_the_lock(broker: FakeBroker, caplog: pytest.LogCaptureFixture) -> None:
    broker.topics["demo"] = 2
    await broker.store("demo", b"a", queue_id=1)
    started = asyncio.Event()

    async def on_message(_: ReceivedMessage) -> None:
        started.set()
        await asyncio.Event().wait()

    async with make_ordered(broker, on_message, close_timeout=0.01) as consumer:
        await started.wait()
        share_with_another(broker)
        await wait_until(lambda: len(consumer.assignment) == 1)
        await wait_until(lambda: "left to expire" in caplog.text)
        assert ("g", "demo", 1) in broker.locks


async def test_locks_are_renewed_and_a_lost_one_ends_the_reading(broker: FakeBroker) -> None:
    broker.topics["demo"] = 2
    await broker.store("demo", b"a", b"b", queue_id=1)
    # A commit of this member must not come behind the offset of the other one.
    async with make_ordered(broker, _intervals=replace(QUICK, lock=0.001, commit=60.0)) as consumer:
        (message,) = await take(consumer, 1)
        await broker.until_requests(LOCK, 3)
        owner = broker.locks["g", "demo", 1]
        broker.locks["g", "demo", 1] = "other"
        broker.offsets["g", "demo", 1] = 1
        await wait_until(lambda: message.lost)
        await message.ack()
        await wait_until(lambda: len(consumer.assignment) == 1)
        broker.locks["g", "demo", 1] = owner
        (following,) = await take(consumer, 1)
        assert (following.body, following.queue_offset) == (b"b", 1), "it goes on where the group is"


async def test_a_member_that_stopped_for_long_handles_nothing_more_before_it_has_the_lock_again(
    broker: FakeBroker,
) -> None:
    broker.topics["demo"] = 1
    await broker.store("demo", b"a", b"b", b"c")
    clock = StoppedClock()
    # A commit of this member must not come behind the offset of the other one.
    intervals = replace(QUICK, lock=0.05, commit=60.0)
    async with make_ordered(broker, _monotonic=clock, _intervals=intervals) as consumer:
        (first,) = await take(consumer, 1)
        locks = len(broker.requests_of(LOCK))
        broker.offsets["g", "demo", 0] = 2  # another member has gone on
        clock.now += 31  # longer than a lock counts, and not as long as brokers remember a member
        assert first.lost
        await first.ack()
        (news,) = await take(consumer, 1)
        assert news.body == b"c"
        assert len(broker.requests_of(LOCK)) > locks


async def test_while_the_broker_cannot_be_asked_the_locks_last(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    broker.topics["demo"] = 1
    await broker.store("demo", b"a", b"b")
    async with make_ordered(broker, _intervals=replace(QUICK, lock=0.001)) as consumer:
        (first,) = await take(consumer, 1)
        broker.on(LOCK, failure(ResponseCode.SYSTEM_ERROR, "not now"))
        await broker.until_requests(LOCK, len(broker.requests_of(LOCK)) + 3)
        assert not first.lost
        await first.ack()
        assert bodies(await take(consumer, 1)) == [b"b"]
    assert caplog.text.count("locking queues of broker-a: ") == 1


async def test_a_message_is_retried_after_its_delay_and_a_closed_consumer_gives_its_place_up(
    broker: FakeBroker,
) -> None:
    broker.topics["demo"] = 2
    await broker.store("demo", b"a", b"b", queue_id=1)
    async with make_ordered(broker) as consumer:
        await (await take(consumer, 1))[0].retry(delay="1h")
        share_with_another(broker)
        await broker.until(lambda: ("g", "demo", 1) not in broker.locks)  # it does not wait for the hour
    assert broker.offsets.get(("g", "demo", 1), 0) == 0
    assert not broker.requests_of(BACK)


async def test_members_keep_the_order_over_a_rebalance(broker: FakeBroker) -> None:
    """Two members, of which one comes later and one leaves: no message is handled before those in front of it are."""
    broker.topics["demo"] = 4
    handled: dict[int, list[int]] = {queue_id: [] for queue_id in range(4)}
    busy: set[int] = set()

    async def on_message(message: ReceivedMessage) -> None:
        queue_id = message.queue.queue_id
        assert queue_id not in busy
        busy.add(queue_id)
        await asyncio.sleep(0.001)
        busy.discard(queue_id)
        handled[queue_id].append(message.queue_offset)

    async def store() -> None:
        for queue_id in range(4):
            await broker.store("demo", *(b"x" for _ in range(30)), queue_id=queue_id)

    await store()
    first, second = make_ordered(broker, on_message), make_ordered(broker, on_message)
    await first.start()
    await wait_until(lambda: sum(map(len, handled.values())) > 20)
    await second.start()
    await wait_until(lambda: len(broker.members) == 2)
    broker.notify(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": "g"})
    await wait_until(lambda: len(second.assignment) == 2)
    await store()
    await first.close()
    broker.notify(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": "g"})
    await wait_until(lambda: sum(map(len, handled.values())) == 240)
    await second.close()
    assert all(order == list(range(60)) for order in handled.values())
    assert LAST_MEMBER not in broker.members


async def test_broadcasting_members_need_no_locks(broker: FakeBroker) -> None:
    await broker.store("demo", b"a", b"b")
    seen: list[bytes] = []

    async def on_message(message: ReceivedMessage) -> None:
        seen.append(message.body)
        if len(seen) == 1:
            raise ValueError("no")

    async with make_ordered(broker, on_message, model="broadcasting") as consumer:
        await consumer.caught_up()
    assert seen == [b"a", b"a", b"b"]
    assert not broker.requests_of(LOCK)


# --- exclusive consumers ------------------------------------------------------------------------------------------


def make_exclusive(broker: FakeBroker, **options: Any) -> Consumer:
    return make_consumer(broker, None, **{"_exclusive": True, "_intervals": QUICK, **options})


async def test_an_exclusive_consumer_hands_out_many_of_a_queue_and_gives_it_away_when_they_are_finished(
    broker: FakeBroker,
) -> None:
    broker.topics["demo"] = 2
    await broker.store("demo", *(b"%d" % number for number in range(9)), queue_id=1)
    async with make_exclusive(broker) as consumer:
        messages = await take(consumer, 5)
        share_with_another(broker)
        await wait_until(lambda: bool(consumer._member._held_back))
        await messages[0].retry()
        for message in messages[1:4]:
            await message.ack()
        assert ("g", "demo", 1) in broker.locks
        assert consumer._inbox.get_more(9) == [], "what was read and is not handed out goes to the other one"
        await messages[4].ack()
        await broker.until(lambda: ("g", "demo", 1) not in broker.locks)
        assert broker.offsets["g", "demo", 1] == 5
    assert len(broker.requests_of(BACK)) == 1


async def test_it_keeps_a_queue_for_as_long_as_that_takes(broker: FakeBroker) -> None:
    broker.topics["demo"] = 2
    await broker.store("demo", b"a", b"b", queue_id=1)
    async with make_exclusive(broker, close_timeout=0.001) as consumer:
        (first,) = await take(consumer, 1)
        members = len(broker.requests_of(RequestCode.GET_CONSUMER_LIST_BY_GROUP))
        share_with_another(broker)
        await broker.until_requests(RequestCode.GET_CONSUMER_LIST_BY_GROUP, members + 9)
        assert (first.lost, ("g", "demo", 1) in broker.locks) == (False, True)
        assert consumer._inbox.get_more(9) == []
        share_no_longer(broker)
        assert bodies(await take(consumer, 1)) == [b"b"], "it has the queue again, and goes on"
        share_with_another(broker)
        await first.ack()
        await broker.until(lambda: broker.offsets.get(("g", "demo", 1)) == 1)


async def test_with_a_client_id_of_its_own_it_has_its_locks_again_after_a_kill(broker: FakeBroker) -> None:
    broker.topics["demo"] = 1
    await broker.store("demo", b"a")
    broker.locks["g", "demo", 0] = "bridge"
    async with make_exclusive(broker, _client_id="bridge") as consumer:
        assert bodies(await take(consumer, 1)) == [b"a"]
    assert broker.locks == {}


WITHOUT_RENEWALS = replace(QUICK, commit=60.0, lock=60.0, rebalance=0.005)


def kill(broker: FakeBroker, **offsets: int) -> None:
    """Have a broker forget locks and members, and break its connections. `offsets`: those of the queues that are on its
    disk, by `q` and the queue id."""
    broker.locks.clear()
    broker.members.clear()
    broker.offsets = {("g", "demo", int(queue[1:])): offset for queue, offset in offsets.items()}
    broker.cut()


async def test_after_a_kill_of_the_broker_it_claims_its_queues_at_once(broker: FakeBroker) -> None:
    broker.topics["demo"] = 1
    await broker.store("demo", b"a", b"b", b"c")
    async with make_exclusive(broker, _intervals=WITHOUT_RENEWALS) as consumer:
        messages = await take(consumer, 3)
        for message in messages[:2]:
            await message.ack()
        await consumer._member.commit()
        kill(broker, q0=1)
        await broker.until(lambda: broker.offsets["g", "demo", 0] == 2)
        assert broker.locks["g", "demo", 0] == consumer._member.client_id
        await messages[2].ack()


async def test_after_a_kill_of_the_broker_it_leaves_queues_to_those_that_had_them(broker: FakeBroker) -> None:
    broker.topics["demo"] = 2
    broker.members.append(LAST_MEMBER)
    broker.locks["g", "demo", 1] = LAST_MEMBER
    await broker.store("demo", b"a", queue_id=0)
    await broker.store("demo", b"b", queue_id=1)
    clock = StoppedClock()
    async with make_exclusive(broker, _intervals=WITHOUT_RENEWALS, _monotonic=clock) as consumer:
        (first,) = await take(consumer, 1)
        kill(broker)
        looks = len(broker.requests_of(RequestCode.GET_CONSUMER_LIST_BY_GROUP))
        await broker.until_requests(RequestCode.GET_CONSUMER_LIST_BY_GROUP, looks + 9)
        assert ("g", "demo", 1) not in broker.locks, "its member has not connected yet"
        assert not first.lost
        assert consumer.assignment == {MessageQueue("demo", "broker-a", 0)}
        clock.now += WITHOUT_RENEWALS.claims
        assert bodies(await take(consumer, 1)) == [b"b"], "nobody has claimed it"
        await first.ack()


async def test_started_again_it_finishes_the_queues_whose_locks_it_has_and_gives_the_others_theirs(
    broker: FakeBroker,
) -> None:
    """Those would have to wait until the locks expire."""
    broker.topics["demo"] = 2
    broker.members.append(LAST_MEMBER)
    await broker.store("demo", b"a", queue_id=0)
    await broker.store("demo", b"b", queue_id=1)
    broker.locks = {("g", "demo", 0): "bridge", ("g", "demo", 1): "bridge"}
    in_hand = {MessageQueue("demo", "broker-a", 1): 1}
    async with make_exclusive(broker, _client_id="bridge", _in_hand=in_hand) as consumer:
        messages = await take(consumer, 2)
        assert sorted(bodies(messages)) == [b"a", b"b"]
        assert ("g", "demo", 1) in broker.locks
        for message in messages:
            await message.ack()
        await broker.until(lambda: ("g", "demo", 1) not in broker.locks)
        assert (broker.offsets["g", "demo", 1], broker.locks["g", "demo", 0]) == (1, "bridge")


async def test_a_queue_of_which_a_former_process_had_messages_in_hand_is_kept_until_they_are_finished(
    broker: FakeBroker,
) -> None:
    """Also before any of them was read again: the next member would begin with them. What the queue does not have, in
    a store that was replaced for example, is not waited for."""
    broker.topics["demo"] = 3
    broker.members.append(LAST_MEMBER)
    for queue_id in range(3):
        await broker.store("demo", b"%d a" % queue_id, b"%d b" % queue_id, queue_id=queue_id)
    broker.locks = {("g", "demo", queue_id): "bridge" for queue_id in range(3)}
    in_hand = {MessageQueue("demo", "broker-a", 2): 1, MessageQueue("demo", "broker-a", 1): 99}
    broker.on(RequestCode.QUERY_CONSUMER_OFFSET, failure(ResponseCode.SYSTEM_BUSY, "busy"))
    async with make_exclusive(broker, _client_id="bridge", _in_hand=in_hand) as consumer:
        members = len(broker.requests_of(RequestCode.GET_CONSUMER_LIST_BY_GROUP))
        await broker.until_requests(RequestCode.GET_CONSUMER_LIST_BY_GROUP, members + 5)
        assert ("g", "demo", 2) in broker.locks
        del broker.overrides[RequestCode.QUERY_CONSUMER_OFFSET]
        for message in await take(consumer, 6):
            await message.ack()
        await broker.until(lambda: ("g", "demo", 2) not in broker.locks)
        assert broker.offsets["g", "demo", 2] == 2


async def test_it_keeps_its_queues_though_its_process_stood_still_for_a_while(broker: FakeBroker) -> None:
    """As long as the broker keeps its locks, which is 60 s."""
    broker.topics["demo"] = 1
    await broker.store("demo", b"a", b"b")
    clock = StoppedClock()
    async with make_exclusive(broker, _monotonic=clock, _intervals=replace(QUICK, lock=0.005)) as consumer:
        first, _ = await take(consumer, 2)
        broker.on(LOCK, failure(ResponseCode.SYSTEM_BUSY, "busy"))
        await broker.until_requests(LOCK, len(broker.requests_of(LOCK)) + 2)
        clock.now += 54
        await first.ack()
        await broker.until(lambda: broker.offsets.get(("g", "demo", 0)) == 1)
        assert (first.lost, broker.requests_of(UNLOCK)) == (False, [])
        clock.now += 1
        assert first.lost


async def test_it_knows_that_a_renewal_failed(broker: FakeBroker) -> None:
    broker.topics["demo"] = 1
    await broker.store("demo", b"a")
    async with make_exclusive(broker, _intervals=replace(QUICK, lock=0.2)) as consumer:
        await take(consumer, 1)
        locks = consumer._member._locks
        assert locks is not None
        assert not locks.is_failing
        broker.on(LOCK, failure(ResponseCode.SYSTEM_BUSY, "busy"))
        await broker.until_requests(LOCK, len(broker.requests_of(LOCK)) + 2)
        assert locks.is_failing


async def test_a_broker_that_comes_and_goes_keeps_no_queues_of_others_from_being_taken(broker: FakeBroker) -> None:
    broker.topics["demo"] = 1
    async with FakeBroker(name="broker-b", topics={"demo": 1}) as other:
        broker.brokers = [broker, other]
        for each in (broker, other):
            each.members.append(LAST_MEMBER)
        broker.locks["g", "demo", 0] = LAST_MEMBER
        async with make_exclusive(broker, _monotonic=StoppedClock(), _intervals=WITHOUT_RENEWALS) as consumer:
            await wait_until(lambda: bool(consumer.assignment))
            kill(other)
            await other.until(lambda: bool(other.members))
            for each in (broker, other):
                each.members = [consumer._member.client_id]
            broker.locks.clear()
            await wait_until(lambda: MessageQueue("demo", "broker-a", 0) in consumer.assignment)
