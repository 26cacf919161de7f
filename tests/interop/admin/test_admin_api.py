"""The Java admin API (DefaultMQAdminExt), which mqadmin, the dashboard and the exporter are built on."""

from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from duemq.protocol.codes import RequestCode
from duemq.protocol.requests.headers import UnregisterClient
from tests.interop.environment import LEVELS, ClientPool, Together
from tests.interop.support import Wire, eventually, need, not_on, numbered, refused_soon, share_queues
from tests.peers.admin import Admin, QueueRoute
from tests.peers.brokers.broker import BROKER, CLUSTER, Broker
from tests.peers.capabilities import Can, gap
from tests.peers.clients import Client, JavaClient, unique
from tests.peers.errors import CallError
from tests.support.wire import request

TOPIC_NOT_EXIST = 17
CONSUMER_NOT_ONLINE = 206
LANGUAGES = {"java-4.9.7": "JAVA", "java-5.3.3": "JAVA", "go": "GO", "cpp": "CPP"}


async def test_created_topic_is_routable_at_once(broker: Broker, admin: Admin) -> None:
    for queues in (1, 3, 16):
        topic = unique("created")
        await admin.create_topic(broker.address, topic, queues)
        route = await admin.route(topic)
        assert route.queues == [QueueRoute(BROKER, queues, queues, 6)]
        assert route.brokers == {BROKER: {"0": broker.address}}
        assert topic in await admin.topics()


async def test_topic_can_be_changed(broker: Broker, topic: str, admin: Admin) -> None:
    await admin.create_topic(broker.address, topic, 8, perm=4)
    (queues,) = (await admin.route(topic)).queues
    assert queues == QueueRoute(BROKER, 8, 8, 4)


async def test_deleted_topic_is_gone(broker: Broker, topic: str, admin: Admin) -> None:
    await admin.delete_topic(broker.address, topic)
    with pytest.raises(CallError) as refused:
        await admin.route(topic)
    assert refused.value.code == TOPIC_NOT_EXIST
    assert topic not in await admin.topics()


async def test_topic_with_a_forbidden_name_is_refused(broker: Broker, admin: Admin) -> None:
    for name in ("with blank", "a" * 128, "SCHEDULE_TOPIC_XXXX"):
        with pytest.raises(CallError):
            await admin.create_topic(broker.address, name, 1)


async def test_topic_stats_tell_the_ends_of_each_queue(
    broker: Broker, new_topic: Callable[[int], Awaitable[str]], java: JavaClient, admin: Admin
) -> None:
    topic = await new_topic(3)
    async with await java.producer(broker.nameserver) as producer:
        for queue, count in enumerate((5, 0, 2)):
            await producer.send(topic, numbered("message", count), queue_id=queue)
    stats = await eventually(
        partial(admin.topic_stats, topic), lambda table: sum(queue.max for queue in table.values()) == 7
    )
    assert {name: (queue.min, queue.max) for name, queue in stats.items()} == {
        f"{topic}@0": (0, 5),
        f"{topic}@1": (0, 0),
        f"{topic}@2": (0, 2),
    }
    (last,) = (await java.pull(broker.nameserver, topic, 0, 4)).messages
    assert stats[f"{topic}@0"].last_update == last.store_time
    assert stats[f"{topic}@1"].last_update == 0


async def test_consume_stats_tell_how_far_a_group_is(
    broker: Broker, topic: str, client: Client, java: JavaClient, admin: Admin
) -> None:
    group = unique("group")
    async with (
        await client.producer(broker.nameserver) as producer,
        await client.consumer(broker.nameserver, group, topic) as consumer,
    ):
        await producer.send(topic, numbered("read", 20))
        await consumer.receive(20)
    async with await java.producer(broker.nameserver) as producer:
        await producer.send(topic, numbered("unread", 5), queue_id=1)
    progress = await eventually(
        partial(admin.consume_stats, group, topic), lambda table: sum(queue.broker for queue in table.values()) == 25
    )
    assert set(progress) == {f"{topic}@{queue}" for queue in range(4)}
    assert sum(queue.consumer for queue in progress.values()) == 20
    behind = progress[f"{topic}@1"]
    assert behind.broker - behind.consumer == 5
    (last,) = (await java.pull(broker.nameserver, topic, 1, behind.consumer - 1, count=1)).messages
    assert behind.last_time == last.store_time
    assert group in await admin.who_consumes(topic)


