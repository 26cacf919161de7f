"""Pulls: the messages they return, how they end, and offsets of queues and groups."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from duemq.broker.tables import clients
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.fastjson import dumps
from duemq.protocol.frames.frame import CODECS
from duemq.protocol.records import record
from duemq.protocol.requests.bodies import ConsumerData, HeartbeatData, SubscriptionData
from duemq.protocol.requests.headers import (
    PULL_COMMIT_OFFSET,
    PULL_SUBSCRIPTION,
    ConsumerGroupName,
    DeleteSubscriptionGroup,
    GetConsumeStats,
    PullMessageResponse,
    QueryConsumerOffset,
    QueueOfTopic,
    SearchOffset,
    TopicName,
    UpdateConsumerOffset,
    ViewMessage,
    decode_ext,
)
from duemq.storage.errors import StoreFormatError
from tests.support.broker import Peer, UnboundBroker, running
from tests.support.wire import pull, request, send


@pytest.fixture
async def topic(broker: UnboundBroker, peer: Peer) -> str:
    """A topic whose queue 0 has ten messages, a second apart, with tags a, b and c in turn."""
    for number in range(10):
        answer = await peer.ask(send("T", b"%d" % number, properties=f"TAGS\x01{'abc'[number % 3]}"))
        assert answer.code == 0
        broker.clock.advance(1000)
    return "T"


def offsets(answer: Command) -> list[int]:
    messages = record.decode_all(bytes(answer.body))
    assert [int(message.body) for message in messages] == [message.queue_offset for message in messages]
    return [message.queue_offset for message in messages]


# --- messages found


@pytest.mark.parametrize("frame_codec", CODECS)
async def test_messages_come_in_order_with_where_to_go_on(peer: Peer, topic: str, frame_codec: int) -> None:
    answer = await peer.ask(pull(topic, 2, count=3), frame_codec)
    assert (answer.code, answer.remark, offsets(answer)) == (ResponseCode.SUCCESS, "FOUND", [2, 3, 4])
    assert decode_ext(PullMessageResponse, answer.ext) == PullMessageResponse(0, 5, 0, 10)


@pytest.mark.parametrize(
    ("subscription", "found"),
    [
        ("*", list(range(10))), ("", list(range(10))), (None, list(range(10))), ("c", [2, 5, 8]),
        ("a || c", [0, 2, 3, 5, 6, 8, 9]), ("c||", [2, 5, 8]), ("a||b||c", list(range(10))),
    ],
)  # fmt: skip
async def test_only_messages_with_the_wanted_tags_come(
    peer: Peer, topic: str, subscription: str | None, found: list[int]
) -> None:
    answer = await peer.ask(pull(topic, 0, subscription=subscription))
    assert offsets(answer) == found
    assert answer.ext["nextBeginOffset"] == "10"


async def test_no_more_come_than_asked_for_and_allowed(tmp_path: Path) -> None:
    settings = ("maxTransferCountOnMessageInMemory=4", "maxTransferBytesOnMessageInMemory=1000")
    async with running(tmp_path, *settings) as broker:
        peer = broker.connect()
        for size in (10, 10, 10, 10, 10, 600, 600, 2000, 2000):
            await peer.ask(send("T", bytes(size)))

        async def count(offset: int, wanted: int) -> int:
            answer = await peer.ask(pull("T", offset, count=wanted))
            assert answer.code == 0
            return len(record.decode_all(bytes(answer.body)))

        assert [await count(0, wanted) for wanted in (1, 3, 4, 5, 2**31 - 1)] == [1, 3, 4, 4, 4]
        assert [await count(0, wanted) for wanted in (0, -1, -(2**31))] == [1, 1, 1]
        assert [await count(offset, 4) for offset in (4, 5, 6, 7)] == [2, 1, 1, 1]


@pytest.mark.parametrize(
    ("offset", "code", "remark", "moved_to"),
    [
        (10, ResponseCode.PULL_NOT_FOUND, "OFFSET_OVERFLOW_ONE", 10),
        (11, ResponseCode.PULL_OFFSET_MOVED, "OFFSET_OVERFLOW_BADLY", 10),
        (2**63 - 1, ResponseCode.PULL_OFFSET_MOVED, "OFFSET_OVERFLOW_BADLY", 10),
        (-1, ResponseCode.PULL_OFFSET_MOVED, "OFFSET_TOO_SMALL", 0),
        (-(2**63), ResponseCode.PULL_OFFSET_MOVED, "OFFSET_TOO_SMALL", 0),
    ],
)
@pytest.mark.parametrize("frame_codec", CODECS)
async def test_an_offset_outside_the_queue_is_moved_into_it(
    peer: Peer, topic: str, offset: int, code: int, remark: str, moved_to: int, frame_codec: int
) -> None:
    answer = await peer.ask(pull(topic, offset), frame_codec)
    assert (answer.code, answer.remark, bytes(answer.body)) == (code, remark, b"")
    assert decode_ext(PullMessageResponse, answer.ext) == PullMessageResponse(0, moved_to, 0, 10)


@pytest.mark.parametrize(
    ("offset", "code"),
    [(0, ResponseCode.PULL_NOT_FOUND), (5, ResponseCode.PULL_OFFSET_MOVED), (-1, ResponseCode.PULL_OFFSET_MOVED)],
)
async def test_a_queue_without_messages(peer: Peer, topic: str, offset: int, code: int) -> None:
    answer = await peer.ask(pull(topic, offset, queue_id=3))
    assert (answer.code, answer.ext["nextBeginOffset"]) == (code, "0")


async def test_when_nothing_matches_the_next_pull_goes_on_behind_it(peer: Peer, topic: str) -> None:
    answer = await peer.ask(pull(topic, 0, subscription="nothing"))
    assert (answer.code, answer.remark) == (ResponseCode.PULL_RETRY_IMMEDIATELY, "NO_MATCHED_MESSAGE")
    assert answer.ext["nextBeginOffset"] == "10"


async def test_lite_pulls_are_pulls(peer: Peer, topic: str) -> None:
    command = pull(topic, 8)
    command.code = RequestCode.LITE_PULL_MESSAGE
    assert offsets(await peer.ask(command)) == [8, 9]


async def test_long_subscriptions_are_not_remembered(broker: UnboundBroker, peer: Peer, topic: str) -> None:
    """Long subscriptions are not cached, so that expressions made up by clients cannot fill memory."""
    before = clients._known_codes.cache_info().currsize
    for number in range(5):
        expression = "||".join([f"tag{number}-{n}" for n in range(999)] + ["c"])
        assert offsets(await peer.ask(pull(topic, 0, subscription=expression))) == [2, 5, 8]
    assert clients._known_codes.cache_info().currsize == before


# --- refusals


async def test_pulls_that_cannot_be_are_refused(peer: Peer, topic: str) -> None:
    for command, code in (
        (pull("Missing"), ResponseCode.TOPIC_NOT_EXIST),
        (pull("x" * 100_000), ResponseCode.TOPIC_NOT_EXIST),
        (pull(topic, queue_id=4), ResponseCode.SYSTEM_ERROR),
        (pull(topic, queue_id=-1), ResponseCode.SYSTEM_ERROR),
        (pull(topic, expression_type="SQL92"), ResponseCode.SYSTEM_ERROR),
        (pull(topic, subscription="||"), ResponseCode.SUBSCRIPTION_PARSE_FAILED),
        (pull(topic, sys_flag=0, group="nobody"), ResponseCode.SUBSCRIPTION_NOT_EXIST),
    ):
        answer = await peer.ask(command)
        assert answer.code == code
        assert answer.remark
        assert len(answer.remark) <= 1024


# --- subscriptions by heartbeat


async def heartbeat(peer: Peer, *subscriptions: SubscriptionData, model: str = "CLUSTERING") -> None:
    data = HeartbeatData("c1", None, [ConsumerData("g", "CONSUME_PASSIVELY", model, None, list(subscriptions))])
    assert (await peer.ask(request(RequestCode.HEART_BEAT, body=dumps(data)))).code == 0


async def test_without_a_subscription_of_its_own_a_pull_has_that_of_the_heartbeat(peer: Peer, topic: str) -> None:
    await heartbeat(peer, SubscriptionData(topic, "c", 5))

    async def found(sub_version: int) -> Command:
        return await peer.ask(pull(topic, 0, group="g", sys_flag=0, subscription="a", sub_version=sub_version))

    assert offsets(await found(5)) == offsets(await found(4)) == [2, 5, 8]
    assert (await found(6)).code == ResponseCode.SUBSCRIPTION_NOT_LATEST
    await peer.ask(send("Other"))
    answer = await peer.ask(pull("Other", 0, group="g", sys_flag=0))
    assert answer.code == ResponseCode.SUBSCRIPTION_NOT_EXIST


async def test_a_group_may_be_kept_from_broadcasting(peer: Peer, topic: str) -> None:
    await heartbeat(peer, SubscriptionData(topic, "*", 5), model="BROADCASTING")
    assert (await peer.ask(pull(topic, 0, group="g", sys_flag=0))).code == 0
    body = b'{"groupName":"g","consumeBroadcastEnable":false}'
    await peer.ask(request(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body))
    assert (await peer.ask(pull(topic, 0, group="g", sys_flag=0))).code == ResponseCode.NO_PERMISSION


# --- offsets of groups


async def query(
    peer: Peer, group: str, topic: str, queue_id: int = 0, *, set_zero_if_not_found: bool | None = None
) -> int | None:
    header = QueryConsumerOffset(group, topic, queue_id, set_zero_if_not_found)
    answer = await peer.ask(request(RequestCode.QUERY_CONSUMER_OFFSET, header))
    if answer.code == ResponseCode.QUERY_NOT_FOUND:
        return None
    assert answer.code == 0
    return int(answer.ext["offset"])


def commit(group: str, topic: str, queue_id: int, offset: int, *, oneway: bool = False) -> Command:
    header = UpdateConsumerOffset(group, topic, queue_id, offset)
    return request(RequestCode.UPDATE_CONSUMER_OFFSET, header, oneway=oneway)


async def test_a_committed_offset_is_told(peer: Peer, topic: str) -> None:
    assert await query(peer, "g", topic) == 0
    assert (await peer.ask(commit("g", topic, 0, 7))).code == 0
    peer.post(commit("g", topic, 1, 3, oneway=True))
    assert await query(peer, "g", topic) == 7
    assert await query(peer, "g", topic, 1) == 3
    assert await query(peer, "h", topic) == 0


async def test_a_group_without_an_offset_is_told_so_if_it_asks(peer: Peer, topic: str) -> None:
    assert await query(peer, "g", topic, set_zero_if_not_found=True) == 0
    assert await query(peer, "g", topic, set_zero_if_not_found=False) is None
    await peer.ask(commit("g", topic, 0, 0))
    assert await query(peer, "g", topic, set_zero_if_not_found=False) == 0


async def test_a_pull_commits_only_where_it_says_so(peer: Peer, topic: str) -> None:
    await peer.ask(pull(topic, 5, group="g", commit_offset=4))
    assert await query(peer, "g", topic) == 0
    await peer.ask(pull(topic, 5, group="g", commit_offset=4, sys_flag=PULL_SUBSCRIPTION | PULL_COMMIT_OFFSET))
    assert await query(peer, "g", topic) == 4


async def test_offsets_of_what_is_not_there_are_refused(broker: UnboundBroker, peer: Peer, topic: str) -> None:
    """Offsets of unknown topics, groups or queues are refused: each would be kept for ever, and written to the disk
    every few seconds."""
    for command, code in (
        (commit("g", "Missing", 0, 1), ResponseCode.TOPIC_NOT_EXIST),
        (commit("g", "x" * 100_000, 0, 1), ResponseCode.TOPIC_NOT_EXIST),
        (commit("bad group", topic, 0, 1), ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST),
        (commit("g", topic, 4, 1), ResponseCode.SYSTEM_ERROR),
        (commit("g", topic, -1, 1), ResponseCode.SYSTEM_ERROR),
        (commit("g", topic, 0, -1), ResponseCode.SYSTEM_ERROR),
    ):
        assert (await peer.ask(command)).code == code
    assert broker.offsets.to_json()["offsetTable"] == {}


@pytest.mark.parametrize(
    ("queue_id", "offset"), [(0, -2), (0, -(2**62)), (0, 2**63 // 20 + 1), (-1, 7), (2**31, 7)], ids=str
)
async def test_an_offset_in_the_table_that_cannot_be_stops_the_start(
    tmp_path: Path, queue_id: int, offset: int
) -> None:
    """An impossible offset in the table stops the start: the group would read from the queue's beginning, or wait for
    ever."""
    path = tmp_path / "config" / "consumerOffset.json"
    path.parent.mkdir()
    text = json.dumps({"offsetTable": {"T@g": {str(queue_id): offset}}})
    path.write_text(text)
    with pytest.raises(StoreFormatError, match=rf"T@g: queue {queue_id} has the offset {offset}"):
        async with running(tmp_path):
            pass
    assert path.read_text() == text


async def test_an_offset_of_rocketmqs_that_says_none_is_none(tmp_path: Path) -> None:
    path = tmp_path / "config" / "consumerOffset.json"
    path.parent.mkdir()
    path.write_text('{"offsetTable":{"T@g":{"0":-1,"1":5}}}')
    async with running(tmp_path) as broker:
        assert [broker.offsets.get("g", "T", queue_id) for queue_id in (0, 1)] == [None, 5]


async def test_committed_offsets_survive_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        peer = broker.connect()
        await peer.ask(send("T"))
        await peer.ask(commit("g", "T", 2, 7))
    async with running(tmp_path) as broker:
        peer = broker.connect()
        assert await query(peer, "g", "T", 2) == 7
        answer = await peer.ask(request(RequestCode.GET_ALL_CONSUMER_OFFSET))
        assert json.loads(bytes(answer.body))["offsetTable"] == {"T@g": {"2": 7}}


async def test_how_far_a_group_is_is_told(broker: UnboundBroker, peer: Peer, topic: str) -> None:
    await peer.ask(commit("g", topic, 0, 4))
    answer = await peer.ask(request(RequestCode.GET_CONSUME_STATS, GetConsumeStats("g")))
    text = bytes(answer.body)
    queue = b'{"brokerName":"broker-a","queueId":0,"topic":"T"}'
    assert text.startswith(b'{"consumeTps":0.0,"offsetTable":{' + queue + b':{"brokerOffset":10,"consumerOffset":4,')
    answer = await peer.ask(request(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, TopicName(topic)))
    assert json.loads(bytes(answer.body)) == {"groupList": ["g"]}
    answer = await peer.ask(request(RequestCode.GET_TOPIC_STATS_INFO, TopicName(topic)))
    assert queue + b':{"lastUpdateTimestamp":1700000009000,"maxOffset":10,"minOffset":0}' in bytes(answer.body)


async def test_what_is_pulled_and_not_consumed_is_told(peer: Peer, topic: str) -> None:
    async def pull_offsets() -> list[int]:
        answer = await peer.ask(request(RequestCode.GET_CONSUME_STATS, GetConsumeStats("g", topic)))
        return [int(each) for each in re.findall(rb'"pullOffset":(\d+)', bytes(answer.body))]

    await peer.ask(commit("g", topic, 0, 2))
    assert (await pull_offsets())[0] == 2
    await peer.ask(pull(topic, 2, group="g", count=5))
    assert (await pull_offsets())[0] == 7
    await peer.ask(commit("g", topic, 0, 9))
    assert (await pull_offsets())[0] == 9
    await peer.ask(request(RequestCode.DELETE_SUBSCRIPTIONGROUP, DeleteSubscriptionGroup("g", remove_offset=True)))
    assert (await pull_offsets())[0] == 0


# --- offsets of queues


async def ask_offset(peer: Peer, code: int, header: Any) -> int:
    answer = await peer.ask(request(code, header))
    assert answer.code == 0, answer.remark
    return int(answer.ext["offset"])


async def test_the_ends_of_a_queue_are_told(peer: Peer, topic: str) -> None:
    for queue_id, low, high in ((0, 0, 10), (1, 0, 0), (99, 0, 0), (-1, 0, 0)):
        assert await ask_offset(peer, RequestCode.GET_MIN_OFFSET, QueueOfTopic(topic, queue_id)) == low
        assert await ask_offset(peer, RequestCode.GET_MAX_OFFSET, QueueOfTopic(topic, queue_id)) == high
    for name, queue_id, time in ((topic, 0, 1_700_000_000_000), (topic, 1, -1), ("Missing", 0, -1)):
        answer = await peer.ask(request(RequestCode.GET_EARLIEST_MSG_STORETIME, QueueOfTopic(name, queue_id)))
        assert answer.ext["timestamp"] == str(time)


@pytest.mark.parametrize(
    ("after_ms", "boundary", "offset"),
    [
        (-1, None, 0), (0, None, 0), (1, None, 1), (1000, None, 1), (4500, None, 5), (9000, None, 9), (9001, None, 10),
        (2**62, None, 10), (-(2**62), None, 0), (4500, "LOWER", 5), (4500, "UPPER", 4), (5000, "upper", 5),
        (2**62, "UPPER", 9), (-1, "UPPER", 0),
    ],
)  # fmt: skip
async def test_a_queue_is_searched_by_time(
    peer: Peer, topic: str, after_ms: int, boundary: str | None, offset: int
) -> None:
    header = SearchOffset(topic, 0, 1_700_000_000_000 + after_ms, boundary)
    assert await ask_offset(peer, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header) == offset


async def test_a_search_of_a_queue_without_messages_finds_its_start(peer: Peer, topic: str) -> None:
    for name, queue_id in ((topic, 1), (topic, 99), ("Missing", 0)):
        header = SearchOffset(name, queue_id, 1_700_000_000_000)
        assert await ask_offset(peer, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header) == 0


@pytest.mark.parametrize("frame_codec", CODECS)
async def test_a_message_is_given_by_its_physical_offset(peer: Peer, topic: str, frame_codec: int) -> None:
    (first,) = record.decode_all(bytes((await peer.ask(pull(topic, 3, count=1))).body))
    answer = await peer.ask(request(RequestCode.VIEW_MESSAGE_BY_ID, ViewMessage(first.physical_offset)), frame_codec)
    assert record.decode_all(bytes(answer.body)) == [first]


@pytest.mark.parametrize("offset", [-1, 1, 10**9, 2**63 - 1, -(2**63)])
async def test_where_no_message_begins_none_is_given(peer: Peer, topic: str, offset: int, logged: list[Any]) -> None:
    answer = await peer.ask(request(RequestCode.VIEW_MESSAGE_BY_ID, ViewMessage(offset)))
    assert (answer.code, str(offset) in (answer.remark or "")) == (ResponseCode.SYSTEM_ERROR, True)
    assert logged == []


async def test_a_member_of_no_group_is_told_so(peer: Peer) -> None:
    answer = await peer.ask(request(RequestCode.GET_CONSUMER_LIST_BY_GROUP, ConsumerGroupName("g")))
    assert answer.code == ResponseCode.SYSTEM_ERROR


# --- records missing from the commitlog


@pytest.mark.parametrize("properties", ["TAGS\x01a", ""])
@pytest.mark.parametrize("count", [1, 3, 32])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.45, 0.5, 0.55, 0.97])
async def test_an_older_copy_of_a_file_has_no_messages_to_give(
    tmp_path: Path, properties: str, count: int, share: float
) -> None:
    """An older copy of a commitlog file, whose newest messages are zeros, gives no such messages: a consumer goes on
    behind them."""
    file_size = 98_304
    async with running(tmp_path, f"mappedFileSizeCommitLog={file_size}", "maxMessageSize=20000") as broker:
        peer = broker.connect()
        for number in range(90):
            body = b"%02d" % number + b"." * 3000
            assert (await peer.ask(send("T", body, properties=properties))).code == 0
        assert await everything(peer, count) == (list(range(90)), 0)
        size = len((await peer.ask(pull("T", 0, count=1))).body)
        place = int(file_size * share)
        with sorted((tmp_path / "commitlog").iterdir())[1].open("r+b") as file:
            file.seek(place)
            file.write(bytes(file_size - place))
        found, moves = await everything(peer, count)
        per_file = file_size // size
        assert found == [*range(per_file + place // size), *range(2 * per_file, 90)]
        assert moves <= 2 + per_file // count


async def everything(peer: Peer, count: int) -> tuple[list[int], int]:
    """Return the numbers of all messages, and the number of pulls without messages before the end."""
    found, offset, moves = list[int](), 0, 0
    while True:
        answer = await peer.ask(pull("T", offset, count=count))
        if answer.code == ResponseCode.PULL_NOT_FOUND:
            return found, moves
        following = int(answer.ext["nextBeginOffset"])
        assert following > offset
        if answer.code == ResponseCode.SUCCESS:
            found += [int(message.body[:2]) for message in record.decode_all(bytes(answer.body))]
        else:
            assert (answer.code, answer.remark) == (ResponseCode.PULL_RETRY_IMMEDIATELY, "MESSAGE_WAS_REMOVING")
            moves += 1
        offset = following
