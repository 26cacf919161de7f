"""A message that a consumer refuses is delivered again, later each time, and ends in the dead letter queue of its
group.

Tests that only need the messages make the group's retry topic beforehand: the Go client looks again for a missing route
only 30 seconds after its start.
"""

from functools import partial

from tests.interop.environment import LEVEL_MS, ClientPool, Together
from tests.interop.support import eventually, not_on
from tests.peers.admin import Admin, Progress
from tests.peers.brokers.broker import Broker
from tests.peers.capabilities import Can, gap
from tests.peers.clients import Client, JavaClient, unique
from tests.peers.messages import Outgoing

TIMES = 2
NEVER = 99
_NO_ORIGIN_TOPIC = (
    "it fails with a NullPointerException (TopicValidator.isSystemTopic) on its way to the dead letter queue when a "
    "send-back (code 36) has no originTopic, and librocketmq sends none: the message is lost"
)


async def test_refused_message_is_tried_again_and_then_put_aside(
    broker: Broker, clients: ClientPool, java: JavaClient, together: Together, client_name: str
) -> None:
    async def scenario(name: str) -> None:
        if name == "cpp" and broker.kind == "apache-5.3.3":
            return
        client = await clients.get(name)
        admin = java.admin(broker.nameserver)
        topic, group = unique("topic"), unique("group")
        await admin.create_topic(broker.address, topic, 4)
        await admin.create_group(broker.address, group, retry_max_times=TIMES)
        await admin.create_topic(broker.address, f"%RETRY%{group}", 1)
        times = TIMES if gap(name, Can.MAX_RECONSUME_TIMES) is None else None  # else the group's limit counts
        async with (
            await client.producer(broker.nameserver) as producer,
            await client.consumer(
                broker.nameserver, group, topic, fail_first=NEVER, max_reconsume_times=times
            ) as consumer,
            await java.consumer(broker.nameserver, unique("watcher"), f"%DLQ%{group}") as watcher,
        ):
            (result,) = await producer.send(topic, [Outgoing(b"unwelcome", tags="t", keys="k")])
            tries = list(await consumer.receive(1 + TIMES))
            (dead,) = await watcher.receive(1)
            assert len(consumer.messages) == 1 + TIMES
        assert [message.reconsume_times for message in tries] == list(range(1 + TIMES))
        for earlier, later, level in zip(tries, tries[1:], range(3, 3 + TIMES), strict=False):
            assert later.store_time >= earlier.receive_time + LEVEL_MS[level - 1]
        for message in [*tries, dead]:
            assert (message.body, message.tags, message.keys) == (b"unwelcome", "t", "k")
            assert message.properties["UNIQ_KEY"] == result.msg_id
        assert {message.topic for message in tries} == {topic}
        assert dead.topic == f"%DLQ%{group}"
        assert dead.queue_id == 0
        assert dead.properties["RETRY_TOPIC"] == topic
        if result.offset_msg_id is not None:
            assert dead.properties["ORIGIN_MESSAGE_ID"] == result.offset_msg_id

    if client_name == "cpp":
        not_on(broker, "apache-5.3.3", _NO_ORIGIN_TOPIC)
    await together.run("retry", client_name, scenario)


def _is_all_consumed(table: dict[str, Progress]) -> bool:
    return all(queue.broker == queue.consumer for queue in table.values())


async def test_message_is_consumed_at_the_second_try(
    broker: Broker, clients: ClientPool, java: JavaClient, together: Together, client_name: str
) -> None:
    async def scenario(name: str) -> None:
        client = await clients.get(name)
        admin = java.admin(broker.nameserver)
        topic, group = unique("topic"), unique("group")
        await admin.create_topic(broker.address, topic, 4)
        await admin.create_topic(broker.address, f"%RETRY%{group}", 1)
        async with (
            await client.producer(broker.nameserver) as producer,
            await client.consumer(broker.nameserver, group, topic, fail_first=1) as consumer,
        ):
            await producer.send(topic, [Outgoing(f"{n}".encode()) for n in range(10)])
            received = await consumer.until(lambda got: sum(m.reconsume_times == 1 for m in got) >= 10)
            if gap(name, Can.STORE_WHAT_IS_CONSUMED) is not None:  # an open consumer stores offsets every 5 s
                await eventually(partial(admin.consume_stats, group), _is_all_consumed, timeout=40)
        counts = {body: [m.reconsume_times for m in received if m.body == body] for body in consumer.bodies}
        if gap(name, Can.SHOW_EACH_TRY) is None:
            assert counts == {f"{n}".encode(): [0, 1] for n in range(10)}
        else:
            assert {body: times[-1] for body, times in counts.items()} == {f"{n}".encode(): 1 for n in range(10)}
        # Both copies count as consumed, on the topic and on the group's retry topic.
        progress = await eventually(partial(admin.consume_stats, group), _is_all_consumed)
        assert f"%RETRY%{group}@0" in progress

    await together.run("second try", client_name, scenario)


async def test_retry_topic_is_in_the_route_from_the_first_heartbeat(
    broker: Broker, topic: str, client: Client, admin: Admin
) -> None:
    group = unique("group")
    async with await client.consumer(broker.nameserver, group, topic):
        # The C++ client sends its first heartbeat just after its start has returned.
        (queues,) = (await eventually(partial(admin.route, f"%RETRY%{group}"), timeout=5)).queues
        assert (queues.read, queues.write, queues.perm) == (1, 1, 6)
