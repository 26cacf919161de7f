"""The broker under test with Apache's name server: it registers, stays registered, leaves, and comes back on its
own."""

from functools import partial

import pytest

from tests.interop.environment import BrokerFactory
from tests.interop.support import eventually, numbered
from tests.peers.admin import QueueRoute
from tests.peers.brokers.apache import ApacheNameServer
from tests.peers.brokers.broker import BROKER, CLUSTER
from tests.peers.clients import JavaClient, unique
from tests.peers.errors import CallError

TOPIC_NOT_EXIST = 17


async def test_clients_find_the_broker_through_apaches_name_server(
    brokers: BrokerFactory, target: str, java: JavaClient
) -> None:
    nameserver = ApacheNameServer("4.9.7", brokers.directory / "nameserver")
    await nameserver.start()
    # The period is 30 s by default, and at least 10 s.
    broker = brokers.make(target, {"registerNameServerPeriod": "10000"}, nameserver=nameserver.address)
    try:
        await broker.start()
        admin = java.admin(nameserver.address)
        # The broker listens before the name server has answered.
        await eventually(admin.cluster, lambda found: found == ({CLUSTER: [BROKER]}, {BROKER: {"0": broker.address}}))
        topic, group = unique("topic"), unique("group")
        await admin.create_topic(broker.address, topic, 4)
        assert (await admin.route(topic)).queues == [QueueRoute(BROKER, 4, 4, 6)]
        async with (
            await java.producer(nameserver.address) as producer,
            await java.consumer(nameserver.address, group, topic) as consumer,
        ):
            await producer.send(topic, numbered("plain", 20))
            await producer.send("created_on_the_way", numbered("new", 1))
            await consumer.receive_bodies([message.body for message in numbered("plain", 20)])
        assert {topic, "created_on_the_way", f"%RETRY%{group}"} <= set(await admin.topics())

        # A restarted name server remembers nothing: the broker registers everything again.
        await nameserver.stop()
        await nameserver.start()
        route = await eventually(partial(admin.route, topic), timeout=40)
        assert route.queues == [QueueRoute(BROKER, 4, 4, 6)]

        # A broker that stops unregisters, and its topics are gone at once.
        await broker.stop()
        with pytest.raises(CallError) as refused:
            await admin.route(topic)
        assert refused.value.code == TOPIC_NOT_EXIST
    finally:
        await nameserver.kill()
