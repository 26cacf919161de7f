"""The memory that clients can take is bounded: a request beyond a limit is refused as a whole, with a remark that says
what to do, and earlier entries stay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from duemq.broker.errors import ConfigError
from duemq.broker.limits import MAX_EXPRESSION_LENGTH, PROPERTIES
from duemq.broker.settings.config import BrokerConfig, load
from duemq.broker.tables import clients as clients_module
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames import fastjson
from duemq.protocol.frames.command import Command
from duemq.protocol.records import batch
from duemq.protocol.records.properties import java_hash
from duemq.protocol.requests.bodies import (
    MAX_REQUEST_BYTES,
    ConsumerData,
    HeartbeatData,
    ProducerData,
    SubscriptionData,
    TopicConfig,
)
from duemq.protocol.requests.headers import (
    ConsumerGroupName,
    ConsumerSendMsgBack,
    CreateTopic,
    DeleteSubscriptionGroup,
    GetRouteInfo,
    KVEntry,
    KVKey,
    TopicName,
    UnregisterClient,
    UpdateConsumerOffset,
)
from tests.support.broker import Peer, UnboundBroker, running
from tests.support.loop import CountBudget, SteppedLoop, turns
from tests.support.wire import pull, request, send
from tests.unit.broker.names.test_nameserver import registration
from tests.unit.broker.tables.test_clients import heartbeat, notices, subscription
from tests.unit.broker.tables.test_topics import create


def producers(client_id: str, *groups: str) -> Command:
    data = HeartbeatData(client_id, [ProducerData(group) for group in groups])
    return request(RequestCode.HEART_BEAT, body=fastjson.dumps(data))


async def refused(peer: Peer, command: Command, code: int, what: str) -> None:
    answer = await peer.ask(command)
    assert answer.code == code, answer.remark
    assert what in (answer.remark or "")


async def change(peer: Peer, **values: object) -> None:
    text = "".join(f"{name}={value}\n" for name, value in values.items())
    assert (await peer.ask(request(RequestCode.UPDATE_BROKER_CONFIG, body=text.encode()))).code == 0


def test_limits_have_the_names_of_their_settings() -> None:
    fields = set(BrokerConfig.__dataclass_fields__)
    assert {f"max_{name}" for name in PROPERTIES.values()} <= fields


# --- heartbeats


async def test_a_connection_is_in_so_many_groups(broker: UnboundBroker, peer: Peer) -> None:
    await change(peer, maxGroupsPerConnection=3)
    assert (await peer.ask(heartbeat("c", "g1", producers=("p1", "p2")))).code == 0
    before = dict(broker.clients.producers), dict(broker.clients.consumers), dict(broker.topics.table)
    for command in (
        producers("c", "p3"),
        producers("other", "p1"),
        heartbeat("c", "g1", "g2"),
        producers("c", *"abcd"),
    ):
        await refused(peer, command, ResponseCode.SYSTEM_ERROR, "maxGroupsPerConnection=3")
    assert (broker.clients.producers, broker.clients.consumers, broker.topics.table) == before
    assert (await peer.ask(heartbeat("c", "g1", producers=("p1", "p2")))).code == 0
    assert (await broker.connect().ask(producers("c", "p3"))).code == 0
    await peer.ask(request(RequestCode.UNREGISTER_CLIENT, UnregisterClient("c", "p1")))
    assert (await peer.ask(producers("c", "p3"))).code == 0


async def test_all_heartbeats_together_tell_so_much(broker: UnboundBroker, peer: Peer) -> None:
    """All heartbeats together have a limit on members and subscriptions, where long expressions count as several; there
    is room again when a client leaves."""
    await change(peer, maxHeartbeatEntries=1000)
    others = [broker.connect() for _ in range(10)]
    for number, other in enumerate(others):
        assert (await other.ask(producers(f"c{number}", *(f"p{n}" for n in range(99))))).code == 0
    # 990 members; a consumer group of one member and 8 subscriptions is 9 more.
    topics = [subscription(f"T{number}") for number in range(8)]
    consumer = broker.connect()
    assert (await consumer.ask(heartbeat("c", "g", subscriptions=topics))).code == 0
    assert (await consumer.ask(heartbeat("c", "g", subscriptions=[*topics, subscription("T8")]))).code == 0
    full = "maxHeartbeatEntries=1000"
    await refused(peer, producers("x", "p"), ResponseCode.SYSTEM_BUSY, full)
    more = [*topics, subscription("T8", "x" * 600, 2)]
    await refused(consumer, heartbeat("c", "g", subscriptions=more), ResponseCode.SYSTEM_BUSY, full)
    assert len(broker.clients.consumers["g"].subscriptions) == 9
    assert (await consumer.ask(heartbeat("c", "g", subscriptions=topics))).code == 0
    assert (await consumer.ask(heartbeat("c2", "g", subscriptions=topics))).code == 0
    others[0].transport.abort()
    await turns()
    assert (await consumer.ask(heartbeat("c", "g", subscriptions=more))).code == 0
    for each in (*others, consumer):
        each.transport.abort()
    await turns()
    assert broker.clients._entries == 0
    assert not broker.clients._by_age
    assert not any(broker.clients._of_connection.values())


async def test_a_client_that_comes_back_over_another_connection_counts_once(broker: UnboundBroker, peer: Peer) -> None:
    await change(peer, maxHeartbeatEntries=1000, maxGroupsPerConnection=1000)
    groups = [f"p{number}" for number in range(1000)]
    for _ in range(5):
        connection = broker.connect()
        assert (await connection.ask(producers("c", *groups))).code == 0
    assert broker.clients._entries == 1000


async def test_a_group_subscribes_to_so_many_topics(broker: UnboundBroker, peer: Peer) -> None:
    await change(peer, maxSubscriptionsPerGroup=2)
    topics = [subscription(f"T{number}") for number in range(3)]
    await refused(
        peer, heartbeat("c", "g", subscriptions=topics), ResponseCode.SYSTEM_ERROR, "maxSubscriptionsPerGroup=2"
    )
    assert "g" not in broker.groups.table
    assert (await peer.ask(heartbeat("c", "g", subscriptions=topics[:2]))).code == 0


@pytest.mark.parametrize(
    "data",
    [
        HeartbeatData("c" * 1025, [ProducerData("p")]),
        HeartbeatData("c", [ProducerData("p" * 256)]),
        HeartbeatData("c", [], [ConsumerData("g" * 256)]),
        HeartbeatData("c", [], [ConsumerData("g", "C" * 256)]),
        HeartbeatData("c", [], [ConsumerData("g", message_model="C" * 256)]),
        HeartbeatData("c", [], [ConsumerData("g", consume_from_where="C" * 256)]),
        HeartbeatData("c", [], [ConsumerData("g", subscription_data_set=[SubscriptionData("T" * 256)])]),
        HeartbeatData(
            "c", [], [ConsumerData("g", None, None, None, [SubscriptionData("T", expression_type="T" * 256)])]
        ),
        HeartbeatData("c", [ProducerData("p")], [ConsumerData("x" * (MAX_REQUEST_BYTES // 2)) for _ in range(3)]),
    ],
    ids=["client id", "producer", "group", "type", "model", "where", "topic", "expression", "body"],
)
async def test_names_and_bodies_have_a_length(broker: UnboundBroker, peer: Peer, data: HeartbeatData) -> None:
    answer = await peer.ask(request(RequestCode.HEART_BEAT, body=fastjson.dumps(data)))
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "at most" in (answer.remark or "") or "longer than" in (answer.remark or "")
    assert not broker.clients.producers
    assert not broker.clients.consumers


async def test_a_clients_language_is_kept_up_to_a_length(broker: UnboundBroker, peer: Peer) -> None:
    command = heartbeat("c", "g")
    command.language = "J" * 1000
    assert (await peer.ask(command)).code == 0
    member = broker.clients.consumer("g", "c")
    assert member is not None
    assert member.language == "J" * 32


@pytest.mark.parametrize(
    "code",
    [
        RequestCode.HEART_BEAT,
        RequestCode.CHECK_CLIENT_CONFIG,
        RequestCode.LOCK_BATCH_MQ,
        RequestCode.UNLOCK_BATCH_MQ,
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
        RequestCode.UPDATE_BROKER_CONFIG,
    ],
)
async def test_a_body_is_not_looked_into_that_is_too_large(peer: Peer, code: int) -> None:
    body = b'{"x":"' + b"y" * MAX_REQUEST_BYTES + b'"}'
    answer = await peer.ask(request(code, body=body))
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert f"bytes: at most {MAX_REQUEST_BYTES} are taken" in (answer.remark or "")


# --- notices to members


async def test_of_many_who_come_and_go_in_one_turn_members_are_told_once(broker: UnboundBroker) -> None:
    members = [broker.connect() for _ in range(50)]
    for number, member in enumerate(members):
        member.post(heartbeat(f"c{number}", "g"))
    await turns()
    assert {notices(member) for member in members} == {1}
    for member in members[10:]:
        member.transport.abort()
    await turns()
    assert {notices(member) for member in members[:10]} == {1}


async def test_telling_many_members_takes_turns(tmp_path: Path) -> None:
    async with running(tmp_path, budget=CountBudget(5, 5)) as broker:
        members = [broker.connect() for _ in range(40)]
        for number, member in enumerate(members):
            member.post(heartbeat(f"c{number}", "g"))
            await turns(5)
        await turns(50)
        for member in members:
            notices(member)
        broker.connect().post(heartbeat("new", "g"))
        told = 0
        for _ in range(20):
            await turns(1)
            now = sum(len(member.requests) for member in members)
            assert now - told <= 5
            told = now
        assert {notices(member) for member in members} == {1}


# --- expressions


class Hashes:
    """Counts the characters that are hashed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.characters = 0
        monkeypatch.setattr(clients_module, "java_hash", self.hash)

    def hash(self, text: str) -> int:
        self.characters += len(text)
        return java_hash(text)


