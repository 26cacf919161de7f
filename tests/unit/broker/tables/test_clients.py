"""Members of groups: heartbeats, notices to the other members, leaving by request, by connection, by silence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from duemq.broker.tables.clients import EXPIRE_MS, tags_codes
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames import fastjson
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import BINARY, JSON
from duemq.protocol.records.properties import java_hash
from duemq.protocol.requests.bodies import ConsumerData, HeartbeatData, ProducerData, SubscriptionData
from duemq.protocol.requests.headers import (
    ConsumerGroupName,
    DeleteSubscriptionGroup,
    ProducerGroupName,
    RelayToConsumer,
    UnregisterClient,
    decode_ext,
)
from tests.support.broker import Peer, UnboundBroker
from tests.support.loop import SteppedLoop, turns
from tests.support.wire import request

NOTICE = RequestCode.NOTIFY_CONSUMER_IDS_CHANGED


def subscription(topic: str = "T", expression: str | None = "*", version: int = 1) -> SubscriptionData:
    return SubscriptionData(topic, expression, version)


def heartbeat(
    client_id: str,
    *consumers: str,
    producers: tuple[str, ...] = (),
    subscriptions: list[SubscriptionData] | None = None,
    model: str = "CLUSTERING",
    version: int = 407,
) -> Command:
    data = HeartbeatData(
        client_id,
        [ProducerData(name) for name in producers],
        [
            ConsumerData(name, message_model=model, subscription_data_set=subscriptions or [subscription()])
            for name in consumers
        ],
    )
    return request(RequestCode.HEART_BEAT, body=fastjson.dumps(data), version=version)


async def beat(peer: Peer, *args: Any, **kwargs: Any) -> None:
    answer = await peer.ask(heartbeat(*args, **kwargs))
    assert answer.code == ResponseCode.SUCCESS, answer.remark


async def members(peer: Peer, group: str) -> list[str]:
    answer = await peer.ask(request(RequestCode.GET_CONSUMER_LIST_BY_GROUP, ConsumerGroupName(group)))
    if answer.code != ResponseCode.SUCCESS:
        assert answer.remark == f"no consumer for this group, {group}"
        return []
    ids: list[str] = json.loads(bytes(answer.body))["consumerIdList"]
    return ids


def notices(peer: Peer) -> int:
    """Number of notices about group changes that a peer got since the last call."""
    assert {command.code for command in peer.requests} <= {NOTICE}
    count = len(peer.requests)
    peer.requests.clear()
    return count


# --- members


async def test_a_heartbeat_makes_a_member_its_group_and_its_retry_topic(broker: UnboundBroker, peer: Peer) -> None:
    await beat(peer, "c1", "g", producers=("p",))
    assert await members(peer, "g") == ["c1"]
    assert broker.groups.table["g"].retry_max_times == 16
    topic = broker.topics.table["%RETRY%g"]
    assert (topic.config.read_queue_nums, topic.config.perm) == (1, 6)
    assert list(broker.clients.producers) == ["p"]


async def test_members_are_told_of_who_comes_and_who_goes(broker: UnboundBroker) -> None:
    first, second, other = broker.connect(), broker.connect(), broker.connect()
    await beat(first, "c1", "g")
    await beat(other, "c3", "elsewhere")
    assert (notices(first), notices(other)) == (1, 1)
    await beat(second, "c2", "g")
    assert (notices(first), notices(second), notices(other)) == (1, 1, 0)
    await beat(second, "c2", "g")
    assert (notices(first), notices(second)) == (0, 0)
    await second.ask(request(RequestCode.UNREGISTER_CLIENT, UnregisterClient("c2", None, "g")))
    assert (notices(first), notices(second)) == (1, 0)
    assert await members(first, "g") == ["c1"]


async def test_a_notice_names_the_group_and_comes_in_the_clients_codec(broker: UnboundBroker) -> None:
    peer = broker.connect()
    await peer.ask(heartbeat("c1", "g"), BINARY)
    (frame_codec, notice) = next(frame for frame in peer.frames if frame[1].code == NOTICE)
    assert frame_codec == BINARY
    assert decode_ext(ConsumerGroupName, notice.ext).consumer_group == "g"
    json_peer = broker.connect()
    await json_peer.ask(heartbeat("c2", "g"), JSON)
    assert {frame[0] for frame in json_peer.frames} == {JSON}


async def test_who_loses_its_connection_is_gone(broker: UnboundBroker) -> None:
    first, second = broker.connect(), broker.connect()
    await beat(first, "c1", "g", "h", producers=("p",))
    await beat(second, "c2", "g")
    notices(second)
    first.transport.abort()
    await turns()
    assert await members(second, "g") == ["c2"]
    assert await members(second, "h") == []
    assert notices(second) == 1
    assert broker.clients.producers == {}


async def test_a_client_that_came_back_over_another_connection_stays_when_the_old_one_ends(
    broker: UnboundBroker,
) -> None:
    old, new = broker.connect(), broker.connect()
    await beat(old, "c1", "g", producers=("p",))
    await beat(new, "c1", "g", producers=("p",))
    assert notices(new) == 1
    old.transport.abort()
    await turns()
    assert await members(new, "g") == ["c1"]
    assert list(broker.clients.producers["p"]) == ["c1"]


async def test_who_is_silent_for_two_minutes_is_gone(broker: UnboundBroker, loop: SteppedLoop) -> None:
    silent, other = broker.connect(), broker.connect()
    await beat(silent, "c1", "g")
    await beat(other, "c2", "g")
    for passed in range(0, EXPIRE_MS, 10_000):
        assert await members(other, "g") == ["c1", "c2"], passed
        broker.clock.advance(10_000)
        loop.advance(10)
        await beat(other, "c2", "g")
    broker.clock.advance(10_000)
    loop.advance(10)
    await turns(5)
    assert silent.transport.is_aborted
    assert await members(other, "g") == ["c2"]


@pytest.mark.parametrize("step_ms", [-3_600_000, 3_600_000])
async def test_setting_the_wall_clock_throws_nobody_out_and_keeps_nobody(
    broker: UnboundBroker, loop: SteppedLoop, step_ms: int
) -> None:
    silent, other = broker.connect(), broker.connect()
    await beat(silent, "c1", "g")
    broker.clock.set_wall(broker.clock.now_ms() + step_ms)
    loop.advance(10)
    await turns(5)
    assert not silent.transport.is_aborted
    for _ in range(0, EXPIRE_MS + 10_000, 10_000):
        await beat(other, "c2", "g")
        broker.clock.advance(10_000)
        loop.advance(10)
        await turns(5)
    assert silent.transport.is_aborted
    assert await members(other, "g") == ["c2"]


async def test_what_a_connection_was_is_forgotten_when_it_unregisters(broker: UnboundBroker, peer: Peer) -> None:
    """The broker forgets the groups of a connection that unregisters: a client that joins and leaves groups for ever
    must not take more and more memory."""
    for number in range(50):
        await beat(peer, "c1", f"g{number}", producers=(f"p{number}",))
        header = UnregisterClient("c1", f"p{number}", f"g{number}")
        await peer.ask(request(RequestCode.UNREGISTER_CLIENT, header))
    assert broker.clients.consumers == {}
    assert broker.clients.producers == {}
    assert not broker.clients._of_connection.get(peer.connection)


async def test_unregistering_somebody_else_or_nobody_is_no_error(broker: UnboundBroker, peer: Peer) -> None:
    await beat(peer, "c1", "g")
    for header in (UnregisterClient("c9", "p", "g"), UnregisterClient("c1", "p", "h"), UnregisterClient("c1")):
        assert (await peer.ask(request(RequestCode.UNREGISTER_CLIENT, header))).code == 0
    assert await members(peer, "g") == ["c1"]


async def test_nobody_is_unregistered_over_the_connection_of_another(broker: UnboundBroker, peer: Peer) -> None:
    """As at RocketMQ's brokers, whose members are connections: an account could end what others do otherwise."""
    await beat(peer, "c1", "g", producers=("p",))
    stranger = broker.connect()
    await beat(stranger, "c2", "g", producers=("p",))
    notices(peer)
    everything = request(RequestCode.UNREGISTER_CLIENT, UnregisterClient("c1", "p", "g"))
    assert (await stranger.ask(everything)).code == 0
    assert await members(peer, "g") == ["c1", "c2"]
    assert sorted(broker.clients.producers["p"]) == ["c1", "c2"]
    assert notices(peer) == 0
    assert (await peer.ask(everything)).code == 0
    assert await members(peer, "g") == ["c2"]
    assert sorted(broker.clients.producers["p"]) == ["c2"]