async def test_clients_of_a_consumer_group_are_told(broker: Broker, topic: str, client: Client, admin: Admin) -> None:
    group = unique("group")
    async with await client.consumer(broker.nameserver, group, topic):
        connection = await eventually(partial(admin.consumer_connection, group), lambda told: len(told["clients"]) == 1)
        assert {topic, f"%RETRY%{group}"} == set(connection["subscriptions"])
        assert (connection["type"], connection["model"]) == ("CONSUME_PASSIVELY", "CLUSTERING")
        assert [member["language"] for member in connection["clients"]] == [LANGUAGES[client.name]]
        async with Wire(broker) as stranger:
            goodbye = UnregisterClient(connection["clients"][0]["clientId"], None, group)
            assert (await stranger.ask(request(RequestCode.UNREGISTER_CLIENT, goodbye))).code == 0
        assert len((await admin.consumer_connection(group))["clients"]) == 1, "nobody but itself unregisters a client"
    # The Java and the C++ client unregister and wait for the answer; Apache's Go client just closes its connections.
    refused = await refused_soon(partial(admin.consumer_connection, group))
    assert refused.code == CONSUMER_NOT_ONLINE


async def test_clients_of_a_producer_group_are_told(broker: Broker, topic: str, client: Client, admin: Admin) -> None:
    need(client, Can.PRODUCER_KNOWN)
    group = unique("producers")
    async with await client.producer(broker.nameserver, group) as producer:
        await producer.send(topic, numbered("message", 1))
        members = await eventually(partial(admin.producer_connection, group, topic), lambda told: len(told) == 1)
        assert [member["language"] for member in members] == [LANGUAGES[client.name]]
        async with Wire(broker) as stranger:
            goodbye = UnregisterClient(members[0]["clientId"], group)
            assert (await stranger.ask(request(RequestCode.UNREGISTER_CLIENT, goodbye))).code == 0
        assert len(await admin.producer_connection(group, topic)) == 1
    await refused_soon(partial(admin.producer_connection, group, topic))


async def test_running_consumer_is_asked_through_the_broker(
    broker: Broker, topic: str, client: Client, admin: Admin
) -> None:
    group = unique("group")
    async with (
        await client.producer(broker.nameserver) as producer,
        await client.consumer(broker.nameserver, group, topic) as consumer,
    ):
        await share_queues(producer, topic, 4, [consumer])
        connection = await admin.consumer_connection(group)
        info = await admin.running_info(group, connection["clients"][0]["clientId"])
        assert {f"{topic}@{queue}" for queue in range(4)} <= set(info["queues"])


async def test_offsets_of_a_live_group_are_set_back(
    broker: Broker, clients: ClientPool, admin: Admin, together: Together, client_name: str
) -> None:
    """The broker sends an offset reset (code 220) to live consumers, which drop their messages and begin again ten
    seconds later."""

    async def scenario(name: str) -> None:
        client = await clients.get(name)
        if gap(name, Can.RESET_OFFSET) is not None:
            return
        topic, group = unique("topic"), unique("group")
        await admin.create_topic(broker.address, topic, 4)
        async with (
            await client.producer(broker.nameserver) as producer,
            await client.consumer(broker.nameserver, group, topic) as consumer,
        ):
            await share_queues(producer, topic, 4, [consumer])
            messages = numbered("again", 20)
            await producer.send(topic, messages)
            received = await consumer.receive_bodies([message.body for message in messages])
            begin = min(message.store_time for message in received if message.body.startswith(b"again"))
            offsets = await admin.reset_offset(group, topic, begin)
            assert set(offsets) == {f"{topic}@{queue}" for queue in range(4)}
            await consumer.until(lambda got: sum(m.body.startswith(b"again") for m in got) >= 40)

    need(client_name, Can.RESET_OFFSET)
    await together.run("reset offset", client_name, scenario)


async def test_cluster_is_told(broker: Broker, admin: Admin) -> None:
    clusters, brokers = await admin.cluster()
    assert clusters == {CLUSTER: [BROKER]}
    assert brokers == {BROKER: {"0": broker.address}}