@pytest.fixture
def hashes(monkeypatch: pytest.MonkeyPatch) -> Hashes:
    return Hashes(monkeypatch)


@pytest.mark.parametrize(
    ("expression", "what"),
    [
        ("||".join(f"t{number}" for number in range(100_000)), "100000 tags, and maxTagsPerSubscription=1000"),
        ("||" * 1000, "1001 tags"),
        ("x" * (MAX_EXPRESSION_LENGTH + 1), f"at most {MAX_EXPRESSION_LENGTH}"),
    ],
)
async def test_an_expression_has_so_many_tags(
    broker: UnboundBroker, peer: Peer, hashes: Hashes, expression: str, what: str
) -> None:
    await peer.ask(send("T"))
    code = ResponseCode.SUBSCRIPTION_PARSE_FAILED
    await refused(peer, pull("T", subscription=expression), code, what)
    await refused(peer, heartbeat("c", "g", subscriptions=[subscription("T", expression)]), code, what)
    assert hashes.characters == 0
    assert "g" not in broker.groups.table


async def test_as_many_tags_as_may_be_are_taken(peer: Peer) -> None:
    await peer.ask(send("T", properties="TAGS\x01t999"))
    expression = "||".join(f"t{number}" for number in range(1000))
    assert (await peer.ask(pull("T", subscription=expression))).code == 0
    await change(peer, maxTagsPerSubscription=999)
    assert (await peer.ask(pull("T", subscription=expression))).code == ResponseCode.SUBSCRIPTION_PARSE_FAILED