async def test_groups_that_want_no_notices_get_none(broker: UnboundBroker, peer: Peer) -> None:
    config = b'{"groupName":"g","notifyConsumerIdsChangedEnable":false}'
    assert (await peer.ask(request(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=config))).code == 0
    await beat(peer, "c1", "g")
    await beat(broker.connect(), "c2", "g")
    assert notices(peer) == 0


async def test_a_change_of_subscriptions_is_a_change_of_the_group(broker: UnboundBroker, peer: Peer) -> None:
    other = broker.connect()
    await beat(peer, "c1", "g", subscriptions=[subscription("A", "x", 1)])
    await beat(other, "c2", "g", subscriptions=[subscription("A", "x", 1)])
    notices(peer), notices(other)
    group = broker.clients.consumers["g"]

    await beat(peer, "c1", "g", subscriptions=[subscription("A", "y", 0)])
    assert notices(other) == 0, "an older subscription changes nothing"
    assert group.subscriptions["A"].data.sub_string == "x"
    await beat(peer, "c1", "g", subscriptions=[subscription("A", "y", 2)])
    assert notices(other) == 1
    assert group.subscriptions["A"].codes == frozenset({java_hash("y")})
    await beat(peer, "c1", "g", subscriptions=[subscription("A", "y", 3), subscription("B")])
    assert notices(other) == 1
    await beat(peer, "c1", "g", subscriptions=[subscription("B")])
    assert notices(other) == 1
    assert list(group.subscriptions) == ["B"]


