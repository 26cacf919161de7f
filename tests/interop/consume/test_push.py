"""Push consumers: sharing a topic, resuming, broadcast, tags, and the offset at which a new group begins."""

from tests.interop.environment import ClientPool, Together
from tests.interop.support import each_once, need, numbered, share_queues
from tests.peers.brokers.broker import Broker
from tests.peers.capabilities import Can
from tests.peers.clients import Client, JavaClient, unique, until
from tests.peers.messages import Outgoing

QUEUES = 4
COUNT = 200


async def test_two_consumers_of_a_group_share_the_queues_and_nothing_comes_twice(
    broker: Broker, clients: ClientPool, java: JavaClient, together: Together, client_name: str
) -> None:
    async def scenario(name: str) -> None:
        client = await clients.get(name)
        topic, group = unique("topic"), unique("group")
        admin = java.admin(broker.nameserver)
        await admin.create_topic(broker.address, topic, QUEUES)
        async with (
            await client.producer(broker.nameserver) as producer,
            await client.consumer(broker.nameserver, group, topic) as one,
            await client.consumer(broker.nameserver, group, topic) as other,
        ):
            await share_queues(producer, topic, QUEUES, [one, other], admin)
            messages = numbered("shared", COUNT)
            await producer.send(topic, messages)
            await each_once(producer, topic, QUEUES, [one, other], [message.body for message in messages])
            assert set(one.bodies) & set(other.bodies) & {message.body for message in messages} == set()
            # The remaining consumer takes over the queues of the other.
            await other.stop()
            await share_queues(producer, topic, QUEUES, [one], admin)
            messages = numbered("alone", COUNT)
            await producer.send(topic, messages)
            await each_once(producer, topic, QUEUES, [one], [message.body for message in messages])

    await together.run("share", client_name, scenario)


async def test_consumer_goes_on_where_its_group_was(broker: Broker, topic: str, client: Client) -> None:
    group = unique("group")
    async with await client.producer(broker.nameserver) as producer:
        first = [message.body for message in numbered("first", COUNT)]
        await producer.send(topic, numbered("first", COUNT))
        async with await client.consumer(broker.nameserver, group, topic) as consumer:
            await consumer.receive_bodies(first)
        await producer.send(topic, numbered("second", COUNT))
        async with await client.consumer(broker.nameserver, group, topic) as consumer:
            bodies = [message.body for message in numbered("second", COUNT)]
            await each_once(producer, topic, QUEUES, [consumer], bodies)
            assert set(consumer.bodies) & set(first) == set()


async def test_broadcast_gives_every_message_to_every_consumer(
    broker: Broker, topic: str, client: Client, java: JavaClient
) -> None:
    group = unique("group")
    async with (
        await client.producer(broker.nameserver) as producer,
        await client.consumer(broker.nameserver, group, topic, model="broadcast") as one,
        await client.consumer(broker.nameserver, group, topic, model="broadcast") as other,
    ):
        # A consumer that begins at the end must have started before the messages are sent.
        for consumer in (one, other):
            await share_queues(producer, topic, QUEUES, [consumer])
        messages = numbered("for-all", COUNT)
        await producer.send(topic, messages)
        for consumer in (one, other):
            await each_once(producer, topic, QUEUES, [consumer], [message.body for message in messages])
    # Broadcast offsets are kept by the clients: the broker has none.
    progress = await java.admin(broker.nameserver).consume_stats(group, topic)
    assert {queue: offsets.consumer for queue, offsets in progress.items() if offsets.consumer > 0} == {}