async def test_a_subscription_is_hashed_once_for_all_its_pulls(peer: Peer, hashes: Hashes) -> None:
    """A subscription is hashed once for all its pulls: not by heartbeats, and not again by pulls with the subscription
    of the group's heartbeats."""
    await peer.ask(send("T", properties="TAGS\x01b7"))
    expression = "||".join(f"b{number}" for number in range(300))
    for version in range(1, 6):
        assert (
            await peer.ask(heartbeat("c", "consumers", subscriptions=[subscription("T", expression, version)]))
        ).code == 0
    assert hashes.characters == 0
    for _ in range(5):
        assert (await peer.ask(pull("T", subscription=expression))).code == 0
        assert (await peer.ask(pull("T", subscription=None, sys_flag=0, sub_version=5))).code == 0
    assert hashes.characters == len(expression) - 2 * 299
    answer = await peer.ask(request(RequestCode.GET_CONSUMER_CONNECTION_LIST, ConsumerGroupName("consumers")))
    table = json.loads(bytes(answer.body))["subscriptionTable"]["T"]
    assert (len(table["tagsSet"]), len(table["codeSet"])) == (300, 300)


# --- batches


async def test_a_batch_has_so_many_messages(broker: UnboundBroker, peer: Peer) -> None:
    """A batch has a limit on its messages; those of a larger batch are not even counted."""
    await change(peer, maxBatchMessages=3)
    for count, code in ((4, ResponseCode.MESSAGE_ILLEGAL), (100_000, ResponseCode.MESSAGE_ILLEGAL), (3, 0)):
        answer = await peer.ask(send("T", batch.encode([(0, b"x", "")] * count), batch=True))
        assert answer.code == code
        assert code == 0 or "maxBatchMessages=3: send several" in (answer.remark or "")
    assert broker.store.queue("T", 0).next_offset == 3  # type: ignore[union-attr]


