"""A group receives messages with a sharding key in the order in which they were sent, whichever consumer gets them."""

from collections import defaultdict

from duemq.protocol.codes import RequestCode
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.fastjson import dumps
from duemq.protocol.requests.bodies import ConsumerData, HeartbeatData, SubscriptionData
from tests.interop.environment import ClientPool, Together
from tests.interop.support import Wire, share_queues
from tests.peers.brokers.broker import Broker
from tests.peers.clients import JavaClient, unique, until
from tests.peers.messages import Outgoing
from tests.support.wire import request

QUEUES = 4
KEYS = 10
EACH = 30


def _heartbeat(client_id: str, group: str, topic: str) -> Command:
    member = ConsumerData(group, subscription_data_set=[SubscriptionData(topic, "*", 1)])
    return request(RequestCode.HEART_BEAT, body=dumps(HeartbeatData(client_id, [], [member])))


async def test_each_key_is_consumed_in_order_by_one_of_two_consumers(
    broker: Broker, clients: ClientPool, java: JavaClient, together: Together, client_name: str
) -> None:
    async def scenario(name: str) -> None:
        client = await clients.get(name)
        topic, group = unique("ordered"), unique("group")
        await java.admin(broker.nameserver).create_topic(broker.address, topic, QUEUES)
        messages = [
            Outgoing(f"{key}/{n}".encode(), sharding=f"order-{key}") for n in range(EACH) for key in range(KEYS)
        ]
        bodies = {message.body for message in messages}
        # Go never unlocks queues that it gives up, so the next member gets them when the locks have expired, a minute
        # later. With a third member behind the two neither gets a queue that it has to give up: first one has half of
        # them, then the other one of the rest, and both when the third has left.
        async with Wire(broker) as third:
            await third.ask(_heartbeat("~", group, topic))
            one = await client.consumer(broker.nameserver, group, topic, orderly=True)
            other = await client.consumer(broker.nameserver, group, topic, orderly=True)
        async with await client.producer(broker.nameserver) as producer, one, other:
            await share_queues(producer, topic, QUEUES, [one, other])
            await producer.send(topic, messages)
            await until(lambda: bodies <= {*one.bodies, *other.bodies}, [one, other])
        owners: dict[str, set[int]] = defaultdict(set)
        order: dict[str, list[int]] = defaultdict(list)
        for number, consumer in enumerate((one, other)):
            for message in consumer.messages:
                if message.body in bodies:
                    key, _, n = message.body.decode().partition("/")
                    owners[key].add(number)
                    order[key].append(int(n))
        assert all(numbers == list(range(EACH)) for numbers in order.values()), order
        assert all(len(who) == 1 for who in owners.values())

    await together.run("ordered", client_name, scenario)


async def test_message_that_fails_holds_up_its_queue(broker: Broker, topic: str, java: JavaClient) -> None:
    """An ordered consumer gets a message that it failed again before the ones after it, from the client's memory."""
    messages = [Outgoing(f"{n}".encode(), sharding="one") for n in range(10)]
    async with (
        await java.producer(broker.nameserver) as producer,
        await java.consumer(broker.nameserver, unique("group"), topic, orderly=True, fail_first=2) as consumer,
    ):
        await producer.send(topic, messages)
        received = await consumer.receive(30)
    assert [message.body for message in received] == [message.body for message in messages for _ in range(3)]
    assert [message.reconsume_times for message in received] == [0, 1, 2] * 10
