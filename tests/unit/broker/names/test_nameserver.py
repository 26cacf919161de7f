"""The embedded name server: routes in both forms, key-value configuration, other brokers that register."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from duemq.broker.names.nameserver import EXPIRE_MS
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames import fastjson
from duemq.protocol.frames.command import Command
from duemq.protocol.requests import bodies
from duemq.protocol.requests.bodies import (
    ConsumerData,
    DataVersion,
    HeartbeatData,
    SubscriptionData,
    TopicConfig,
    TopicRoute,
)
from duemq.protocol.requests.headers import (
    BrokerIdentity,
    BrokerName,
    ClusterName,
    GetRouteInfo,
    KVEntry,
    KVKey,
    KVNamespace,
    RegisterBroker,
    TopicName,
)
from duemq.protocol.requests.registration import encode_registration
from tests.support.broker import Peer, UnboundBroker, running
from tests.support.loop import SteppedLoop, turns
from tests.support.wire import request, send

OWN = "127.0.0.1:10911"
VERSION = DataVersion(timestamp=5, counter=6)


async def route_of(peer: Peer, topic: str, version: int = 407, strict: bool | None = None) -> bytes | None:
    answer = await peer.ask(request(RequestCode.GET_ROUTEINFO_BY_TOPIC, GetRouteInfo(topic, strict), version=version))
    if answer.code == ResponseCode.TOPIC_NOT_EXIST:
        assert (answer.remark or "").startswith(f"No topic route info in name server for the topic: {topic}")
        return None
    assert answer.code == 0, answer.remark
    return bytes(answer.body)


def registration(
    name: str = "broker-b",
    broker_id: int = 0,
    topics: list[TopicConfig] | None = None,
    address: str = "10.0.0.2:10911",
    cluster: str = "DefaultCluster",
    crc: int | None = None,
    body: bytes | None = None,
    compressed: bool = False,
) -> Command:
    table = {config.topic_name: config.to_json() for config in topics or []}
    if body is None:
        body = encode_registration({"dataVersion": VERSION.to_json(), "topicConfigTable": table})
    crc = zlib.crc32(body) & 0x7FFFFFFF if crc is None else crc
    header = RegisterBroker(name, address, cluster, "10.0.0.2:10912", broker_id, compressed, crc)
    return request(RequestCode.REGISTER_BROKER, header, body)


async def register(peer: Peer, *args: Any, **kwargs: Any) -> Command:
    answer = await peer.ask(registration(*args, **kwargs))
    assert answer.code == 0, answer.remark
    return answer


# --- routes


@pytest.mark.parametrize(
    ("version", "strict", "quoted"),
    [
        (317, None, False),
        (400, None, False),
        (401, None, True),
        (407, None, True),
        (317, True, True),
        (317, False, False),
    ],
)
async def test_old_clients_get_ids_without_quotes(peer: Peer, version: int, strict: bool | None, quoted: bool) -> None:
    await peer.ask(send("T"))
    body = await route_of(peer, "T", version, strict)
    addresses = b'{"0":"127.0.0.1:10911"}' if quoted else b'{0:"127.0.0.1:10911"}'
    assert body == (
        b'{"brokerDatas":[{"brokerAddrs":%b,"brokerName":"broker-a","cluster":"DefaultCluster"}],"filterServerTable":'
        b'{},"queueDatas":[{"brokerName":"broker-a","perm":6,"readQueueNums":4,"writeQueueNums":4,"topicSysFlag":0}]}'
        % addresses
    )


async def test_a_topic_is_routable_as_soon_as_there_is_one(peer: Peer) -> None:
    assert await route_of(peer, "T") is None
    assert await route_of(peer, "TBW102") is not None
    await peer.ask(send("T"))
    assert await route_of(peer, "T") is not None
    await peer.ask(request(RequestCode.DELETE_TOPIC_IN_BROKER, TopicName("T")))
    assert await route_of(peer, "T") is None


async def test_brokers_and_clusters_are_told(peer: Peer) -> None:
    await register(peer, "broker-b", cluster="Other")
    answer = await peer.ask(request(RequestCode.GET_BROKER_CLUSTER_INFO))
    info = fastjson.loads(bytes(answer.body))
    assert info["clusterAddrTable"] == {"DefaultCluster": ["broker-a"], "Other": ["broker-b"]}
    assert info["brokerAddrTable"]["broker-b"]["brokerAddrs"] == {"0": "10.0.0.2:10911"}
    answer = await peer.ask(request(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS))
    body = json.loads(bytes(answer.body))
    assert body["brokerAddr"] == OWN
    assert set(body["topicList"]) == {"DefaultCluster", "broker-a", "Other", "broker-b"}


async def test_topics_are_listed_by_cluster_and_in_all(peer: Peer) -> None:
    async def names(code: int, header: ClusterName | None = None) -> set[str]:
        answer = await peer.ask(request(code, header))
        return set(json.loads(bytes(answer.body))["topicList"])

    await register(peer, topics=[TopicConfig("Theirs")], cluster="Other")
    everywhere = await names(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
    assert {"Theirs", "TBW102", "SELF_TEST_TOPIC"} <= everywhere
    assert await names(RequestCode.GET_TOPICS_BY_CLUSTER, ClusterName("Other")) == {"Theirs"}
    assert await names(RequestCode.GET_TOPICS_BY_CLUSTER, ClusterName("DefaultCluster")) == everywhere - {"Theirs"}
    assert await names(RequestCode.GET_TOPICS_BY_CLUSTER, ClusterName("nowhere")) == set()


# --- key-value configuration


async def test_values_are_kept_over_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        peer = broker.connect()
        assert (await peer.ask(request(RequestCode.PUT_KV_CONFIG, KVEntry("n", "k", "v")))).code == 0
        assert (await peer.ask(request(RequestCode.PUT_KV_CONFIG, KVEntry("n", "other", "w")))).code == 0
        assert (await peer.ask(request(RequestCode.DELETE_KV_CONFIG, KVKey("n", "other")))).code == 0
        assert (await peer.ask(request(RequestCode.DELETE_KV_CONFIG, KVKey("n", "missing")))).code == 0
    async with running(tmp_path) as broker:
        peer = broker.connect()
        assert (await peer.ask(request(RequestCode.GET_KV_CONFIG, KVKey("n", "k")))).ext == {"value": "v"}
        answer = await peer.ask(request(RequestCode.GET_KVLIST_BY_NAMESPACE, KVNamespace("n")))
        assert json.loads(bytes(answer.body)) == {"table": {"k": "v"}}
        missing = [
            request(RequestCode.GET_KV_CONFIG, KVKey("n", "other")),
            request(RequestCode.GET_KV_CONFIG, KVKey("m", "k")),
            request(RequestCode.GET_KVLIST_BY_NAMESPACE, KVNamespace("m")),
        ]
        assert {answer.code for answer in await peer.ask_all(missing)} == {ResponseCode.QUERY_NOT_FOUND}


async def test_the_order_of_a_topic_is_part_of_its_route_and_told_to_brokers(peer: Peer) -> None:
    await peer.ask(send("T"))
    assert (await register(peer)).body == b""
    await peer.ask(request(RequestCode.PUT_KV_CONFIG, KVEntry("ORDER_TOPIC_CONFIG", "T", "broker-a:4")))
    assert bodies.decode(await route_of(peer, "T") or b"", TopicRoute).order_topic_conf == "broker-a:4"
    answer = await register(peer)
    assert json.loads(bytes(answer.body)) == {"table": {"T": "broker-a:4"}}


# --- other brokers


async def test_another_brokers_topics_are_routed_beside_the_own(peer: Peer) -> None:
    await peer.ask(send("T"))
    await register(peer, topics=[TopicConfig("T", 2, 3, 4), TopicConfig("Theirs", 1, 1, 6)])
    route = bodies.decode(await route_of(peer, "T") or b"", TopicRoute)
    assert [(queues.broker_name, queues.read_queue_nums, queues.perm) for queues in route.queue_datas] == [
        ("broker-b", 2, 4), ("broker-a", 4, 6),
    ]  # fmt: skip
    assert {broker.broker_name for broker in route.broker_datas} == {"broker-a", "broker-b"}
    route = bodies.decode(await route_of(peer, "Theirs") or b"", TopicRoute)
    assert [broker.broker_addrs for broker in route.broker_datas] == [{0: "10.0.0.2:10911"}]


def packed_registration() -> bytes:
    def text(data: bytes) -> bytes:
        return struct.pack(">i", len(data)) + data

    version = text(fastjson.dumps(VERSION.to_json()))
    return zlib.compress(version + struct.pack(">i", 1) + text(b"Theirs 2 3 6 SINGLE_TAG") + text(b"[]"))


async def test_a_compressed_registration_says_the_same(peer: Peer) -> None:
    await register(peer, body=packed_registration(), compressed=True)
    route = bodies.decode(await route_of(peer, "Theirs") or b"", TopicRoute)
    assert [(queues.read_queue_nums, queues.write_queue_nums) for queues in route.queue_datas] == [(2, 3)]


async def test_a_replica_has_an_address_but_no_topics_and_learns_its_primary(peer: Peer) -> None:
    await register(peer, topics=[TopicConfig("Theirs")])
    answer = await register(peer, broker_id=1, topics=[TopicConfig("Replicated")], address="10.0.0.3:10911")
    assert answer.ext == {"masterAddr": "10.0.0.2:10911", "haServerAddr": "10.0.0.2:10912"}
    route = bodies.decode(await route_of(peer, "Theirs") or b"", TopicRoute)
    assert route.broker_datas[0].broker_addrs == {0: "10.0.0.2:10911", 1: "10.0.0.3:10911"}
    assert await route_of(peer, "Replicated") is None


async def test_a_replica_of_the_own_broker_is_told_beside_it(peer: Peer) -> None:
    await register(peer, "broker-a", 1, address="10.0.0.3:10911")
    route = bodies.decode(await route_of(peer, "TBW102") or b"", TopicRoute)
    assert route.broker_datas[0].broker_addrs == {0: OWN, 1: "10.0.0.3:10911"}


async def test_nobody_takes_the_own_brokers_name(peer: Peer) -> None:
    answer = await peer.ask(registration("broker-a", 0))
    assert (answer.code, "broker-a" in (answer.remark or "")) == (ResponseCode.SYSTEM_ERROR, True)


async def test_a_damaged_registration_is_refused(broker: UnboundBroker, peer: Peer) -> None:
    for command in (
        registration(crc=12345),
        registration(body=b"[]"),
        registration(body=b'{"topicConfigSerializeWrapper":{"topicConfigTable":{"T":7}}}'),
        registration(body=b'{"topicConfigSerializeWrapper":{"topicConfigTable":{"T":{"perm":1e30}}}}'),
        registration(body=b"no zlib", compressed=True),
    ):
        answer = await peer.ask(command)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert answer.remark
    assert broker.nameserver._brokers == {}
    assert (await peer.ask(registration(crc=0))).code == 0


@pytest.mark.parametrize("count", [-1, 65_537, 2**31 - 1])
async def test_a_topic_of_more_queues_than_clients_survive_is_refused(
    broker: UnboundBroker, peer: Peer, count: int
) -> None:
    for topic in (TopicConfig("T", read_queue_nums=count), TopicConfig("T", write_queue_nums=count)):
        answer = await peer.ask(registration(topics=[topic]))
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert f"the topic T has {count} queues" in (answer.remark or "")
    assert broker.nameserver._brokers == {}


async def test_a_broker_that_leaves_is_forgotten(broker: UnboundBroker, peer: Peer) -> None:
    identity = BrokerIdentity("broker-b", "10.0.0.2:10911", "DefaultCluster", 0)
    await register(peer, topics=[TopicConfig("Theirs")])
    assert (await peer.ask(request(RequestCode.UNREGISTER_BROKER, identity))).code == 0
    assert await route_of(peer, "Theirs") is None

    other = broker.connect()
    await register(other, topics=[TopicConfig("Theirs")])
    assert await route_of(peer, "Theirs") is not None
    other.transport.abort()
    await turns()
    assert await route_of(peer, "Theirs") is None


async def test_a_broker_that_came_back_over_another_connection_stays(broker: UnboundBroker, peer: Peer) -> None:
    old, new = broker.connect(), broker.connect()
    await register(old, topics=[TopicConfig("Theirs")])
    await register(new, topics=[TopicConfig("Theirs")])
    old.transport.abort()
    await turns()
    assert await route_of(peer, "Theirs") is not None


async def test_a_silent_broker_is_forgotten_after_two_minutes(
    broker: UnboundBroker, peer: Peer, loop: SteppedLoop
) -> None:
    await register(peer, topics=[TopicConfig("Theirs")])
    broker.clock.advance(EXPIRE_MS)
    loop.advance(10)
    await turns()
    assert await route_of(peer, "Theirs") is not None
    broker.clock.advance(1)
    loop.advance(10)
    await turns()
    assert await route_of(peer, "Theirs") is None


@pytest.mark.parametrize("step_ms", [-3_600_000, 3_600_000])
async def test_setting_the_wall_clock_forgets_no_broker_and_keeps_none(
    broker: UnboundBroker, peer: Peer, loop: SteppedLoop, step_ms: int
) -> None:
    await register(peer, topics=[TopicConfig("Theirs")])
    broker.clock.set_wall(broker.clock.now_ms() + step_ms)
    loop.advance(10)
    await turns()
    assert await route_of(peer, "Theirs") is not None
    broker.clock.advance(EXPIRE_MS + 1)
    loop.advance(10)
    await turns()
    assert await route_of(peer, "Theirs") is None


async def test_a_topic_is_forgotten_until_its_broker_registers_again(peer: Peer) -> None:
    await register(peer, topics=[TopicConfig("Theirs")])
    assert (await peer.ask(request(RequestCode.DELETE_TOPIC_IN_NAMESRV, TopicName("Theirs")))).code == 0
    assert await route_of(peer, "Theirs") is None
    await register(peer, topics=[TopicConfig("Theirs")])
    assert await route_of(peer, "Theirs") is not None


async def test_a_broker_learns_whether_its_topics_changed(broker: UnboundBroker, peer: Peer) -> None:
    """A broker learns from QUERY_DATA_VERSION whether its topics changed, and the request counts as a sign of life."""

    async def changed(version: DataVersion) -> tuple[str, bytes]:
        identity = BrokerIdentity("broker-b", "10.0.0.2:10911", "DefaultCluster", 0)
        answer = await peer.ask(request(RequestCode.QUERY_DATA_VERSION, identity, fastjson.dumps(version)))
        return answer.ext["changed"], bytes(answer.body)

    assert await changed(VERSION) == ("true", b"")
    await register(peer)
    broker.clock.advance(EXPIRE_MS)
    assert await changed(VERSION) == ("false", fastjson.dumps(VERSION.to_json()))
    broker.nameserver.expire()
    broker.clock.advance(EXPIRE_MS)
    broker.nameserver.expire()
    assert (await changed(DataVersion(5, 7)))[0] == "true"


async def test_a_drained_broker_takes_no_more_sends(broker: UnboundBroker, peer: Peer) -> None:
    await peer.ask(send("T"))
    await peer.ask(registration("other", topics=[TopicConfig("T")]))
    answer = await peer.ask(request(RequestCode.WIPE_WRITE_PERM_OF_BROKER, BrokerName("other")))
    assert (answer.code, answer.ext["wipeTopicCount"]) == (ResponseCode.SUCCESS, "1")
    assert await perms(peer, "T") == {"broker-a": 6, "other": 4}
    own = await peer.ask(request(RequestCode.WIPE_WRITE_PERM_OF_BROKER, BrokerName("broker-a")))
    assert int(own.ext["wipeTopicCount"]) > 1
    assert await perms(peer, "T") == {"broker-a": 4, "other": 4}
    answer = await peer.ask(request(RequestCode.ADD_WRITE_PERM_OF_BROKER, BrokerName("other")))
    assert (answer.code, answer.ext["addTopicCount"]) == (ResponseCode.SUCCESS, "1")
    assert await perms(peer, "T") == {"broker-a": 4, "other": 6}
    nobody = await peer.ask(request(RequestCode.WIPE_WRITE_PERM_OF_BROKER, BrokerName("nobody")))
    assert nobody.ext["wipeTopicCount"] == "0"


async def perms(peer: Peer, topic: str) -> dict[str, int]:
    answer = await peer.ask(request(RequestCode.GET_ROUTEINFO_BY_TOPIC, GetRouteInfo(topic)))
    return {queue["brokerName"]: queue["perm"] for queue in fastjson.loads(bytes(answer.body))["queueDatas"]}


async def test_consumers_take_the_queues_of_a_new_topic_once_they_know_its_route(
    broker: UnboundBroker, loop: SteppedLoop
) -> None:
    """RocketMQ's clients ask for routes every 30 s, and take new queues up to 20 s later unless they are told to."""
    consumer, other, asker = broker.connect(), broker.connect(), broker.connect()

    async def passed() -> None:
        for _ in range(4):
            loop.advance(0.5)
            await turns(5)

    for peer, group, topic in ((consumer, "g", "young"), (other, "elsewhere", "U")):
        beat = HeartbeatData(group, [], [ConsumerData(group, subscription_data_set=[SubscriptionData(topic, "*", 1)])])
        await peer.ask(request(RequestCode.HEART_BEAT, body=fastjson.dumps(beat)))
        peer.requests.clear()
    assert await route_of(asker, "young") is None
    await asker.ask(send("young"))
    await passed()
    assert not consumer.requests, "it does not know the route yet"
    assert await route_of(asker, "young")
    await passed()
    assert [command.code for command in consumer.requests] == [RequestCode.NOTIFY_CONSUMER_IDS_CHANGED]
    assert not other.requests
    await route_of(asker, "young")
    await passed()
    assert len(consumer.requests) == 1, "it is told once"


async def test_of_the_routes_asked_for_in_vain_few_are_remembered(broker: UnboundBroker) -> None:
    peer = broker.connect()
    for number in range(300):
        await route_of(peer, f"t{number}")
    await peer.ask(request(RequestCode.GET_ROUTEINFO_BY_TOPIC, GetRouteInfo("x" * 5000)))
    (missed,) = broker.nameserver._missed.values()
    assert len(missed) == 100
    peer.transport.abort()
    await turns(5)
    assert not broker.nameserver._missed