# --- topics, groups, offsets


async def test_there_are_so_many_topics(broker: UnboundBroker, peer: Peer) -> None:
    """The number of topics is limited: existing ones go on, and a send that would make another is told that there is no
    such topic."""
    assert (await peer.ask(send("T"))).code == 0
    await change(peer, maxTopics=len(broker.topics.table))
    what = f"maxTopics={len(broker.topics.table)}: delete some, or raise that setting"
    await refused(peer, send("U"), ResponseCode.TOPIC_NOT_EXIST, what)
    await refused(peer, create("U"), ResponseCode.SYSTEM_ERROR, what)
    await refused(peer, heartbeat("c", "g"), ResponseCode.SYSTEM_ERROR, what)
    assert not {"U", "%RETRY%g"} & set(broker.topics.table)
    assert (await peer.ask(send("T"))).code == 0
    assert (await peer.ask(create("T", 5, 5))).code == 0
    assert (await peer.ask(request(RequestCode.DELETE_TOPIC_IN_BROKER, TopicName("T")))).code == 0
    assert (await peer.ask(send("U"))).code == 0


async def test_topics_that_there_are_are_taken_whatever_the_limit(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        assert (await broker.connect().ask(create("T", 100, 100))).code == 0
    async with running(tmp_path, "maxTopics=1", "maxQueuesPerTopic=1", "maxQueues=1") as broker:
        peer = broker.connect()
        assert (await peer.ask(send("T", queue_id=99))).code == 0
        assert (await peer.ask(create("T", 50, 50))).code == 0
        await refused(peer, create("T", 51, 1), ResponseCode.SYSTEM_ERROR, "maxQueuesPerTopic=1")


async def test_a_topic_and_all_topics_have_so_many_queues(broker: UnboundBroker, peer: Peer) -> None:
    await change(peer, maxQueuesPerTopic=10)
    await refused(peer, create("T", 1, 11), ResponseCode.SYSTEM_ERROR, "11 queues, and maxQueuesPerTopic=10")
    await refused(peer, create("T", 11, 1), ResponseCode.SYSTEM_ERROR, "11 queues, and maxQueuesPerTopic=10")
    assert (await peer.ask(create("T", 10, 3))).code == 0
    queues = broker.topics._queues
    assert queues == sum(topic.queue_limit for topic in broker.topics.table.values())
    await change(peer, maxQueues=queues)
    await refused(peer, create("U", 1, 1), ResponseCode.SYSTEM_ERROR, f"{queues} there are, and maxQueues={queues}")
    await refused(peer, send("U"), ResponseCode.TOPIC_NOT_EXIST, f"maxQueues={queues}")
    assert (await peer.ask(create("T", 8, 8))).code == 0
    assert (await peer.ask(create("U", 2, 1))).code == 0
    await refused(peer, create("T", 9, 8), ResponseCode.SYSTEM_ERROR, "maxQueues=")
    assert (await peer.ask(request(RequestCode.DELETE_TOPIC_IN_BROKER, TopicName("T")))).code == 0
    assert broker.topics._queues == queues - 8


async def test_a_send_makes_its_topic_with_no_more_queues_than_a_topic_may_have(
    broker: UnboundBroker, peer: Peer
) -> None:
    await change(peer, maxQueuesPerTopic=2)
    assert (await peer.ask(send("T", default_queues=4))).code == 0
    assert broker.topics.table["T"].queue_limit == 2


async def test_a_topic_has_so_many_attributes(broker: UnboundBroker, peer: Peer) -> None:
    many = ",".join(f"+a{number}=b" for number in range(100))
    assert (await peer.ask(create("T", attributes=many))).code == 0
    await refused(peer, create("T", attributes="+more=b"), ResponseCode.SYSTEM_ERROR, "101 attributes")
    assert (await peer.ask(create("T", attributes="-a1,+more=b"))).code == 0
    await refused(peer, create("T", attributes="+long=" + "x" * 40_000), ResponseCode.SYSTEM_ERROR, "characters")
    assert len(broker.topics.table["T"].config.attributes or {}) == 100


async def test_there_are_so_many_consumer_groups(broker: UnboundBroker, peer: Peer) -> None:
    assert (await peer.ask(send("T"))).code == 0
    assert (await peer.ask(pull("T", group="g"))).code == 0
    await change(peer, maxSubscriptionGroups=len(broker.groups.table))
    what = f"maxSubscriptionGroups={len(broker.groups.table)}: delete some"
    for command in (
        pull("T", group="h"),
        heartbeat("c", "h"),
        request(RequestCode.UPDATE_CONSUMER_OFFSET, UpdateConsumerOffset("h", "T", 0, 1)),
        request(RequestCode.CONSUMER_SEND_MSG_BACK, ConsumerSendMsgBack(0, "h", 0)),
    ):
        await refused(peer, command, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, what)
    body = b'{"groupName":"h"}'
    create_group = request(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body)
    await refused(peer, create_group, ResponseCode.SYSTEM_ERROR, what)
    assert "h" not in broker.groups.table
    assert not broker.clients.consumers
    assert (await peer.ask(pull("T", group="g"))).code == 0
    assert (await peer.ask(request(RequestCode.DELETE_SUBSCRIPTIONGROUP, DeleteSubscriptionGroup("g")))).code == 0
    assert (await peer.ask(pull("T", group="h"))).code == 0


@pytest.mark.parametrize(
    ("setting", "more", "code"),
    [
        ("maxTopics", 3, ResponseCode.SYSTEM_ERROR),
        ("maxQueues", 3, ResponseCode.SYSTEM_ERROR),
        ("maxSubscriptionGroups", 3, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST),
    ],
)
async def test_of_a_heartbeat_that_is_refused_nothing_is_made(
    broker: UnboundBroker, peer: Peer, setting: str, more: int, code: int
) -> None:
    topics, groups = list(broker.topics.table), list(broker.groups.table)
    there = {"maxTopics": len(topics), "maxQueues": broker.topics._queues, "maxSubscriptionGroups": len(groups)}
    await change(peer, **{setting: there[setting] + more})

    def of(count: int) -> Command:
        consumers = [ConsumerData(f"g{number}") for number in range(count)]
        return request(RequestCode.HEART_BEAT, body=fastjson.dumps(HeartbeatData("c", None, consumers)))

    await refused(peer, of(more + 1), code, f"{setting}={there[setting] + more}")
    assert (list(broker.topics.table), list(broker.groups.table)) == (topics, groups)
    assert not broker.clients.consumers
    assert (await peer.ask(of(more))).code == 0
    assert (await peer.ask(of(more))).code == 0, "what is there needs no room"
    assert len(broker.groups.table) == len(groups) + more


async def test_saving_a_table_costs_what_changed_in_it(broker: UnboundBroker, peer: Peer) -> None:
    """Saving a table encodes only its changed entries: thousands of topics must not be made into JSON for each new
    one."""
    for number in range(20):
        assert (await peer.ask(send(f"T{number}"))).code == 0
        await peer.ask(pull(f"T{number}", 1, group=f"g{number}", sys_flag=5, commit_offset=1))
    tables = {
        "topicConfigTable": broker.topics.to_json,
        "subscriptionGroupTable": broker.groups.to_json,
        "offsetTable": broker.offsets.to_json,
    }
    before = {name: table()[name] for name, table in tables.items()}
    assert (await peer.ask(create("T3", 7, 7))).code == 0
    body = b'{"groupName":"g3","retryMaxTimes":3}'
    assert (await peer.ask(request(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body))).code == 0
    broker.offsets.commit("g3", "T3", 0, 9)
    changed = {
        name: [key for key, value in table()[name].items() if value is not before[name][key]]
        for name, table in tables.items()
    }
    assert changed == {"topicConfigTable": ["T3"], "subscriptionGroupTable": ["g3"], "offsetTable": ["T3@g3"]}
    assert json.loads(fastjson.dumps(broker.offsets.to_json()))["offsetTable"]["T3@g3"] == {"0": 9}


# --- the name server


def put(namespace: str, key: str, value: str) -> Command:
    return request(RequestCode.PUT_KV_CONFIG, KVEntry(namespace, key, value))


async def test_the_name_server_keeps_so_many_values(tmp_path: Path) -> None:
    async with running(tmp_path, "maxKVConfigEntries=3", "maxKVConfigBytes=100") as broker:
        peer = broker.connect()
        for number in range(3):
            assert (await peer.ask(put(f"n{number % 2}", f"k{number}", "v"))).code == 0
        await refused(peer, put("n0", "more", "v"), ResponseCode.SYSTEM_ERROR, "maxKVConfigEntries=3: delete some")
        await refused(peer, put("n0", "k0", "x" * 100), ResponseCode.SYSTEM_ERROR, "maxKVConfigBytes=100: delete some")
        assert (await peer.ask(put("n0", "k0", "x" * 80))).code == 0
        await refused(peer, put("n0", "k2", "vvvvvvvvv"), ResponseCode.SYSTEM_ERROR, "maxKVConfigBytes=100")
        assert (await peer.ask(put("n0", "k0", "x" * 10))).code == 0
        assert (await peer.ask(request(RequestCode.DELETE_KV_CONFIG, KVKey("n1", "k1")))).code == 0
        assert (await peer.ask(put("n9", "more", "v"))).code == 0
        values = broker.running.tables.values
        assert set(values._values) == {"n0", "n9"}
        assert (values._count, values._size) == (3, 2 + 2 + 10 + 2 + 2 + 1 + 2 + 4 + 1)
    async with running(tmp_path, "maxKVConfigEntries=1", "maxKVConfigBytes=1") as broker:
        peer = broker.connect()
        assert (await peer.ask(request(RequestCode.GET_KV_CONFIG, KVKey("n9", "more")))).ext == {"value": "v"}
        assert (broker.running.tables.values._count, broker.running.tables.values._size) == (3, 26)
        assert (await peer.ask(put("n9", "more", "w"))).code == 0, "what is there may change, if it does not grow"


async def test_brokers_register_so_much(broker: UnboundBroker, peer: Peer) -> None:
    topics = [TopicConfig(f"T{number}") for number in range(1000)]
    size = len(registration(topics=topics).body)
    await change(peer, maxRegistrationBytes=2 * (size + 1200))
    others = [broker.connect() for _ in range(3)]
    for number, other in enumerate(others[:2]):
        assert (await other.ask(registration(f"b{number}", topics=topics))).code == 0
        assert (await other.ask(registration(f"b{number}", topics=topics))).code == 0
    await refused(others[2], registration("b2"), ResponseCode.SYSTEM_ERROR, "maxRegistrationBytes=")
    assert (await others[0].ask(registration("b0", topics=topics[:500]))).code == 0
    assert (await others[2].ask(registration("b2", topics=topics[:300]))).code == 0
    for other in others:
        other.transport.abort()
    await turns()
    assert broker.nameserver._registered == 0
    assert not any(broker.nameserver._of_connection.values())


async def test_thousands_of_registrations_without_topics_are_bounded_too(broker: UnboundBroker, peer: Peer) -> None:
    await change(peer, maxRegistrationBytes=100_000)
    answers = await peer.ask_all([registration(f"b{number}") for number in range(200)])
    taken = [answer.code for answer in answers].count(0)
    assert 50 < taken < 100
    assert len(broker.nameserver._brokers) == taken


async def test_so_many_brokers_register(broker: UnboundBroker, peer: Peer) -> None:
    """The number of registered brokers is limited, since each route is looked up among all of them."""
    await change(peer, maxRegisteredBrokers=3)
    others = [broker.connect() for _ in range(4)]
    for number, other in enumerate(others[:3]):
        assert (await other.ask(registration(f"b{number}", topics=[TopicConfig("T")]))).code == 0
    await refused(others[3], registration("b3"), ResponseCode.SYSTEM_ERROR, "maxRegisteredBrokers=3")
    assert (await others[0].ask(registration("b0", topics=[TopicConfig("other")]))).code == 0
    answer = await peer.ask(request(RequestCode.GET_ROUTEINFO_BY_TOPIC, GetRouteInfo("T")))
    assert [found["brokerName"] for found in json.loads(bytes(answer.body))["brokerDatas"]] == ["b1", "b2"]
    others[1].transport.abort()
    await turns()
    assert (await others[3].ask(registration("b3"))).code == 0


async def test_attributes_that_are_far_too_many_are_not_looked_at(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attributes that are far too long are not parsed: 800,000 attributes took a second."""
    text = ",".join(f"+a{number}=b" for number in range(100_000))
    monkeypatch.setattr("duemq.broker.admin.topics.policy_of", None)
    header = CreateTopic("T", "TBW102", 4, 4, 6, "SINGLE_TAG", 0, False, text)
    many = request(RequestCode.UPDATE_AND_CREATE_TOPIC, header)
    await refused(peer, many, ResponseCode.SYSTEM_ERROR, f"attributes of {len(text)} characters")


# --- settings


@pytest.mark.parametrize("levels", [1001, 200_000])
async def test_there_are_so_many_delay_levels(peer: Peer, levels: int) -> None:
    text = " ".join(["1s"] * levels)
    with pytest.raises(ConfigError, match=f"messageDelayLevel has {levels} levels: at most 1000"):
        load(None, [f"messageDelayLevel={text}"], {})
    update = request(RequestCode.UPDATE_BROKER_CONFIG, body=f"messageDelayLevel={text}".encode())
    await refused(peer, update, ResponseCode.SYSTEM_ERROR, f"has {levels} levels: at most 1000")


async def test_a_checkpoint_holds_as_many_levels_as_there_may_be(tmp_path: Path, loop: SteppedLoop) -> None:
    """A checkpoint holds the largest table of levels, and the next start delivers each message at its time."""
    table = " ".join(f"{number}h" for number in range(1, 1001))
    async with running(tmp_path, f"messageDelayLevel={table}") as broker:
        peer = broker.connect()
        answers = await peer.ask_all([send("T", properties=f"DELAY\x01{level}") for level in range(1, 1001)])
        assert {answer.code for answer in answers} == {0}
    async with running(tmp_path, f"messageDelayLevel={table}") as broker:
        broker.clock.advance(3_600_000 * 500)
        loop.advance(11)  # the broker looks again at least that often, however the clock is set
        while broker.store.queue("T", 0) is None or broker.store.queue("T", 0).next_offset < 500:  # type: ignore[union-attr]
            await turns()
        await turns(20)
        assert broker.store.queue("T", 0).next_offset == 500  # type: ignore[union-attr]


async def test_what_an_update_says_wrong_is_not_repeated_at_length(peer: Peer) -> None:
    for text in (
        "x" * 5000,
        "fileReservedTime=" + "9" * 5000,
        "messageDelayLevel=" + "s" * 5000,
        "deleteWhen=" + "0" * 5000,
    ):
        answer = await peer.ask(
            request(RequestCode.UPDATE_BROKER_CONFIG, body=(text if "=" in text else text + "=1").encode())
        )
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert len(answer.remark or "") < 400
