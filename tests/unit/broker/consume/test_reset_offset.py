"""INVOKE_BROKER_TO_RESET_OFFSET: the new offsets of a group, the notified members, and refusals."""

from __future__ import annotations

import json

import pytest

from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames import fastjson
from duemq.protocol.frames.command import Command
from duemq.protocol.requests.headers import ResetOffset, UpdateConsumerOffset, decode_ext
from tests.support.broker import Peer, UnboundBroker
from tests.support.wire import request, send
from tests.unit.broker.tables.test_clients import beat, heartbeat

NOTICE = RequestCode.RESET_CONSUMER_CLIENT_OFFSET
QUEUES = 4


def reset(
    timestamp: int, *, force: bool = True, topic: str = "T", group: str = "g", queue: int = -1, offset: int = -1
) -> Command:
    header = ResetOffset(topic, group, timestamp, force, queue, offset)
    return request(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header)


def offsets_in(body: bytes) -> dict[int, int]:
    """Return the offsets in a body by queue id, as RocketMQ's clients read them: keys are objects."""
    inner = body.removeprefix(b'{"offsetTable":{').removesuffix(b"}}")
    assert len(inner) == len(body) - len(b'{"offsetTable":{}}'), body
    found = {}
    for entry in inner.split(b",{"):
        key, _, value = (entry if entry.startswith(b"{") else b"{" + entry).rpartition(b":")
        queue = json.loads(key)
        assert (queue["brokerName"], queue["topic"]) == ("broker-a", "T")
        found[queue["queueId"]] = int(value)
    return found


async def commit(peer: Peer, offset: int, *queues: int) -> None:
    for queue in queues:
        header = UpdateConsumerOffset("g", "T", queue, offset)
        assert (await peer.ask(request(RequestCode.UPDATE_CONSUMER_OFFSET, header))).code == 0


@pytest.fixture
async def begin_ms(broker: UnboundBroker, peer: Peer) -> int:
    """Make four queues and return the begin time; queue 0 has five messages, a second apart; the group is at 3 there,
    and at the end of the other queues."""
    begin = broker.clock.now_ms()
    for _ in range(5):
        await peer.ask(send("T", default_queues=QUEUES))
        broker.clock.advance(1000)
    await beat(peer, "c1", "g")
    await commit(peer, 3, 0)
    await commit(peer, 0, 1, 2, 3)
    peer.requests.clear()
    return begin


async def test_every_member_is_told_and_the_admin_too(broker: UnboundBroker, peer: Peer, begin_ms: int) -> None:
    other, stranger = broker.connect(), broker.connect()
    await beat(other, "c2", "g")
    await beat(stranger, "c3", "h")
    for member in (peer, other, stranger):
        member.requests.clear()
    answer = await broker.connect().ask(reset(begin_ms + 1000))
    assert answer.code == ResponseCode.SUCCESS
    expected = {0: 1, 1: 0, 2: 0, 3: 0}
    assert offsets_in(bytes(answer.body)) == expected
    for member in (peer, other):
        (notice,) = member.requests
        assert notice.code == NOTICE
        assert notice.is_oneway
        header = decode_ext(ResetOffset, notice.ext)
        assert (header.topic, header.group, header.timestamp, header.is_force) == ("T", "g", begin_ms + 1000, True)
        assert offsets_in(bytes(notice.body)) == expected
    assert stranger.requests == []


async def test_what_concerns_cpp_is_a_list(broker: UnboundBroker, peer: Peer, begin_ms: int) -> None:
    """The answer for C++ clients is a list, the only form they read; if the admin is a C++ client, RocketMQ treats all
    members as such."""
    member = broker.connect()
    command = heartbeat("c2", "g")
    command.language = "CPP"
    await member.ask(command)
    for language, is_list in (("JAVA", False), ("CPP", True)):
        peer.requests.clear()
        member.requests.clear()
        command = reset(begin_ms)
        command.language = language
        answer = await broker.connect().ask(command)
        assert offsets_in(bytes(answer.body))[0] == 0
        table = fastjson.loads(bytes(member.requests[0].body))["offsetTable"]
        assert table[0] == {"brokerName": "broker-a", "offset": 0, "queueId": 0, "topic": "T"}
        assert [entry["queueId"] for entry in table] == [0, 1, 2, 3]
        assert (peer.requests[0].body == member.requests[0].body) == is_list


@pytest.mark.parametrize(
    ("after_ms", "force", "offset"),
    [(0, True, 0), (2500, True, 3), (4000, True, 4), (99_000, True, 5), (0, False, 0), (99_000, False, 3)],
)
async def test_without_force_a_group_only_goes_back(
    peer: Peer, begin_ms: int, after_ms: int, force: bool, offset: int
) -> None:
    answer = await peer.ask(reset(begin_ms + after_ms, force=force))
    assert offsets_in(bytes(answer.body))[0] == offset


async def test_minus_one_and_now_are_the_end(broker: UnboundBroker, peer: Peer, begin_ms: int) -> None:
    for timestamp in (-1, broker.clock.now_ms()):
        answer = await peer.ask(reset(timestamp))
        assert offsets_in(bytes(answer.body)) == {0: 5, 1: 0, 2: 0, 3: 0}


async def test_one_queue_goes_where_it_is_told(peer: Peer, begin_ms: int) -> None:
    answer = await peer.ask(reset(0, queue=0, offset=2))
    assert offsets_in(bytes(answer.body)) == {0: 2}
    answer = await peer.ask(reset(begin_ms + 4000, queue=0))
    assert offsets_in(bytes(answer.body)) == {0: 4}
    for queue, offset in ((0, 6), (1, 1), (4, 0)):
        assert (await peer.ask(reset(0, queue=queue, offset=offset))).code == ResponseCode.SYSTEM_ERROR


async def test_offsets_that_nobody_would_hear_of_are_refused(broker: UnboundBroker, begin_ms: int, peer: Peer) -> None:
    admin = broker.connect()
    answer = await admin.ask(reset(begin_ms, topic="none"))
    assert (answer.code, answer.remark) == (
        ResponseCode.SYSTEM_ERROR,
        "[reset-offset] reset offset failed, no topic in this broker. topic=none",
    )
    answer = await admin.ask(reset(begin_ms, group="none"))
    assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, "THe consumer group <none> not exist")
    old = broker.connect()
    await beat(old, "c2", "g", version=27)
    peer.requests.clear()
    answer = await admin.ask(reset(begin_ms))
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "does not support this feature" in (answer.remark or "")
    assert peer.requests == []  # all members are told, or none
    for member in (old, peer):
        member.transport.abort()
    await admin.ask(send("T"))
    answer = await admin.ask(reset(begin_ms))
    assert answer.code == ResponseCode.CONSUMER_NOT_ONLINE
    assert "Consumer not online" in (answer.remark or "")
