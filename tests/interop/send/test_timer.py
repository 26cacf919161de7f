"""Messages with a time of their own (RocketMQ 5): never early, never lost, delivered at once if the time has passed,
refused if it is too far ahead.

Every client can send them, since the time is only a property. Earliness is measured by the broker's clock, by the store
time of the delivered record. RocketMQ delivers at the end of the second, duemq at the millisecond: that shows in the
order of the delivered messages, which a busy machine cannot change.
"""

import asyncio
import itertools
import json
import random
import re
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from tests.bench.remote import Remote
from tests.interop.at_once import alone
from tests.interop.environment import LEVEL_MS, BrokerFactory, ClientPool, Together
from tests.interop.support import each_once, eventually, make_topic, need, not_on, waiting_record
from tests.peers.admin import Admin
from tests.peers.brokers.broker import HOST, Broker
from tests.peers.capabilities import Can, gap
from tests.peers.clients import JavaClient, Producer, PushConsumer, unique
from tests.peers.errors import CallError
from tests.peers.messages import Outgoing, Received

TIMER = "rmq_sys_wheel_timer"
QUEUES = 4
MESSAGE_ILLEGAL = 13
ILLEGAL_OPERATION = 604
DAY_MS = 86_400_000
RANDOM = 100
IN_A_SECOND = 10
RETRY_LEVEL = 3
RECALLS = "java-5.3.3"


@pytest.fixture(autouse=True)
def _timers(target: str) -> None:
    not_on(target, "apache-4.9.7", "timers came with 5.0: it ignores the properties and delivers at once")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _timed(body: bytes, at: int, **fields: str) -> Outgoing:
    return Outgoing(body, properties={"TIMER_DELIVER_MS": str(at)}, **fields)  # type: ignore[arg-type]