async def test_a_heartbeat_of_a_group_with_a_wrong_name_makes_nothing(broker: UnboundBroker, peer: Peer) -> None:
    for name in ("bad name", "x" * 300, "", "a/b", "x" * 125):
        before = set(broker.groups.table), set(broker.topics.table)
        answer = await peer.ask(heartbeat("c1", name))
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert answer.remark
        assert (set(broker.groups.table), set(broker.topics.table)) == before
        assert broker.clients.consumers == {}


@pytest.mark.parametrize(
    ("expression", "tags"),
    [(None, None), ("", None), ("*", None), (" * ", ["*"]), ("a", ["a"]), ("a||b", ["a", "b"]),
     (" a || b ||", ["a", "b"]), ("|| ||", []), ("  ", []), ("|||", ["|"]), ("a b", ["a b"]), ("a\u3000", ["a\u3000"]),
     ("\xa0a || \u2028", ["\xa0a", "\u2028"]), ("\ta\x00", ["a"])],
)  # fmt: skip
def test_tag_expressions(expression: str | None, tags: list[str] | None) -> None:
    """Compared with pulls from Apache's broker 4.9.7."""
    assert tags_codes(expression) == (frozenset(map(java_hash, tags)) if tags is not None else None)


# --- the administrators' view


async def test_connections_of_a_group_are_told(broker: UnboundBroker, peer: Peer) -> None:
    await beat(peer, "c1", "g", producers=("p",), subscriptions=[subscription("A", "x || y", 7)])
    answer = await peer.ask(request(RequestCode.GET_CONSUMER_CONNECTION_LIST, ConsumerGroupName("g")))
    body = json.loads(bytes(answer.body))
    assert body["connectionSet"] == [
        {"clientAddr": "127.0.0.1:40000", "clientId": "c1", "language": "JAVA", "version": 407}
    ]
    assert (body["consumeType"], body["messageModel"]) == ("CONSUME_PASSIVELY", "CLUSTERING")
    assert body["subscriptionTable"]["A"]["tagsSet"] == ["x", "y"]
    answer = await peer.ask(request(RequestCode.GET_PRODUCER_CONNECTION_LIST, ProducerGroupName("p")))
    assert [entry["clientId"] for entry in json.loads(bytes(answer.body))["connectionSet"]] == ["c1"]
    answer = await peer.ask(request(RequestCode.GET_ALL_PRODUCER_INFO))
    assert [entry["clientId"] for entry in json.loads(bytes(answer.body))["data"]["p"]] == ["c1"]


async def test_a_group_that_is_not_online_is_told_so(peer: Peer) -> None:
    answer = await peer.ask(request(RequestCode.GET_CONSUMER_CONNECTION_LIST, ConsumerGroupName("g")))
    assert answer.code == ResponseCode.CONSUMER_NOT_ONLINE
    answer = await peer.ask(request(RequestCode.GET_PRODUCER_CONNECTION_LIST, ProducerGroupName("p")))
    assert answer.code == ResponseCode.SYSTEM_ERROR


