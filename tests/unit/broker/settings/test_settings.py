"""Settings that change while the broker runs: all or none of an update, its listeners, and its effects."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import duemq.broker
from duemq.broker.errors import ConfigError
from duemq.broker.settings.config import FIELDS, LIVE, BrokerConfig, Origin, load
from duemq.broker.settings.live_settings import LiveSettings
from duemq.broker.settings.parts import READ_WHERE_USED, RETENTION_SETTINGS
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames import fastjson
from duemq.protocol.frames.command import Command
from duemq.protocol.requests.headers import ConsumerSendMsgBack, GetRouteInfo, TopicName
from duemq.protocol.requests.registration import encode_registration
from duemq.storage.durability.jobs import Lane
from tests.support.broker import Peer, UnboundBroker, running
from tests.support.loop import SteppedLoop, turns
from tests.support.wire import pull, request, send
from tests.unit.broker.settings.test_config import value_for
from tests.unit.broker.tables.test_clients import beat, notices

BROKER = Path(duemq.broker.__file__).parent


def update(text: str) -> Command:
    return request(RequestCode.UPDATE_BROKER_CONFIG, body=text.encode())


async def told(peer: Peer) -> dict[str, str]:
    """Return the settings as the broker reports them."""
    answer = await peer.ask(request(RequestCode.GET_BROKER_CONFIG))
    lines = bytes(answer.body).decode().splitlines()
    return dict(line.split("=", 1) for line in lines)


async def change(peer: Peer, **values: object) -> None:
    """Change settings, and check that the broker accepts them."""
    answer = await peer.ask(update("".join(f"{name}={value}\n" for name, value in values.items())))
    assert answer.code == ResponseCode.SUCCESS, answer.remark


@pytest.fixture
def settings() -> LiveSettings:
    return LiveSettings(load(None, [], {}).config)


# --- an update


def test_who_asked_hears_once_of_an_update(settings: LiveSettings) -> None:
    heard: list[BrokerConfig] = []
    others: list[BrokerConfig] = []
    settings.on_change(("fileReservedTime", "deleteWhen"), heard.append)
    settings.on_change("maxMessageSize", others.append)
    changes, ignored = settings.update({"fileReservedTime": "48", "deleteWhen": "05", "haListenPort": "1"})
    assert [(change.name, change.old, change.new) for change in changes] == [
        ("fileReservedTime", "72", "48"),
        ("deleteWhen", "04", "05"),
    ]
    assert ignored == ["haListenPort"]
    assert heard == [settings.config]
    assert (settings.config.file_reserved_hours, settings.config.delete_when) == (48, "05")
    assert others == []


def test_one_who_fails_does_not_keep_an_update_from_others(settings: LiveSettings, logged: Any) -> None:
    heard: list[BrokerConfig] = []

    def fail(_: BrokerConfig) -> None:
        raise OSError("x")

    settings.on_change("fileReservedTime", fail)
    settings.on_change("fileReservedTime", heard.append)
    settings.update({"fileReservedTime": "48"})
    assert heard == [settings.config]
    assert [line["event"] for line in logged] == ["setting_not_followed"]


def test_an_update_that_changes_nothing_is_none(settings: LiveSettings) -> None:
    heard: list[BrokerConfig] = []
    settings.on_change("fileReservedTime", heard.append)
    old, version = settings.config, settings.version.counter
    assert settings.update({"fileReservedTime": "72", "listenPort": "10911"}) == ([], [])
    assert heard == []
    assert settings.config is old
    assert settings.version.counter == version


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"fileReservedTim": "1"}, "there is no property fileReservedTim; did you mean fileReservedTime?"),
        ({"fileReservedTime": "x"}, "fileReservedTime=x: write a whole number"),
        ({"fileReservedTime": "-1"}, "fileReservedTime=-1: write a number from 0 to 10000000"),
        ({"deleteWhen": "4"}, "deleteWhen=4: write hours of two digits, such as 04 or 04;16"),
        ({"messageDelayLevel": "1x"}, "messageDelayLevel=1x: '1x' is not a delay: write a number and s, m, h or d"),
        ({"aclEnable": "true"}, "aclEnable cannot change while the broker runs: set it for the broker's next start"),
        ({"rocketmqHome": "x"}, "rocketmqHome cannot change while the broker runs: set it for the broker's next start"),
        ({"listenPort": "1234"}, "listenPort cannot change while the broker runs: set it for the broker's next start"),
        ({"testClock": "true"}, "testClock cannot change while the broker runs: set it for the broker's next start"),
    ],
)
def test_an_update_is_made_as_a_whole_or_refused(
    settings: LiveSettings, values: dict[str, str], complaint: str
) -> None:
    heard: list[BrokerConfig] = []
    settings.on_change(LIVE, heard.append)
    old = settings.config
    with pytest.raises(ConfigError) as caught:
        settings.update({"longPollingEnable": "false", **values})
    assert str(caught.value) == complaint
    assert settings.config is old
    assert heard == []


def test_relations_between_settings_hold_after_an_update_too() -> None:
    settings = LiveSettings(load(None, ["mappedFileSizeCommitLog=1000000", "maxMessageSize=65536"], {}).config)
    with pytest.raises(ConfigError, match="does not fit"):
        settings.update({"maxMessageSize": "1000000"})
    settings.update({"maxMessageSize": "900000"})


@pytest.mark.parametrize("name", sorted(set(FIELDS) - LIVE))
def test_what_only_a_start_can_change_is_refused(settings: LiveSettings, name: str) -> None:
    if value_for(name) == str(getattr(settings.config, FIELDS[name].name)).lower():
        return
    old = settings.config
    try:
        settings.update({name: value_for(name)})
    except ConfigError as error:
        assert "cannot change while the broker runs" in str(error)  # noqa: PT017
    assert settings.config is old


OF_A_START = re.compile(
    r"(?i)path|dir$|home|host|addr$|^bindAddress|port$|\bbrokerIP|\btls\.|acl|auth|secret|password|insecure|clock|"
    r"mqttBridge|(?<!maxRequestsPerSecondPer)account|"
    r"^broker(Name|ClusterName|Id|Role)$|audit.*(Path|Enable)|\.file$"
)
"""Names of paths, hosts and ports, of what decides about security, and of the clock. Limits are none of these."""


def test_who_may_change_settings_cannot_change_paths_hosts_ports_security_or_the_clock() -> None:
    named = {name for name in FIELDS if OF_A_START.search(name)}
    assert {"storePathRootDir", "bindAddress", "listenPort", "aclEnable", "tls.server.mode", "testClock"} <= named
    assert named & LIVE == set()


def test_only_live_properties_can_be_followed(settings: LiveSettings) -> None:
    with pytest.raises(ValueError, match="listenPort"):
        settings.on_change("listenPort", lambda _: None)


async def test_every_live_property_has_an_effect(broker: UnboundBroker) -> None:
    """Every live property is followed by a component or read where it is used: a setting that can be changed must have
    an effect."""
    assert broker.settings.followed | READ_WHERE_USED | set(RETENTION_SETTINGS) == LIVE
    assert not broker.settings.followed & (READ_WHERE_USED - {"brokerPermission"})
    sources = [path.read_text() for path in BROKER.rglob("*.py") if path.parent.name != "settings"]
    unread = {
        name
        for name in READ_WHERE_USED
        if not any(re.search(rf"config\.{FIELDS[name].name}\b", source) for source in sources)
    }
    assert unread == set()


def test_the_limits_on_the_page_about_security_can_change_while_the_broker_runs() -> None:
    page = (Path(__file__).parents[4] / "docs" / "security.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \|", page[page.index("\n## Limits\n") :], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row) if name in FIELDS}
    assert len(named) > 20
    budgets = {"maxUnfinishedRequestBytes", "maxUnreadResponseBytes", "maxWaitingRequestBytes"}
    assert named - LIVE == budgets


def test_every_other_property_is_read_somewhere() -> None:
    """Except those of which only one value, or values that mean the same, are allowed."""
    words = Counter(word for path in BROKER.rglob("*.py") for word in re.findall(r"\w+", path.read_text()))
    read_once = {name for name, field in FIELDS.items() if words[field.name] < 2}
    assert read_once - LIVE == {
        "brokerRole",
        "authenticationProvider",
        "authenticationMetadataProvider",
        "authorizationProvider",
        "authorizationMetadataProvider",
        "authorizationStrategy",
    }


# --- over the wire


async def test_a_change_is_told_and_logged(broker: UnboundBroker, peer: Peer, logged: Any) -> None:
    before = await peer.ask(request(RequestCode.GET_BROKER_CONFIG))
    assert (await told(peer))["fileReservedTime"] == "72"
    await change(peer, fileReservedTime=48, longPollingEnable="FALSE", haListenPort=1)
    settings = await told(peer)
    assert (settings["fileReservedTime"], settings["longPollingEnable"]) == ("48", "false")
    after = await peer.ask(request(RequestCode.GET_BROKER_CONFIG))
    assert json.loads(after.ext["version"])["counter"] == json.loads(before.ext["version"])["counter"] + 1
    changes = [line for line in logged if line["event"] == "setting_changed"]
    assert [(line["property"], line["old"], line["new"]) for line in changes] == [
        ("fileReservedTime", "72", "48"),
        ("longPollingEnable", "true", "false"),
    ]
    assert all(line["until_restart_because"] == "there is no configuration file" for line in changes)
    assert [line["properties"] for line in logged if line["event"] == "properties_ignored"] == [["haListenPort"]]


async def test_a_wrong_update_is_one_sentence_and_changes_nothing(peer: Peer) -> None:
    before = await told(peer)
    for text in ("fileReservedTime=48\nbrokerNam=x\n", "fileReservedTime=48\nx", "fileReservedTime=\udc80"):
        command = request(RequestCode.UPDATE_BROKER_CONFIG, body=text.encode(errors="surrogateescape"))
        answer = await peer.ask(command)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert answer.remark
        assert "\n" not in answer.remark
    assert await told(peer) == before


async def test_an_update_without_a_body_is_nothing(peer: Peer) -> None:
    assert (await peer.ask(update(""))).code == ResponseCode.SUCCESS


async def test_a_change_is_kept_in_the_configuration_file(tmp_path: Path, logged: Any) -> None:
    file = tmp_path / "broker.conf"
    file.write_text("# ours\nfileReservedTime = 24\nbrokerName=broker-a\n")
    origin = Origin(str(file), frozenset({"longPollingEnable"}))
    async with running(tmp_path / "store", "fileReservedTime=24", origin=origin) as broker:
        await change(broker.connect(), fileReservedTime=48, deleteWhen="05", longPollingEnable="false")
    assert file.read_text() == (
        "# ours\nfileReservedTime = 48\nbrokerName=broker-a\ndeleteWhen=05\nlongPollingEnable=false\n"
    )
    lines = {line["property"]: line for line in logged if line["event"] == "setting_changed"}
    assert lines["deleteWhen"]["kept_in"] == str(file)
    assert lines["longPollingEnable"]["until_restart_because"] == "the environment or a flag sets it"
    assert load(str(file), [], {}).config.file_reserved_hours == 48


@pytest.mark.parametrize("what", ["no directory", "something in the way"])
async def test_where_the_file_cannot_be_written_the_answer_says_so(tmp_path: Path, logged: Any, what: str) -> None:
    """If the file cannot be written the answer says so, but the change takes effect."""
    file = tmp_path / ("gone/broker.conf" if what == "no directory" else "broker.conf")
    if what == "something in the way":
        file.write_text("brokerName=broker-a\n")
        (tmp_path / "broker.conf.tmp").mkdir()
    async with running(tmp_path / "store", origin=Origin(str(file))) as broker:
        peer = broker.connect()
        answer = await peer.ask(update("fileReservedTime=48\n"))
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert (answer.remark or "").startswith("the settings are changed, but only until the next start: ")
        assert (await told(peer))["fileReservedTime"] == "48"
    (line,) = [line for line in logged if line["event"] == "setting_changed"]
    assert ("cannot be read" if what == "no directory" else "Is a directory") in line["until_restart_because"]


# --- effects of changes


async def test_retention_follows(broker: UnboundBroker, peer: Peer) -> None:
    await change(
        peer,
        fileReservedTime=1,
        deleteWhen="00",
        diskMaxUsedSpaceRatio=50,
        diskSpaceCleanForciblyRatio=0.6,
        diskSpaceWarningLevelRatio=0.7,
        cleanFileForciblyEnable="false",
    )
    kept = broker.durability.retention.config
    assert (kept.reserved_hours, kept.delete_when, kept.max_used_ratio) == (1, "00", 0.5)
    assert (kept.clean_forcibly, kept.forcible_ratio, kept.refuse_ratio) == (False, 0.6, 0.7)


async def test_topics_and_groups_are_made_or_not(peer: Peer) -> None:
    await change(peer, autoCreateTopicEnable="false", autoCreateSubscriptionGroup="false")
    assert (await peer.ask(send("T"))).code == ResponseCode.TOPIC_NOT_EXIST
    await change(peer, autoCreateTopicEnable="true")
    assert (await peer.ask(send("T"))).code == ResponseCode.SUCCESS
    assert (await peer.ask(pull("T", group="fresh"))).code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    await change(peer, autoCreateSubscriptionGroup="true")
    assert (await peer.ask(pull("T", group="fresh"))).code == ResponseCode.SUCCESS


async def test_the_default_topic_comes_when_topics_may_be_made(tmp_path: Path) -> None:
    async with running(tmp_path, "autoCreateTopicEnable=false") as broker:
        peer = broker.connect()
        assert broker.topics.get("TBW102") is None
        await change(peer, autoCreateTopicEnable="true", defaultTopicQueueNums=3)
        answer = await peer.ask(request(RequestCode.GET_TOPIC_CONFIG, TopicName("TBW102")))
        assert json.loads(bytes(answer.body))["writeQueueNums"] == 3
        assert (await peer.ask(send("T"))).code == ResponseCode.SUCCESS


async def test_new_topics_get_the_queues_that_are_usual_now(broker: UnboundBroker, peer: Peer) -> None:
    await change(peer, defaultTopicQueueNums=2)
    await peer.ask(send("T", default_queues=16))
    topic = broker.topics.get("T")
    assert topic is not None
    assert topic.config.write_queue_nums == 2


async def test_the_brokers_permission_holds_for_topics_that_there_are(peer: Peer) -> None:
    await peer.ask(send("T"))
    back = request(RequestCode.CONSUMER_SEND_MSG_BACK, ConsumerSendMsgBack(0, "g", 0))
    await change(peer, brokerPermission=4)
    assert (await peer.ask(send("T"))).code == ResponseCode.NO_PERMISSION
    assert (await peer.ask(pull("T"))).code == ResponseCode.SUCCESS
    assert (await peer.ask(back)).code == ResponseCode.NO_PERMISSION
    await change(peer, brokerPermission=2)
    assert (await peer.ask(send("T"))).code == ResponseCode.SUCCESS
    assert (await peer.ask(back)).code == ResponseCode.SUCCESS
    assert (await peer.ask(pull("T"))).code == ResponseCode.NO_PERMISSION


async def test_routes_tell_what_the_broker_permits(broker: UnboundBroker, peer: Peer) -> None:
    """Routes have the permissions of the broker: without write permission producers go elsewhere, which is how a broker
    is emptied."""

    async def told() -> int:
        route = await peer.ask(request(RequestCode.GET_ROUTEINFO_BY_TOPIC, GetRouteInfo("T", True)))
        (queues,) = json.loads(bytes(route.body))["queueDatas"]
        announced = json.loads(encode_registration(broker.topics.announcement()))["topicConfigSerializeWrapper"]
        assert announced["topicConfigTable"]["T"]["perm"] == queues["perm"]
        return int(queues["perm"])

    await peer.ask(send("T"))
    assert await told() == 6
    version = broker.topics.version.counter
    changes: list[int] = []
    broker.topics.on_change(lambda: changes.append(1))
    await change(peer, brokerPermission=4)
    assert await told() == 4
    assert broker.topics.version.counter > version
    assert changes == [1]
    assert json.loads(fastjson.dumps(broker.topics.to_json()))["topicConfigTable"]["T"]["perm"] == 6
    await change(peer, brokerPermission=6)
    assert await told() == 6


async def test_the_largest_message_follows(peer: Peer) -> None:
    await peer.ask(send("T"))
    await change(peer, maxMessageSize=100)
    assert (await peer.ask(send("T", b"x" * 101))).code == ResponseCode.MESSAGE_ILLEGAL
    assert (await peer.ask(send("T", b"x" * 100))).code == ResponseCode.SUCCESS
    await change(peer, maxMessageSize=200)
    assert (await peer.ask(send("T", b"x" * 200))).code == ResponseCode.SUCCESS


async def test_a_pull_response_has_as_many_messages_as_may_be(peer: Peer) -> None:
    await peer.ask_all([send("T") for _ in range(5)])
    await change(peer, maxTransferCountOnMessageInMemory=2)
    assert (await peer.ask(pull("T"))).ext["nextBeginOffset"] == "2"
    await change(peer, maxTransferCountOnMessageInMemory=32, maxTransferBytesOnMessageInMemory=1)
    assert (await peer.ask(pull("T"))).ext["nextBeginOffset"] == "1"


async def test_a_pull_waits_as_long_as_it_may(peer: Peer, loop: SteppedLoop) -> None:
    await peer.ask(send("T"))
    await change(peer, longPollingEnable="false", shortPollingTimeMills=2000)
    held = pull("T", 1, suspend_ms=30_000)
    peer.post(held)
    for _ in range(4):
        loop.advance(1)
        await turns()
    answer = peer.answer_of(held)
    assert answer is not None
    assert answer.code == ResponseCode.PULL_NOT_FOUND


async def test_pulls_beyond_the_capacity_do_not_wait(peer: Peer) -> None:
    await peer.ask(send("T"))
    await change(peer, pullThreadPoolQueueCapacity=1)
    first, second = pull("T", 1, suspend_ms=30_000), pull("T", 1, suspend_ms=30_000)
    peer.post(first, second)
    assert peer.answer_of(first) is None
    assert peer.answer_of(second) is not None
    answer = await peer.ask(request(RequestCode.GET_BROKER_RUNTIME_INFO))
    assert json.loads(bytes(answer.body))["table"]["pullThreadPoolQueueCapacity"] == "1"


async def test_members_are_told_of_each_other_or_not(broker: UnboundBroker, peer: Peer) -> None:
    for is_told in (True, False, True):
        await change(peer, notifyConsumerIdsChangedEnable=str(is_told).lower())
        member = broker.connect()
        await beat(member, f"told {is_told}", "g")
        assert notices(member) == is_told
        member.transport.abort()
        await turns()


async def test_the_flusher_follows(broker: UnboundBroker, peer: Peer, loop: SteppedLoop) -> None:
    """The flusher follows a shorter interval from now on, not after the running longer one."""
    await change(peer, flushIntervalCommitLog=60_000)
    await peer.ask(send("T"))
    loop.advance(30)
    await turns()
    assert broker.store.log.flushed < broker.store.log.end
    broker.clock.advance(30_000)
    await change(peer, flushIntervalCommitLog=10, sendThreadPoolQueueCapacity=7)
    while broker.store.log.flushed < broker.store.log.end:
        await turns()
    assert broker.settings.config.send_queue_capacity == 7


async def test_tables_are_written_as_often_as_wanted(
    broker: UnboundBroker, peer: Peer, loop: SteppedLoop, tmp_path: Path
) -> None:
    await change(peer, flushConsumerOffsetInterval=600_000)
    await peer.ask(send("T"))
    await peer.ask(pull("T", sys_flag=5, commit_offset=1))
    file = tmp_path / "config" / "consumerOffset.json"
    loop.advance(10)
    await turns()
    assert not file.exists() or "T@consumers" not in file.read_text()
    await change(peer, flushConsumerOffsetInterval=1000)
    loop.advance(1.1)
    while not file.exists() or "T@consumers" not in file.read_text():
        await turns()


async def test_the_file_has_a_table_of_levels_when_a_crash_does_not_undo_it(tmp_path: Path) -> None:
    """The file gets a new table of levels only when a crash cannot undo it: before, all waiting messages would go by
    the new table after a kill, and one promised in a minute might be delivered at once."""
    file = tmp_path / "broker.conf"
    file.write_text("messageDelayLevel=60s\n")
    async with running(tmp_path / "store", origin=Origin(str(file))) as broker:
        peer = broker.connect()
        broker.lanes.hold(Lane.FILES)
        command = update("messageDelayLevel=1s\n")
        peer.post(command)
        await turns(20)
        assert (peer.answer_of(command), file.read_text()) == (None, "messageDelayLevel=60s\n")
        broker.lanes.let_go(Lane.FILES)
        while peer.answer_of(command) is None:
            await turns(1)
        assert file.read_text() == "messageDelayLevel=1s\n"