async def test_message_is_delivered_at_its_time_and_not_before(
    broker: Broker, clients: ClientPool, java: JavaClient, together: Together, client_name: str
) -> None:
    """The broker delivers a message with any of the three time properties, in each mode of sending, at its time and not
    before; tags, keys and ids stay those of the message."""

    async def scenario(name: str) -> None:
        client = await clients.get(name)
        topic = unique("topic")
        await java.admin(broker.nameserver).create_topic(broker.address, topic, QUEUES)
        async with (
            await client.producer(broker.nameserver) as producer,
            await client.consumer(broker.nameserver, unique("group"), topic) as consumer,
        ):
            now = _now_ms()
            odd, whole = now + 1537, (now // 1000 + 3) * 1000
            # A delay counts from the arrival at the broker, which is after now.
            due = {b"odd": odd, b"whole": whole, b"milliseconds": now + 1700, b"seconds": now + 2000}
            properties = {
                b"odd": {"TIMER_DELIVER_MS": str(odd)},
                b"whole": {"TIMER_DELIVER_MS": str(whole)},
                b"milliseconds": {"TIMER_DELAY_MS": "1700"},
                b"seconds": {"TIMER_DELAY_SEC": "2"},
            }
            messages = [Outgoing(body, tags="t", keys="k", properties=properties[body]) for body in due]
            results = await producer.send(topic, messages)
            for mode in ("async", "oneway"):
                due[mode.encode()] = whole
                await producer.send(topic, [_timed(mode.encode(), whole, tags="t", keys="k")], mode)
            received = {message.body: message for message in await consumer.receive(len(due))}
        for body, at in due.items():
            assert received[body].store_time >= at
            assert (received[body].topic, received[body].tags, received[body].keys) == (topic, "t", "k")
            assert received[body].reconsume_times == 0
        for result, message in zip(results, messages, strict=True):
            waited, got = await waiting_record(java, broker, TIMER, 0, result), received[message.body]
            assert (waited.topic, waited.body, waited.properties["REAL_TOPIC"]) == (TIMER, message.body, topic)
            assert got.msg_id == result.msg_id
            assert got.born_time == waited.born_time

    await together.run("properties", client_name, scenario)


async def test_many_with_random_times_come_each_once_and_none_early(
    broker: Broker, clients: ClientPool, java: JavaClient, together: Together, client_name: str
) -> None:
    """The broker delivers many messages with random times once each and none early, also to a consumer of one of their
    two tags. duemq delivers them in the order of their times, except messages that are due in the same step."""

    async def scenario(name: str) -> None:
        client = await clients.get(name)
        topic = unique("topic")
        await java.admin(broker.nameserver).create_topic(broker.address, topic, QUEUES)
        chance = random.Random(name)
        async with (
            await client.producer(broker.nameserver) as producer,
            await client.consumer(broker.nameserver, unique("group"), topic) as consumer,
            await client.consumer(broker.nameserver, unique("group"), {topic: "red"}) as reds,
        ):
            start = _now_ms() + 1000
            times = [start + chance.randrange(3000) for _ in range(RANDOM)]
            bodies = [b"%d %d" % (at, number) for number, at in enumerate(times)]
            messages = [
                _timed(body, at, tags="red" if number % 2 else "blue", keys=f"key{number}")
                for number, (body, at) in enumerate(zip(bodies, times, strict=True))
            ]
            await producer.send(topic, messages, "async")
            await each_once(producer, topic, QUEUES, [consumer], bodies)
            await reds.receive_bodies(bodies[1::2])
            assert set(reds.bodies) & set(bodies) == set(bodies[1::2])
        received = {message.body: message for message in consumer.messages}
        for message, at in zip(messages, times, strict=True):
            got = received[message.body]
            assert got.store_time >= at
            assert (got.tags, got.keys) == (message.tags, message.keys)
        if broker.kind == "duemq":
            for queue in range(QUEUES):
                stored = await java.pull_all(broker.nameserver, topic, queue)
                found = [message for message in stored if message.body in bodies]
                for earlier, later in itertools.pairwise(found):
                    if earlier.store_time < later.store_time:
                        assert int(earlier.body.split()[0]) <= int(later.body.split()[0])

    await together.run("random", client_name, scenario)


async def test_times_within_a_second_are_kept_apart(broker: Broker, java: JavaClient) -> None:
    """duemq delivers messages that were sent in the wrong order in the order of their times, each before the next one
    is due."""
    not_on(broker, "apache-5.3.3", "it delivers a second's messages together, in any order, when that is over")
    topic = unique("topic")
    await java.admin(broker.nameserver).create_topic(broker.address, topic, 1)
    second = (_now_ms() // 1000 + 2) * 1000
    times = [second + n * 1000 // IN_A_SECOND for n in range(1, IN_A_SECOND + 1)]
    async with await java.producer(broker.nameserver) as producer:
        await producer.send(topic, [_timed(b"%d" % at, at) for at in reversed(times)])
        stored = await eventually(
            partial(java.pull_all, broker.nameserver, topic, 0), lambda found: len(found) == len(times)
        )
    assert [int(message.body) for message in stored] == times
    kept = [message.store_time - int(message.body) for message in stored]
    assert min(kept) >= 0
    assert min(kept) < 1000 // IN_A_SECOND, f"all were rounded: {kept}"


async def test_time_that_has_passed_means_at_once(
    broker: Broker, clients: ClientPool, java: JavaClient, together: Together, client_name: str
) -> None:
    """The broker delivers a message whose time has passed at once. A delay level takes precedence over a time."""

    async def scenario(name: str) -> None:
        client = await clients.get(name)
        topic = unique("topic")
        await java.admin(broker.nameserver).create_topic(broker.address, topic, QUEUES)
        async with (
            await client.producer(broker.nameserver) as producer,
            await client.consumer(broker.nameserver, unique("group"), topic) as consumer,
        ):
            tomorrow = str(_now_ms() + DAY_MS)
            results = await producer.send(
                topic,
                [
                    _timed(b"late", _now_ms() - 5000),
                    Outgoing(b"now", properties={"TIMER_DELAY_MS": "0"}),
                    Outgoing(b"level", level=1, properties={"TIMER_DELIVER_MS": tomorrow}),
                ],
            )
            await consumer.receive(3)
        if gap(name, Can.RESULT_QUEUE) is None:
            assert results[0].queue_id in range(QUEUES)
        assert [result.recall_handle for result in results] == [None, None, None]

    await together.run("at once", client_name, scenario)


async def test_time_beyond_the_longest_delay_is_refused(broker: Broker, topic: str, java: JavaClient) -> None:
    """The broker refuses a time beyond timerMaxDelaySec: three days in RocketMQ; a broker with a longer horizon says so
    in its settings."""
    settings = await java.admin(broker.nameserver).broker_config(broker.address)
    beyond = _now_ms() + int(settings["timerMaxDelaySec"]) * 1000 + DAY_MS
    wrong = [
        {"TIMER_DELIVER_MS": str(beyond)},
        {"TIMER_DELAY_SEC": str(int(settings["timerMaxDelaySec"]) + 60)},
        {"TIMER_DELIVER_MS": "tomorrow"},
        {"TIMER_DELAY_MS": "1.5"},
    ]
    async with await java.producer(broker.nameserver, retries=0) as producer:
        messages = [Outgoing(b"far", properties=properties) for properties in wrong]
        results = await producer.send(topic, messages, check=False)
    for result in results:
        assert isinstance(result.error, CallError)
        assert result.error.code == MESSAGE_ILLEGAL


async def test_refused_timer_message_is_tried_again_after_the_delay_of_a_retry(
    broker: Broker, clients: ClientPool, java: JavaClient, together: Together, client_name: str
) -> None:
    """The broker delivers a refused timer message again after the delay of a retry: not at once, and not after its own
    delay, as it has a level then."""

    async def scenario(name: str) -> None:
        client = await clients.get(name)
        admin = java.admin(broker.nameserver)
        topic, group = unique("topic"), unique("group")
        await admin.create_topic(broker.address, topic, QUEUES)
        await admin.create_topic(broker.address, f"%RETRY%{group}", 1)
        async with (
            await client.producer(broker.nameserver) as producer,
            await client.consumer(
                broker.nameserver, group, topic, fail_first=1, property_names=("DELAY", "REAL_TOPIC")
            ) as consumer,
        ):
            now = _now_ms()
            due = {b"time": now + 1500, b"delay": now + 1500}
            await producer.send(
                topic,
                [
                    _timed(b"time", due[b"time"], keys="k"),
                    Outgoing(b"delay", keys="k", properties={"TIMER_DELAY_MS": "1500"}),
                ],
            )
            received = await consumer.until(lambda got: sum(m.reconsume_times == 1 for m in got) >= len(due))
        for body, at in due.items():
            tries = [message for message in received if message.body == body]
            assert tries[0].store_time >= at
            assert tries[-1].keys == "k"
            assert tries[-1].properties["DELAY"] == str(RETRY_LEVEL)
            if gap(name, Can.SHOW_EACH_TRY) is None:
                assert [message.reconsume_times for message in tries] == [0, 1]
                assert tries[1].store_time >= tries[0].receive_time + LEVEL_MS[RETRY_LEVEL - 1]

    await together.run("retry", client_name, scenario)


async def test_methods_of_the_library_do_what_the_properties_do(
    broker: Broker, topic: str, clients: ClientPool
) -> None:
    client = await clients.java("5.3.3")
    need(client, Can.TIMER_METHODS)
    async with (
        await client.producer(broker.nameserver) as producer,
        await client.consumer(broker.nameserver, unique("group"), topic) as consumer,
    ):
        now = _now_ms()
        timers = {b"at": {"deliver_ms": now + 1234}, b"ms": {"delay_ms": 1234}, b"sec": {"delay_sec": 1}}
        await producer.send(topic, [Outgoing(body, timer=timer) for body, timer in timers.items()])
        received = {message.body: message for message in await consumer.receive(len(timers))}
    for body, timer in timers.items():
        assert received[body].store_time >= now + (1000 if "delay_sec" in timer else 1234)


async def test_the_last_message_of_a_key_replaces_the_ones_before(broker: Broker, topic: str, java: JavaClient) -> None:
    not_on(broker, "apache-5.3.3", "the property is duemq's: it delivers all of them")
    async with (
        await java.producer(broker.nameserver) as producer,
        await java.consumer(broker.nameserver, unique("group"), topic) as consumer,
    ):
        at = _now_ms() + 3000
        for number, due in enumerate((at + 9000, at, at - 1000, at + 1000)):
            properties = {"TIMER_DELIVER_MS": str(due), "TIMER_REPLACE": "true"}
            # By the client's own selector: all messages of one key go to one queue.
            message = Outgoing(b"%d" % number, keys="4711", properties=properties, sharding="4711")
            (result,) = await producer.send(topic, [message])
            assert result.error is None
        await producer.send(topic, [_timed(b"after all", at + 11_000)])
        await each_once(producer, topic, QUEUES, [consumer], [b"3", b"after all"])


# --- the broker goes away, or a setting stops the timers


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_timers_outlive_the_broker(brokers: BrokerFactory, target: str, java: JavaClient, end: str) -> None:
    """After a restart the broker delivers each remaining timer: those that became due while it was down at once, the
    others at their times."""
    broker = brokers.make(target, {})
    await broker.start()
    admin = java.admin(broker.nameserver)
    topic = await make_topic(admin, broker, QUEUES)
    chance = random.Random(end)
    start = _now_ms() + 1500
    # RocketMQ's broker takes 5 s to start and up to 17 s to stop.
    span = 5000 if broker.kind == "duemq" else 30_000 if end == "stop" else 12_000
    times = [start + chance.randrange(span) for _ in range(1000)]
    bodies = [b"%d %d" % (at, number) for number, at in enumerate(times)]
    async with await java.producer(broker.nameserver) as producer:
        messages = [_timed(body, at) for body, at in zip(bodies, times, strict=True)]
        await producer.send(topic, messages, "async")

    async def stored() -> int:
        return sum(queue.max for queue in (await admin.topic_stats(topic)).values())

    await eventually(stored, lambda found: found >= len(bodies) // 10)
    await (broker.stop() if end == "stop" else broker.kill())
    ended = _now_ms()
    assert max(times) > ended, "this machine was too slow: all were due before the broker was gone"
    await broker.start()
    up = _now_ms()
    await eventually(partial(admin.route, topic), timeout=60)
    await eventually(stored, lambda found: found >= len(bodies), timeout=60)

    async def delivered() -> list[Received]:
        return [message for queue in range(QUEUES) for message in await java.pull_all(broker.nameserver, topic, queue)]

    # A broker of Apache's that was killed delivers some a second time, before it has delivered all.
    found = await eventually(delivered, lambda found: {message.body for message in found} == set(bodies), timeout=60)
    counts = Counter(message.body for message in found)
    assert [message.body for message in found if message.store_time < int(message.body.split()[0])] == []
    if broker.kind == "duemq" or end == "stop":
        assert {body: count for body, count in counts.items() if count != 1} == {}
    assert any(message.store_time < ended for message in found)
    assert any(ended < at < up for at in times), "none was due while the broker was gone"


@alone
@pytest.mark.parametrize("setting", ["timerStopEnqueue", "timerStopDequeue"])
async def test_what_is_stopped_goes_on_when_it_is_told(
    broker: Broker, topic: str, java: JavaClient, admin: Admin, setting: str
) -> None:
    if setting == "timerStopDequeue":
        not_on(broker, "apache-5.3.3", "it has no setter for that property: an update is taken and has no effect")
    async with (
        await java.producer(broker.nameserver) as producer,
        await java.consumer(broker.nameserver, unique("group"), topic) as consumer,
    ):
        await admin.update_broker_config(broker.address, **{setting: "true"})
        try:
            assert (await admin.broker_config(broker.address))[setting] == "true"
            await producer.send(topic, [_timed(b"held", _now_ms() + 500)])
            # RocketMQ's timer would have delivered the message a second after it was due, duemq's at once.
            await producer.send(topic, [Outgoing(b"2 s later", level=2)])
            await consumer.receive_bodies([b"2 s later"])
            assert consumer.bodies == [b"2 s later"]
        finally:
            await admin.update_broker_config(broker.address, **{setting: "false"})
        await consumer.receive_bodies([b"held"])


async def test_figures_of_the_timers_have_the_names_of_rocketmq(
    broker: Broker, topic: str, java: JavaClient, admin: Admin
) -> None:
    async with await java.producer(broker.nameserver) as producer:
        (result,) = await producer.send(topic, [_timed(b"tomorrow", _now_ms() + DAY_MS)])
    assert result.queue_offset is not None
    table = await eventually(
        partial(admin.runtime_stats, broker.address), lambda found: found["timerOffsetBehind"] == "0"
    )
    assert int(table["timerCongestNum"]) >= 1
    int(table["timerReadBehind"])
    for name in ("timerEnqueueTps", "timerDequeueTps"):
        assert re.fullmatch(r"\d+\.\d+(E-?\d+)?", table[name])
    # The timers' own queue can be inspected like any other.
    stats = await admin.topic_stats(TIMER)
    assert stats[f"{TIMER}@0"].max > result.queue_offset


async def test_checkpoint_and_metrics_are_told_as_replicas_read_them(
    broker: Broker, topic: str, java: JavaClient
) -> None:
    """The broker answers GET_TIMER_CHECK_POINT (60) and GET_TIMER_METRICS (61), which no client has a method for."""
    async with await java.producer(broker.nameserver) as producer:
        _, result = await producer.send(topic, [_timed(b"1", _now_ms() + DAY_MS), _timed(b"2", _now_ms() + DAY_MS)])
    last = result.queue_offset
    assert last is not None

    async def ask(code: int) -> bytes:
        def exchange() -> bytes:
            with Remote((HOST, broker.port)) as remote:
                (answer,) = remote.requests(code, [{}])
            assert answer.code == 0
            return bytes(answer.body)

        return await asyncio.to_thread(exchange)

    body = await eventually(partial(ask, 60), lambda found: struct.unpack(">7q", found)[2] > last)
    read_ms = struct.unpack(">7q", body)[0]
    assert read_ms % 1000 == 0
    assert read_ms <= _now_ms() + 1000
    metrics = json.loads(await ask(61))
    assert metrics["timingCount"][topic]["count"] == 2
    assert set(metrics["timingCount"][topic]) == {"count", "timeStamp"}


# --- recall


async def _recalling(broker: Broker, clients: ClientPool, topic: str) -> tuple[Producer, PushConsumer]:
    client = await clients.java(RECALLS.removeprefix("java-"))
    need(client, Can.RECALL)
    return (
        await client.producer(broker.nameserver, retries=0),
        await client.consumer(broker.nameserver, unique("group"), topic),
    )


async def test_recalled_message_never_comes_and_its_neighbours_do(
    broker: Broker, topic: str, clients: ClientPool
) -> None:
    producer, consumer = await _recalling(broker, clients, topic)
    async with producer, consumer:
        second = (_now_ms() // 1000 + 4) * 1000
        times = [second + 1 + n * 200 for n in range(5)]
        bodies = [b"first", b"recalled", b"third", b"recalled too", b"fifth"]
        results = await producer.send(topic, [_timed(body, at) for body, at in zip(bodies, times, strict=True)])
        for index in (1, 3):
            handle, msg_id = results[index].recall_handle, results[index].msg_id
            assert handle is not None
            assert await producer.recall(topic, handle) == msg_id
        # The seconds are delivered in order, so this message arrives after those would have.
        await producer.send(topic, [_timed(b"next second", second + 2000)])
        await each_once(producer, topic, QUEUES, [consumer], [b"first", b"third", b"fifth", b"next second"])
        assert not set(consumer.bodies) & {b"recalled", b"recalled too"}


async def test_recall_that_comes_too_late_or_for_another_topic_is_refused_and_a_second_one_is_not(
    broker: Broker, topic: str, new_topic: Callable[[int], Awaitable[str]], clients: ClientPool
) -> None:
    producer, consumer = await _recalling(broker, clients, topic)
    async with producer, consumer:
        soon, later = _now_ms() + 1000, _now_ms() + DAY_MS
        delivered, recalled, other = await producer.send(
            topic, [_timed(b"soon", soon), _timed(b"later", later), _timed(b"other", later)]
        )
        assert delivered.recall_handle is not None
        assert recalled.recall_handle is not None
        assert other.recall_handle is not None
        await consumer.receive_bodies([b"soon"])
        for _ in range(2):
            assert await producer.recall(topic, recalled.recall_handle) == recalled.msg_id
        for of_topic, handle in ((topic, delivered.recall_handle), (await new_topic(1), other.recall_handle)):
            with pytest.raises(CallError) as error:
                await producer.recall(of_topic, handle)
            assert error.value.code == ILLEGAL_OPERATION
        assert consumer.bodies == [b"soon"]


@alone
async def test_recall_is_refused_where_it_is_not_enabled(
    broker: Broker, topic: str, clients: ClientPool, admin: Admin
) -> None:
    """The broker refuses a recall unless recallMessageEnable is set, which is off by default. It returns the handle all
    the same."""
    producer, consumer = await _recalling(broker, clients, topic)
    async with producer, consumer:
        (result,) = await producer.send(topic, [_timed(b"kept", _now_ms() + 2500)])
        assert result.recall_handle is not None
        await admin.update_broker_config(broker.address, recallMessageEnable="false")
        try:
            with pytest.raises(CallError) as refused:
                await producer.recall(topic, result.recall_handle)
        finally:
            await admin.update_broker_config(broker.address, recallMessageEnable="true")
        assert refused.value.code == 16  # NO_PERMISSION
        await consumer.receive_bodies([b"kept"])
