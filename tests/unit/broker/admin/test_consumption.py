"""What groups have consumed, and what is removed on request."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames import fastjson
from duemq.protocol.requests import headers
from duemq.protocol.requests.bodies import ConsumerData, HeartbeatData, SubscriptionData
from duemq.storage.clock import ManualClock
from duemq.storage.durability.owner import EXPIRE_SECONDS
from tests.support.broker import Peer, UnboundBroker, running
from tests.support.loop import SteppedLoop, turns
from tests.support.wire import pull, request, send


async def ask(peer: Peer, code: RequestCode, header: headers.Header | None = None, body: Any = None) -> Any:
    answer = await peer.ask(request(code, header, fastjson.dumps(body) if body is not None else b""))
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return json.loads(bytes(answer.body)) if answer.body else None


async def join(peer: Peer, group: str, topic: str) -> None:
    beat = HeartbeatData(group, [], [ConsumerData(group, subscription_data_set=[SubscriptionData(topic, "a || b", 1)])])
    await peer.ask(request(RequestCode.HEART_BEAT, body=fastjson.dumps(beat)))


async def commit(peer: Peer, group: str, topic: str, queue_id: int, offset: int) -> None:
    await ask(peer, RequestCode.UPDATE_CONSUMER_OFFSET, headers.UpdateConsumerOffset(group, topic, queue_id, offset))


@pytest.fixture
async def consumed(broker: UnboundBroker, peer: Peer) -> UnboundBroker:
    """Ten messages of T in two of its four queues, a second apart, and a group that has consumed some of them."""
    for number in range(10):
        await peer.ask(send("T", queue_id=number % 2, properties="TAGS\x01a\x02"))
        broker.clock.advance(1000)
    await join(peer, "g", "T")
    await commit(peer, "g", "T", 0, 2)
    await commit(peer, "g", "T", 1, 5)
    await peer.ask(pull("T", 2, group="g", count=2))
    return broker


async def test_the_progress_of_all_groups(consumed: UnboundBroker, peer: Peer) -> None:
    answer = await peer.ask(request(RequestCode.GET_BROKER_CONSUME_STATS, headers.GetBrokerConsumeStats()))
    body = bytes(answer.body)
    assert b'"totalDiff":3,"totalInflightDiff":2}' in body
    assert body.startswith(b'{"brokerAddr":"127.0.0.1:10911","consumeStatsList":[{"')
    assert b'{"g":[{"consumeTps":' in body
    assert body.count(b'"brokerOffset"') == 4
    ordered = await peer.ask(request(RequestCode.GET_BROKER_CONSUME_STATS, headers.GetBrokerConsumeStats(True)))
    assert b'{"g":[]}' in bytes(ordered.body)


async def test_topics_and_subscriptions_of_a_group(consumed: UnboundBroker, peer: Peer) -> None:
    topics = await ask(peer, RequestCode.QUERY_TOPICS_BY_CONSUMER, headers.Group("g"))
    assert topics == {"brokerAddr": "127.0.0.1:10911", "topicList": ["T"]}
    found = await ask(peer, RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER, headers.GroupOfTopic("T", "g"))
    assert (found["group"], found["topic"], found["subscriptionData"]["subString"]) == ("g", "T", "a || b")
    none = await ask(peer, RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER, headers.GroupOfTopic("T", "other"))
    assert none == {"group": "other", "topic": "T"}


async def test_the_time_spans_of_a_group(consumed: UnboundBroker, peer: Peer) -> None:
    start = consumed.clock.now_ms() - 10_000
    body = await ask(peer, RequestCode.QUERY_CONSUME_TIME_SPAN, headers.GroupOfTopic("T", "g"))
    spans = [{name: span[name] for name in span if name != "messageQueue"} for span in body["consumeTimeSpanSet"]]
    # Stored at 0, 2, 4, 6 and 8 s in queue 0, of which two are consumed; at 1, 3, ... in queue 1, all consumed.
    assert spans[0] == {
        "minTimeStamp": start,
        "maxTimeStamp": start + 8000,
        "consumeTimeStamp": start + 2000,
        "delayTime": 6000,
    }
    assert spans[1]["delayTime"] == 0
    assert spans[2] == {"minTimeStamp": -1, "maxTimeStamp": -1, "consumeTimeStamp": -1, "delayTime": 0}
    answer = await peer.ask(request(RequestCode.QUERY_CONSUME_TIME_SPAN, headers.GroupOfTopic("none", "g")))
    assert answer.code == ResponseCode.TOPIC_NOT_EXIST


async def test_offsets_are_copied_to_another_group(consumed: UnboundBroker, peer: Peer) -> None:
    refused = await peer.ask(request(RequestCode.CLONE_GROUP_OFFSET, headers.CloneGroupOffset("g", "no group", "T")))
    assert refused.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    await ask(peer, RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body={"groupName": "copy"})
    await ask(peer, RequestCode.CLONE_GROUP_OFFSET, headers.CloneGroupOffset("g", "copy"))
    assert consumed.offsets.all_of("copy", "T") == {0: 2, 1: 5}


async def test_corrections_are_the_smallest_offsets_of_other_groups(consumed: UnboundBroker, peer: Peer) -> None:
    for group, offsets in (("behind", (1, 4)), ("ahead", (4, 5))):
        await ask(peer, RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body={"groupName": group})
        for queue_id, offset in enumerate(offsets):
            await commit(peer, group, "T", queue_id, offset)
    for compared, ignored, expected in (
        ("g", None, {"0": 1, "1": 4}),
        ("g", "behind", {"0": 2, "1": 5}),
        ("behind", "behind", {"0": 2**63 - 1, "1": 2**63 - 1}),
    ):
        header = headers.QueryCorrectionOffset(compared, "T", ignored)
        assert await ask(peer, RequestCode.QUERY_CORRECTION_OFFSET, header) == {"correctionOffsets": expected}


async def test_units_of_a_queue(consumed: UnboundBroker, peer: Peer) -> None:
    header = headers.QueryConsumeQueue("T", 0, 1, 3, "g")
    body = await ask(peer, RequestCode.QUERY_CONSUME_QUEUE, header)
    assert (body["minQueueIndex"], body["maxQueueIndex"]) == (0, 5)
    assert body["subscriptionData"]["topic"] == "T"
    queue = consumed.store.queue("T", 0)
    assert queue is not None
    found = [(unit["physicOffset"], unit["physicSize"], unit["tagsCode"]) for unit in body["queueData"]]
    assert found == [queue.unit(offset) for offset in (1, 2, 3)]
    assert found[0][2] == ord("a")
    for index in (-1, 5):
        beyond = await peer.ask(request(RequestCode.QUERY_CONSUME_QUEUE, headers.QueryConsumeQueue("T", 0, index, 3)))
        assert (beyond.code, beyond.remark) == (0, f"Index {index} of 0@T is not exist!")
    none = await peer.ask(request(RequestCode.QUERY_CONSUME_QUEUE, headers.QueryConsumeQueue("T", 7, 0, 3)))
    assert (none.code, none.remark) == (ResponseCode.SYSTEM_ERROR, "7@T is not exist!")


# --- lists of topics and groups


async def test_topics_of_a_list_are_made_all_or_none(broker: UnboundBroker, peer: Peer) -> None:
    good = {
        "topicName": "A",
        "readQueueNums": 2,
        "writeQueueNums": 3,
        "perm": 6,
        "attributes": {"+timer.catch.up": "all"},
    }
    await ask(peer, RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, body={"topicConfigList": [good, {"topicName": "B"}]})
    made = broker.topics.table["A"].config
    assert (made.read_queue_nums, made.write_queue_nums, made.attributes) == (2, 3, {"timer.catch.up": "all"})
    assert "B" in broker.topics.table
    for bad in ({"topicName": "D", "perm": 9}, {"topicName": "a b"}, {"topicName": "SCHEDULE_TOPIC_XXXX"}):
        body = fastjson.dumps({"topicConfigList": [{"topicName": "C"}, bad]})
        answer = await peer.ask(request(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, body=body))
        assert answer.code != ResponseCode.SUCCESS
        assert "C" not in broker.topics.table


async def test_groups_of_a_list_are_made_all_or_none(broker: UnboundBroker, peer: Peer) -> None:
    groups = [{"groupName": "A", "retryMaxTimes": 3}, {"groupName": "B"}]
    await ask(peer, RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, body={"groupConfigList": groups})
    assert broker.groups.table["A"].retry_max_times == 3
    bad = {"groupConfigList": [{"groupName": "C"}, {"groupName": "D", "attributes": {"+x": "y"}}]}
    answer = await peer.ask(request(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, body=fastjson.dumps(bad)))
    assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, "unsupported key: x")
    assert "C" not in broker.groups.table


# --- cleaning


async def test_expired_files_go_at_any_hour_on_request(tmp_path: Path, loop: SteppedLoop) -> None:
    settings = ["mappedFileSizeCommitLog=131072", "maxMessageSize=65536", "fileReservedTime=1"]
    clock = ManualClock()
    another_hour = (time.localtime(clock.now_ms() / 1000).tm_hour + 12) % 24

    async def pass_time() -> None:
        clock.advance(500)
        loop.advance(0.5)
        await turns(20)

    async with running(tmp_path, *settings, f"deleteWhen={another_hour:02}", clock=clock) as broker:
        peer = broker.connect()
        while not all(part.needed_from() > 131_072 for part in broker.durability._parts.values()):
            await peer.ask(send("T", b"x" * 50_000))
            await pass_time()
        first, *_ = sorted((tmp_path / "commitlog").iterdir())
        clock.advance(2 * 3_600_000)
        await ask(peer, RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE)  # which keeps to the hours of deleteWhen
        end = clock.monotonic() + 2 * EXPIRE_SECONDS
        while clock.monotonic() < end:
            await pass_time()
        assert first.exists()
        await ask(peer, RequestCode.DELETE_EXPIRED_COMMITLOG)
        while first.exists():
            await pass_time()


async def test_queues_of_topics_that_do_not_exist_are_removed(
    broker: UnboundBroker, peer: Peer, tmp_path: Path
) -> None:
    await peer.ask_all([send("T"), send("U")])
    broker.topics.table.pop("T")
    await ask(peer, RequestCode.CLEAN_UNUSED_TOPIC)
    await turns(5)
    assert set(broker.store.queues) >= {"U"}
    assert "T" not in broker.store.queues


async def test_the_name_servers_settings(broker: UnboundBroker, peer: Peer) -> None:
    answer = await peer.ask(request(RequestCode.GET_NAMESRV_CONFIG))
    assert b"scanNotActiveBrokerInterval=120000\n" in bytes(answer.body)
    answer = await peer.ask(request(RequestCode.UPDATE_NAMESRV_CONFIG, body=b"clusterTest=true\n"))
    assert (answer.remark or "").startswith("the embedded name server has no settings of its own")