async def test_runtime_figures_have_the_names_and_forms_of_rocketmq(
    broker: Broker, topic: str, java: JavaClient, admin: Admin
) -> None:
    before = await admin.runtime_stats(broker.address)
    async with await java.producer(broker.nameserver) as producer:
        await producer.send(topic, numbered("counted", 10))
    table = await eventually(
        partial(admin.runtime_stats, broker.address),
        lambda now: int(now["msgPutTotalTodayNow"]) >= int(before["msgPutTotalTodayNow"]) + 10,
    )
    assert int(table["brokerVersion"]) >= 407
    assert table["brokerVersionDesc"].startswith("V")
    whole_numbers = (
        "bootTimestamp",
        "commitLogMaxOffset",
        "commitLogMinOffset",
        "dispatchBehindBytes",
        "earliestMessageTimeStamp",
        "getMessageEntireTimeMax",
        "msgGetTotalTodayMorning",
        "msgGetTotalTodayNow",
        "msgGetTotalYesterdayMorning",
        "msgPutTotalTodayMorning",
        "msgPutTotalTodayNow",
        "msgPutTotalYesterdayMorning",
        "pageCacheLockTimeMills",
        "pullThreadPoolQueueCapacity",
        "pullThreadPoolQueueHeadWaitTimeMills",
        "pullThreadPoolQueueSize",
        "putMessageEntireTimeMax",
        "putMessageSizeTotal",
        "putMessageTimesTotal",
        "queryThreadPoolQueueCapacity",
        "queryThreadPoolQueueSize",
        "remainTransientStoreBufferNumbs",
        "sendThreadPoolQueueCapacity",
        "sendThreadPoolQueueHeadWaitTimeMills",
        "sendThreadPoolQueueSize",
        "startAcceptSendRequestTimeStamp",
    )
    for name in whole_numbers:
        int(table[name])
    for name in ("commitLogDiskRatio", "consumeQueueDiskRatio", "putMessageAverageSize"):
        float(table[name])
    # for 10 s, 60 s and 600 s, each left out while there are too few samples, though its blank stays
    transferred = "getTransferedTps" if "getTransferedTps" in table else "getTransferredTps"
    for name in ("putTps", "getFoundTps", "getMissTps", "getTotalTps", transferred):
        numbers = table[name].split(" ")
        assert len(numbers) == 3
        float(numbers[0])
    assert table["commitLogDirCapacity"].startswith("Total : ")
    assert table["runtime"].startswith("[ 0 days, ")


async def test_settings_are_told_and_changed(broker: Broker, admin: Admin) -> None:
    settings = await admin.broker_config(broker.address)
    expected = {
        "brokerName": BROKER,
        "brokerClusterName": CLUSTER,
        "brokerId": "0",
        "messageDelayLevel": LEVELS,
        "storePathRootDir": str(broker.store),
        "listenPort": str(broker.port),
    }
    assert expected.items() <= settings.items()
    old = settings["fileReservedTime"]
    await admin.update_broker_config(broker.address, fileReservedTime="48")
    assert (await admin.broker_config(broker.address))["fileReservedTime"] == "48"
    await admin.update_broker_config(broker.address, fileReservedTime=old)


async def test_group_that_may_not_consume_gets_nothing(
    broker: Broker, topic: str, java: JavaClient, admin: Admin
) -> None:
    """The broker refuses the pulls of a group that may not consume; its consumer asks again, and gets every message
    once the group may."""
    group = unique("group")
    await admin.create_group(broker.address, group, enable=False)
    async with (
        await java.producer(broker.nameserver) as producer,
        await java.consumer(broker.nameserver, group, topic) as consumer,
    ):
        await producer.send(topic, numbered("held", 10))
        with pytest.raises(CallError) as refused:
            await java.pull(broker.nameserver, topic, 0, 0, group=group)
        assert refused.value.code == 16  # NO_PERMISSION
        assert consumer.messages == []
        await admin.create_group(broker.address, group, enable=True)
        await consumer.receive(10)


async def test_deleted_group_is_gone(broker: Broker, topic: str, java: JavaClient, admin: Admin) -> None:
    not_on(broker, "apache-5.3.3", "the admin of 4.9.7 says removeOffset, and 5.x listens to cleanOffset")
    group = unique("group")
    async with (
        await java.producer(broker.nameserver) as producer,
        await java.consumer(broker.nameserver, group, topic) as consumer,
    ):
        await producer.send(topic, numbered("message", 10))
        await consumer.receive(10)
    assert group in await admin.who_consumes(topic)
    await admin.delete_group(broker.address, group, remove_offset=True)
    assert group not in await admin.who_consumes(topic)