async def test_subscription_selects_by_tag(broker: Broker, topic: str, client: Client) -> None:
    expression = "red || green"
    async with (
        await client.producer(broker.nameserver) as producer,
        await client.consumer(broker.nameserver, unique("group"), {topic: expression}) as consumer,
    ):
        # "Aa" and "BB" have the same hash code in Java, as have all tags built from them.
        wanted = numbered("red", 20, "red") + numbered("green", 20, "green")
        unwanted = numbered("blue", 20, "blue") + numbered("none", 20) + numbered("redder", 20, "redder")
        mixed = [message for pair in zip(unwanted, wanted * 2, strict=False) for message in pair][: 2 * len(unwanted)]
        await producer.send(topic, [*unwanted, *wanted])
        assert len(mixed) > len(wanted)
        for queue in range(QUEUES):
            await producer.send(topic, [Outgoing(f"end-{queue}".encode(), tags="red")], queue_id=queue)
        await consumer.receive_bodies([f"end-{queue}".encode() for queue in range(QUEUES)])
        await consumer.receive_bodies([message.body for message in wanted])
    assert {message.tags for message in consumer.messages} == {"red", "green"}
    assert len(consumer.messages) == len(wanted) + QUEUES


async def test_tags_with_one_hash_are_told_apart(broker: Broker, topic: str, client: Client) -> None:
    """A consumer of tag `Aa` gets no message of tag `BB`, although the consume queue has only a tag's hash, which is
    the same in Java."""
    async with (
        await client.producer(broker.nameserver) as producer,
        await client.consumer(broker.nameserver, unique("group"), {topic: "Aa"}) as consumer,
    ):
        for queue in range(QUEUES):
            for tag in ("BB", "Aa"):
                await producer.send(topic, [Outgoing(f"{tag}-{queue}".encode(), tags=tag)], queue_id=queue)
        await consumer.receive(QUEUES)
    assert sorted(consumer.bodies) == [f"Aa-{queue}".encode() for queue in range(QUEUES)]


async def test_a_group_that_begins_at_the_end_of_a_young_topic_gets_all_of_it(
    broker: Broker, topic: str, client: Client
) -> None:
    """A new group begins at the end only if the queue has lost its beginning or is not in memory any more, as in
    RocketMQ.

    Here the topic still has its first messages, so the group gets them all, although it asked to begin at the end.
    """
    need(client, Can.CONSUME_FROM)
    async with await client.producer(broker.nameserver) as producer:
        await producer.send(topic, numbered("old", 20))
        async with await client.consumer(broker.nameserver, unique("group"), topic, begin="last") as consumer:
            await consumer.receive_bodies([message.body for message in numbered("old", 20)])


async def test_one_consumer_of_two_topics(broker: Broker, client: Client, java: JavaClient) -> None:
    topics = [unique("topic"), unique("topic")]
    for name in topics:
        await java.admin(broker.nameserver).create_topic(broker.address, name, 2)
    async with (
        await client.producer(broker.nameserver) as producer,
        await client.consumer(broker.nameserver, unique("group"), {topics[0]: "*", topics[1]: "a"}) as consumer,
    ):
        await producer.send(topics[0], numbered("zero", 10))
        await producer.send(topics[1], numbered("one", 10, "a"))
        received = await consumer.receive(20)
    assert {message.topic for message in received} == set(topics)


async def test_clients_of_all_libraries_share_one_group(broker: Broker, clients: ClientPool, java: JavaClient) -> None:
    """Clients of all libraries share the queues of one group: they all allot queues to the sorted list of members in
    the same way."""
    topic, group = unique("topic"), unique("group")
    names = ("java-4.9.7", "java-5.3.3", "go", "cpp")
    admin = java.admin(broker.nameserver)
    await admin.create_topic(broker.address, topic, 8)
    members = [await (await clients.get(name)).consumer(broker.nameserver, group, topic) for name in names]
    try:
        async with await java.producer(broker.nameserver) as producer:
            await share_queues(producer, topic, 8, members, admin)
            messages = numbered("mixed", COUNT)
            await producer.send(topic, messages)
            await until(
                lambda: sum(body.startswith(b"mixed") for member in members for body in member.bodies) >= COUNT, members
            )
            await each_once(producer, topic, 8, members, [message.body for message in messages])
    finally:
        for member in members:
            await member.stop()
