"""Topics: valid names, their creation, and their permissions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from duemq.broker.errors import Refused
from duemq.broker.tables.topics import check_name
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames.command import Command
from duemq.protocol.requests.headers import CreateTopic, DeleteSubscriptionGroup, TopicName
from duemq.protocol.topics import SCHEDULE_TOPIC, TIMER_TOPIC
from duemq.storage.errors import StoreFormatError
from tests.support.broker import Peer, UnboundBroker, running
from tests.support.wire import pull, request, send

FORBIDDEN = [
    SCHEDULE_TOPIC, "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC", "TRANS_CHECK_MAX_TIME_TOPIC",
    "SELF_TEST_TOPIC", "OFFSET_MOVED_EVENT", TIMER_TOPIC,
]  # fmt: skip


def create(
    topic: str,
    read: int = 4,
    write: int = 4,
    perm: int = 6,
    kind: str = "SINGLE_TAG",
    attributes: str | None = None,
) -> Command:
    header = CreateTopic(topic, "TBW102", read, write, perm, kind, attributes=attributes)
    return request(RequestCode.UPDATE_AND_CREATE_TOPIC, header)


async def queues(peer: Peer, topic: str) -> tuple[int, int, int]:
    answer = await peer.ask(request(RequestCode.GET_TOPIC_CONFIG, TopicName(topic)))
    assert answer.code == 0, answer.remark
    body = json.loads(bytes(answer.body))
    return body["readQueueNums"], body["writeQueueNums"], body["perm"]


# --- names


@pytest.mark.parametrize("name", ["T", "a-b_C|%9", "x" * 127, "%RETRY%g"])
def test_names_that_may_be(name: str) -> None:
    check_name(name)


@pytest.mark.parametrize("name", ["", " ", "a b", "a.b", "../x", "a/b", "ü", "a\n", "a@b", "x" * 128, "a\0"])
def test_names_that_may_not_be(name: str) -> None:
    with pytest.raises(Refused) as caught:
        check_name(name)
    assert caught.value.code == ResponseCode.SYSTEM_ERROR


@pytest.mark.parametrize("name", ["a b", "../../x", "x" * 128, ""])
async def test_neither_a_send_nor_an_administrator_makes_a_wrong_name(
    broker: UnboundBroker, peer: Peer, name: str
) -> None:
    for command in (send(name), create(name)):
        assert (await peer.ask(command)).code == ResponseCode.SYSTEM_ERROR
    assert name not in broker.topics.table


# --- made by a send


async def test_a_send_makes_its_topic_after_the_default_one(broker: UnboundBroker, peer: Peer) -> None:
    assert (await peer.ask(send("T", default_queues=3))).code == 0
    assert await queues(peer, "T") == (3, 3, 6)
    assert (await peer.ask(send("U", default_queues=100))).code == 0
    assert await queues(peer, "U") == (8, 8, 6)


async def test_sends_that_come_before_the_topic_is_durable_are_all_taken_in_order(peer: Peer) -> None:
    answers = await peer.ask_all([send("T", b"%d" % number) for number in range(20)])
    assert [answer.code for answer in answers] == [0] * 20
    assert [int(answer.ext["queueOffset"]) for answer in answers] == list(range(20))


async def test_a_topic_made_by_a_send_is_there_after_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        await broker.connect().ask(send("T", default_queues=3))
        assert "T" in json.loads((tmp_path / "config" / "topics.json").read_text())["topicConfigTable"]
    async with running(tmp_path) as broker:
        peer = broker.connect()
        assert await queues(peer, "T") == (3, 3, 6)
        assert (await peer.ask(send("T"))).ext["queueOffset"] == "1"


@pytest.mark.parametrize("default_topic", ["TBW102", "NoSuch", "SELF_TEST_TOPIC", ""])
async def test_without_auto_creation_a_send_makes_nothing(tmp_path: Path, default_topic: str) -> None:
    async with running(tmp_path, "autoCreateTopicEnable=false") as broker:
        peer = broker.connect()
        answer = await peer.ask(send("T", default_topic=default_topic))
        assert (answer.code, "updateTopic" in (answer.remark or "")) == (ResponseCode.TOPIC_NOT_EXIST, True)
        assert "T" not in broker.topics.table
        assert (await peer.ask(pull("T"))).code == ResponseCode.TOPIC_NOT_EXIST


async def test_without_auto_creation_a_retry_topic_is_made_all_the_same(tmp_path: Path) -> None:
    async with running(tmp_path, "autoCreateTopicEnable=false") as broker:
        peer = broker.connect()
        assert (await peer.ask(send("%RETRY%g", default_topic="%RETRY%g", default_queues=1))).code == 0
        assert await queues(peer, "%RETRY%g") == (1, 1, 6)


async def test_only_a_topic_to_inherit_from_serves_as_default(peer: Peer) -> None:
    await peer.ask(create("Plain", perm=6))
    assert (await peer.ask(send("T", default_topic="Plain"))).code == ResponseCode.TOPIC_NOT_EXIST
    await peer.ask(create("Parent", 2, 2, perm=7))
    assert (await peer.ask(send("T", default_topic="Parent"))).code == 0
    assert await queues(peer, "T") == (2, 2, 6)


# --- made by an administrator


async def test_an_administrator_makes_and_changes_topics(broker: UnboundBroker, peer: Peer) -> None:
    assert (await peer.ask(create("T", 2, 3, 6))).code == 0
    assert await queues(peer, "T") == (2, 3, 6)
    assert (await peer.ask(send("T", queue_id=2))).code == 0
    assert (await peer.ask(send("T", queue_id=3))).code == ResponseCode.SYSTEM_ERROR
    before = broker.topics.version.counter
    assert (await peer.ask(create("T", 8, 4, 6))).code == 0
    assert broker.topics.version.counter == before + 1
    assert (await peer.ask(send("T", queue_id=7))).code == 0
    assert (await peer.ask(send("T", queue_id=8))).code == ResponseCode.SYSTEM_ERROR
    assert (await peer.ask(pull("T", queue_id=7))).code == 0


@pytest.mark.parametrize(
    "command",
    [
        create("T", read=-1), create("T", write=4097), create("T", read=2**31 - 1), create("T", perm=8),
        create("T", perm=-1), create("T", attributes="nonsense"), create("TBW102"), create(SCHEDULE_TOPIC),
        create("broker-a"), create("DefaultCluster"), create("rmq_sys_x"), create("T", kind="SOME"),
    ],
    ids=lambda command: ",".join(command.ext.values()),
)  # fmt: skip
async def test_topics_that_cannot_be_are_refused(broker: UnboundBroker, peer: Peer, command: Command) -> None:
    before = broker.topics.version.counter
    command = Command(code=command.code, opaque=7, ext=command.ext)
    answer = await peer.ask(command)
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert answer.remark
    assert broker.topics.version.counter == before


@pytest.mark.parametrize("name", ["timer.pasued", "delay.level", "timer."])
async def test_a_misspelt_attribute_of_ours_is_refused(broker: UnboundBroker, peer: Peer, name: str) -> None:
    answer = await peer.ask(create("T", attributes=f"+{name}=true"))
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert f"unsupported key: {name}, supported are timer.release.rate" in (answer.remark or "")
    assert "T" not in broker.topics.table


async def test_attributes_are_added_and_taken_away(broker: UnboundBroker, peer: Peer) -> None:
    await peer.ask(create("T", attributes="+message.type=DELAY,+a=b"))
    assert broker.topics.table["T"].config.attributes == {"message.type": "DELAY", "a": "b"}
    await peer.ask(create("T", attributes="-a"))
    assert broker.topics.table["T"].config.attributes == {"message.type": "DELAY"}
    await peer.ask(create("T", attributes="-message.type"))
    assert not broker.topics.table["T"].config.attributes


async def test_what_is_deleted_has_no_offsets_after_a_kill_either(broker: UnboundBroker, peer: Peer) -> None:
    """A deleted topic or group has no offsets after a kill either, or a later topic with its name would be read from
    there."""
    await peer.ask(send("T"))
    for topic, group in (("T", "g"), ("U", "h"), ("U", "stays")):
        broker.offsets.commit(group, topic, 0, 1)
    await broker.offsets.save()
    path = Path(broker.config.store_root) / "config" / "consumerOffset.json"
    assert (await peer.ask(request(RequestCode.DELETE_TOPIC_IN_BROKER, TopicName("T")))).code == ResponseCode.SUCCESS
    assert set(json.loads(path.read_text())["offsetTable"]) == {"U@h", "U@stays"}
    delete = DeleteSubscriptionGroup("h", remove_offset=True)
    assert (await peer.ask(request(RequestCode.DELETE_SUBSCRIPTIONGROUP, delete))).code == ResponseCode.SUCCESS
    assert set(json.loads(path.read_text())["offsetTable"]) == {"U@stays"}


async def test_a_deleted_topic_is_gone_with_its_messages_and_offsets(broker: UnboundBroker, peer: Peer) -> None:
    await peer.ask(send("T"))
    broker.offsets.commit("g", "T", 0, 1)
    assert (await peer.ask(request(RequestCode.DELETE_TOPIC_IN_BROKER, TopicName("T")))).code == 0
    assert (await peer.ask(pull("T"))).code == ResponseCode.TOPIC_NOT_EXIST
    assert broker.offsets.get("g", "T", 0) is None
    assert (await peer.ask(send("T"))).ext["queueOffset"] == "0"
    assert (await peer.ask(request(RequestCode.DELETE_TOPIC_IN_BROKER, TopicName("TBW102")))).code == 1


# --- permissions


@pytest.mark.parametrize(
    ("perm", "may_send", "may_pull"), [(6, True, True), (4, False, True), (2, True, False), (0, False, False)]
)
async def test_a_topics_permissions_are_kept(peer: Peer, perm: int, may_send: bool, may_pull: bool) -> None:
    await peer.ask(create("T", perm=perm))
    assert (await peer.ask(send("T"))).code == (0 if may_send else ResponseCode.NO_PERMISSION)
    expected = ResponseCode.PULL_NOT_FOUND if not may_send else 0
    assert (await peer.ask(pull("T"))).code == (expected if may_pull else ResponseCode.NO_PERMISSION)


async def test_taking_the_permission_to_write_away_holds_at_once(peer: Peer) -> None:
    await peer.ask_all([send("T"), send("T")])
    await peer.ask(create("T", perm=4))
    assert (await peer.ask(send("T"))).code == ResponseCode.NO_PERMISSION
    await peer.ask(create("T", perm=6))
    assert (await peer.ask(send("T"))).code == 0


@pytest.mark.parametrize(("perm", "may_send", "may_pull"), [(4, False, True), (2, True, False)])
async def test_the_brokers_permissions_are_kept(tmp_path: Path, perm: int, may_send: bool, may_pull: bool) -> None:
    async with running(tmp_path, f"brokerPermission={perm}") as broker:
        peer = broker.connect()
        await peer.ask(create("T"))
        for _ in range(2):
            assert (await peer.ask(send("T"))).code == (0 if may_send else ResponseCode.NO_PERMISSION)
        assert ((await peer.ask(pull("T"))).code != ResponseCode.NO_PERMISSION) == may_pull


@pytest.mark.parametrize("name", FORBIDDEN)
async def test_clients_do_not_send_to_the_brokers_own_topics(peer: Peer, name: str) -> None:
    for _ in range(2):
        assert (await peer.ask(send(name))).code == ResponseCode.NO_PERMISSION
        assert (await peer.ask(send(name, batch=True))).code == ResponseCode.NO_PERMISSION


async def test_the_brokers_own_topics_are_told(peer: Peer) -> None:
    answer = await peer.ask(request(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER))
    names = json.loads(bytes(answer.body))["topicList"]
    assert {"TBW102", SCHEDULE_TOPIC, "DefaultCluster", "broker-a"} <= set(names)


# --- the file


async def test_what_a_newer_rocketmq_wrote_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "config" / "topics.json"
    path.parent.mkdir()
    path.write_text(
        '{"dataVersion":{"counter":3,"timestamp":5,"stateVersion":1},"other":{"x":1},'
        '"topicConfigTable":{"T":{"topicName":"T","readQueueNums":2,"writeQueueNums":2,"perm":6,"later":"y"}}}'
    )
    async with running(tmp_path) as broker:
        assert await queues(broker.connect(), "T") == (2, 2, 6)
    table = json.loads(path.read_text())
    assert table["other"] == {"x": 1}
    assert table["topicConfigTable"]["T"]["later"] == "y"
    assert table["dataVersion"]["stateVersion"] == 1


@pytest.mark.parametrize("name", ["topics.json", "subscriptionGroup.json", "consumerOffset.json", "kvConfig.json"])
@pytest.mark.parametrize(
    "text",
    [
        '{"topicConfigTable":[1],"subscriptionGroupTable":[1],"offsetTable":[1],"configTable":[1]}',
        '{"topicConfigTable":{"T":1},"subscriptionGroupTable":{"g":1},"offsetTable":{"T@g":1},"configTable":{"n":1}}',
        '{"topicConfigTable":{"T":{"perm":"x"}},"subscriptionGroupTable":{"g":{"retryMaxTimes":[]}},'
        '"offsetTable":{"T@g":{"0":"x"}},"configTable":"x"}',
        "[1]",
        "{",
        '{"a":"\udcff"}',
    ],
)
async def test_a_table_that_is_not_as_it_must_be_stops_the_start_with_its_name(
    tmp_path: Path, name: str, text: str
) -> None:
    """A malformed table stops the start with its name, and without a traceback."""
    path = tmp_path / "config" / name
    path.parent.mkdir()
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(StoreFormatError, match=name):
        async with running(tmp_path):
            pass
