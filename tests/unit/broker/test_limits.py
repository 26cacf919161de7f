"""What clients can make the broker keep is bounded: beyond a limit they are refused as a whole, with a remark that
says what to do, and what was kept before stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from broker import clients as clients_module
from broker.config import BrokerConfig, load
from broker.errors import ConfigError
from broker.limits import _PROPERTIES, MAX_EXPRESSION_LENGTH
from protocol import fastjson
from protocol.bodies import MAX_REQUEST_BYTES, ConsumerData, HeartbeatData, ProducerData
from protocol.codes import RequestCode, ResponseCode
from protocol.command import Command
from protocol.headers import ConsumerGroup, UnregisterClient
from protocol.properties import java_hash
from tests.support.broker import Peer, UnboundBroker, running
from tests.support.loop import CountBudget, turns
from tests.support.wire import pull, request, send
from tests.unit.broker.test_clients import heartbeat, notices, subscription


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
    assert {f"max_{name}" for name in _PROPERTIES.values()} <= fields


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
    """Members and subscriptions, and long expressions as several; until somebody leaves."""
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
        HeartbeatData("c", [ProducerData("p")], [ConsumerData("x" * (MAX_REQUEST_BYTES // 2)) for _ in range(3)]),
    ],
    ids=["client id", "producer group", "consumer group", "body"],
)
async def test_names_and_bodies_have_a_length(broker: UnboundBroker, peer: Peer, data: HeartbeatData) -> None:
    answer = await peer.ask(request(RequestCode.HEART_BEAT, body=fastjson.dumps(data)))
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "at most" in (answer.remark or "") or "longer than" in (answer.remark or "")
    assert not broker.clients.producers
    assert not broker.clients.consumers


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


# --- members are told


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
    """Not by heartbeats, and not again by pulls that name what the group's heartbeats told."""
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
    answer = await peer.ask(request(RequestCode.GET_CONSUMER_CONNECTION_LIST, ConsumerGroup("consumers")))
    table = json.loads(bytes(answer.body))["subscriptionTable"]["T"]
    assert (len(table["tagsSet"]), len(table["codeSet"])) == (300, 300)


# --- settings


@pytest.mark.parametrize("levels", [1001, 200_000])
async def test_there_are_so_many_delay_levels(peer: Peer, levels: int) -> None:
    text = " ".join(["1s"] * levels)
    with pytest.raises(ConfigError, match=f"messageDelayLevel has {levels} levels: at most 1000"):
        load(None, [f"messageDelayLevel={text}"], {})
    update = request(RequestCode.UPDATE_BROKER_CONFIG, body=f"messageDelayLevel={text}".encode())
    await refused(peer, update, ResponseCode.SYSTEM_ERROR, f"has {levels} levels: at most 1000")


async def test_a_checkpoint_holds_as_many_levels_as_there_may_be(tmp_path: Path) -> None:
    """And the next start finds each message where it was."""
    table = " ".join(f"{number}h" for number in range(1, 1001))
    async with running(tmp_path, f"messageDelayLevel={table}") as broker:
        peer = broker.connect()
        answers = await peer.ask_all([send("T", properties=f"DELAY\x01{level}") for level in range(1, 1001)])
        assert {answer.code for answer in answers} == {0}
    async with running(tmp_path, f"messageDelayLevel={table}") as broker:
        broker.clock.advance(3_600_000 * 500)
        broker.housekeeping.clock_moved()
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