async def test_a_question_is_relayed_to_the_consumer_and_its_answer_back(broker: UnboundBroker, peer: Peer) -> None:
    consumer = broker.connect()
    await beat(consumer, "c1", "g")
    consumer.requests.clear()
    question = request(RequestCode.GET_CONSUMER_RUNNING_INFO, RelayToConsumer("g", "c1"))
    peer.post(question)
    await turns()
    (asked,) = consumer.requests
    assert (asked.code, asked.ext) == (307, {"consumerGroup": "g", "clientId": "c1"})
    consumer.post(Command(code=0, flag=1, opaque=asked.opaque, remark="so it is", ext={"a": "b"}, body=b"info"))
    await turns()
    answer = peer.answer_of(question)
    assert answer is not None
    assert (answer.code, answer.remark, answer.ext, bytes(answer.body)) == (0, "so it is", {"a": "b"}, b"info")


async def test_a_consumer_that_does_not_answer_a_relayed_question_times_out(
    broker: UnboundBroker, peer: Peer, loop: SteppedLoop
) -> None:
    consumer = broker.connect()
    await beat(consumer, "c1", "g")
    question = request(RequestCode.GET_CONSUMER_RUNNING_INFO, RelayToConsumer("g", "c1"))
    peer.post(question)
    await turns()
    loop.advance(10.1)
    await turns(5)
    answer = peer.answer_of(question)
    assert answer is not None
    assert answer.code == ResponseCode.CONSUME_MSG_TIMEOUT


@pytest.mark.parametrize(("client_id", "version"), [("c2", 407), (None, 407), ("c1", 61)])
async def test_a_question_to_nobody_or_somebody_too_old_is_refused(
    broker: UnboundBroker, peer: Peer, client_id: str | None, version: int
) -> None:
    await beat(broker.connect(), "c1", "g", version=version)
    answer = await peer.ask(request(RequestCode.GET_CONSUMER_RUNNING_INFO, RelayToConsumer("g", client_id)))
    assert answer.code == ResponseCode.SYSTEM_ERROR


@pytest.mark.parametrize("message_id", [None, "", "x", "7F00000100002A9F0000000000FFFFFF", "F" * 32])
async def test_a_message_that_is_not_there_is_not_relayed(
    broker: UnboundBroker, peer: Peer, message_id: str | None
) -> None:
    await beat(broker.connect(), "c1", "g")
    header = RelayToConsumer("g", "c1", message_id)
    answer = await peer.ask(request(RequestCode.CONSUME_MESSAGE_DIRECTLY, header))
    assert answer.code == ResponseCode.SYSTEM_ERROR


# --- groups


async def test_a_group_with_more_queues_than_any_topic_is_refused(broker: UnboundBroker, peer: Peer) -> None:
    """A group with more queues than any topic is refused: its retry topic would have as many, with an entry in memory
    for each."""
    for number in (4097, 2**31 - 1):
        body = b'{"groupName":"g","retryQueueNums":%d}' % number
        answer = await peer.ask(request(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body))
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert "retryQueueNums" in (answer.remark or "")
        assert "g" not in broker.groups.table


async def test_a_group_is_deleted_with_or_without_its_offsets(broker: UnboundBroker, peer: Peer) -> None:
    for remove in (None, True):
        await beat(peer, "c1", "g")
        broker.offsets.commit("g", "T", 0, 5)
        header = DeleteSubscriptionGroup("g", remove)
        assert (await peer.ask(request(RequestCode.DELETE_SUBSCRIPTIONGROUP, header))).code == 0
        assert "g" not in broker.groups.table
        assert broker.offsets.get("g", "T", 0) == (None if remove else 5)


async def test_a_subscription_by_anything_but_tags_is_refused(peer: Peer) -> None:
    for kind, code in (("TAG", 0), ("", 0), ("SQL92", ResponseCode.SYSTEM_ERROR)):
        body = b'{"clientId":"c","group":"g","subscriptionData":{"topic":"T","expressionType":"%b"}}' % kind.encode()
        assert (await peer.ask(request(RequestCode.CHECK_CLIENT_CONFIG, body=body))).code == code
    assert (await peer.ask(request(RequestCode.CHECK_CLIENT_CONFIG, body=b"{}"))).code == 0
