"""Access control of 4.9 with unmodified clients: the hooks of Java 4.9.7 and 5.3.3, Go and C++, and mqadmin.

The target has the file of `tests.support.access`. With `--target apache-4.9.7` the same tests show that RocketMQ does
the same with the same file; 5.3.3 has no plain_acl.yml any more. One test puts the same requests to both in one run.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from duemq import Admin, Consumer, Producer
from duemq.errors import AccessDeniedError
from duemq.protocol.codes import ResponseCode
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import BINARY, JSON
from duemq.protocol.requests import headers
from tests.interop.environment import ClientPool, MqAdmins, SharedBroker, make_broker
from tests.interop.support import Wire, need, not_on, numbered
from tests.peers.brokers.broker import CLUSTER, Broker
from tests.peers.capabilities import Can
from tests.peers.clients import Client, JavaClient, unique
from tests.peers.errors import CallError
from tests.support.access import ACCOUNTS, ADMIN, USER, signed, write_accounts
from tests.support.canary import CANARY
from tests.support.wire import pull, request, send

WRONG = (USER[0], "wrong-secret-key")
TOPICS = ("topicA", "topicB", "topicC")
NEW = ("new-account", f"{CANARY}-of-new")


def home_of(target: str, directory: Path) -> Path:
    """The RocketMQ home of a broker of `make_broker`."""
    return directory / ("home" if target == "duemq" else "broker")


def secured_broker(target: str, directory: Path) -> Broker:
    """A broker with access control, not started."""
    home = home_of(target, directory)
    write_accounts(home)
    properties = {"aclEnable": "true", "rocketmqHome": str(home), "messageDelayLevel": "1s 1s 1s 1s"}
    return make_broker(target, directory, properties)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def secured(
    shared_broker: SharedBroker, clients: ClientPool, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Broker]:
    """The target with access control, and topics that an administrator made with Java's admin API."""
    target = shared_broker.target
    not_on(target, "apache-5.3.3", "it has no plain_acl.yml any more; test_auth.py is for it")
    await shared_broker.make_room()
    broker = secured_broker(target, tmp_path_factory.mktemp("secured"))
    await broker.start()
    admin = (await clients.java("4.9.7")).admin(broker.nameserver, ADMIN)
    for topic in TOPICS:
        await admin.create_topic(broker.address, topic)
    yield broker
    await broker.kill()


# --- clients


async def test_an_account_sends_and_receives(client: Client, secured: Broker) -> None:
    bodies = [message.body for message in numbered(unique("body"), 8)]
    async with (
        await client.consumer(secured.nameserver, unique("group"), "topicB", account=USER) as consumer,
        await client.producer(secured.nameserver, account=USER) as producer,
    ):
        for mode in ("sync", "async", "oneway"):
            await producer.send("topicB", numbered(unique(mode), 3), mode)
        results = await producer.send("topicB", numbered(bodies[0].decode().rpartition("-")[0], 8))
        assert [result.status for result in results] == ["SEND_OK"] * 8
        await consumer.receive_bodies(bodies)


async def test_an_account_sends_a_batch(client: Client, secured: Broker) -> None:
    need(client, Can.BATCH)
    async with await client.producer(secured.nameserver, account=USER) as producer:
        (result,) = await producer.send("topicB", numbered(unique("batch"), 3), "batch")
        assert result.status == "SEND_OK"


async def test_a_message_that_failed_comes_again(client: Client, secured: Broker) -> None:
    """By way of the group's retry topic, for which the group's permission counts."""
    (message,) = numbered(unique("again"), 1)
    async with (
        await client.consumer(secured.nameserver, unique("group"), "topicB", account=USER, fail_first=1) as consumer,
        await client.producer(secured.nameserver, account=USER) as producer,
    ):
        await producer.send("topicB", [message])
        await consumer.until(lambda got: [each.body for each in got].count(message.body) == 2)


async def test_an_ordered_consumer_locks_its_queues(java: JavaClient, secured: Broker) -> None:
    (message,) = numbered(unique("ordered"), 1)
    async with (
        await java.consumer(secured.nameserver, unique("group"), "topicB", account=USER, orderly=True) as consumer,
        await java.producer(secured.nameserver, account=USER) as producer,
    ):
        await producer.send("topicB", [message], queue_id=1)
        await consumer.receive_bodies([message.body])


async def test_clients_live_with_a_limit_on_their_account(client: Client, java: JavaClient, secured: Broker) -> None:
    """They are told that the broker is busy, as by RocketMQ's own: consumers go on, and sends fail with that code after
    as many tries as the library makes."""
    if secured.kind != "duemq":
        pytest.skip("RocketMQ has no such limit")
    admin = java.admin(secured.nameserver, ADMIN)
    messages = numbered(unique("limited"), 100)
    async with (
        await client.consumer(secured.nameserver, unique("group"), "topicB", account=USER) as consumer,
        await client.producer(secured.nameserver, account=USER) as producer,
    ):
        await producer.send("topicB", messages[:1])
        await admin.update_broker_config(secured.address, maxRequestsPerSecondPerAccount=30)
        try:
            results = await producer.send("topicB", messages[1:], check=False)
            stored = [each.body for each, result in zip(messages[1:], results, strict=True) if result.stored]
            assert 0 < len(stored) < len(results)
            codes = {result.error.code for result in results if result.error is not None}
            assert codes <= {ResponseCode.SYSTEM_BUSY, None}, "None of those libraries that do not tell it"
            await consumer.until(lambda got: {each.body for each in got} >= set(stored))
        finally:
            await admin.update_broker_config(secured.address, maxRequestsPerSecondPerAccount=0)


@pytest.mark.parametrize("version", ["4.9.7", "5.3.3"])
async def test_javas_admin_api(clients: ClientPool, secured: Broker, version: str) -> None:
    java = await clients.java(version)
    topic = unique("made")
    await java.admin(secured.nameserver, ADMIN).create_topic(secured.address, topic)
    assert topic in await java.admin(secured.nameserver, USER).topics()
    with pytest.raises(CallError, match="Need admin permission for request code=215, but accessKey=application is not"):
        await java.admin(secured.nameserver, USER).delete_topic(secured.address, topic)


@pytest.mark.parametrize(
    ("account", "topic", "why"),
    [
        (USER, "topicA", "No default permission for topic:topicA"),
        (USER, "topicC", "No default permission for topic:topicC"),
        (WRONG, "topicB", f"Check signature failed for accessKey={USER[0]}"),
        (("whoever", "secret-key"), "topicB", "No acl config for whoever"),
        (None, "topicB", "No accessKey is configured"),
    ],
    ids=["denied", "only SUB", "wrong secret", "unknown", "no keys"],
)
async def test_others_are_told_why_not(
    client: Client, secured: Broker, account: tuple[str, str] | None, topic: str, why: str
) -> None:
    if client.name == "cpp" and account is not USER:
        pytest.skip("the start of the C++ client waits for heartbeats that are let in")
    async with await client.producer(secured.nameserver, account=account, retries=0) as producer:
        # The error of a synchronous send in Java has the number of tries in place of the broker's words.
        (result,) = await producer.send(topic, numbered("never", 1), "async", check=False)
    assert result.error is not None
    if client.name.startswith("java"):
        assert result.error.code == 1
    if client.name != "cpp":  # it keeps the broker's words to itself
        assert why in result.error.message


async def test_a_consumer_of_a_denied_topic_gets_nothing(java: JavaClient, secured: Broker) -> None:
    """Its heartbeat is refused as a whole, so the broker does not know it."""
    group, marker = unique("group"), numbered(unique("marker"), 1)
    async with (
        await java.consumer(secured.nameserver, group, "topicA", account=USER) as denied,
        await java.consumer(secured.nameserver, unique("group"), "topicA", account=ADMIN) as allowed,
        await java.producer(secured.nameserver, account=ADMIN) as producer,
    ):
        await producer.send("topicA", marker)
        await allowed.receive_bodies([marker[0].body])
        async with Wire(secured) as wire:
            answer = await wire.ask(signed(request(203, headers.ConsumerGroupName(group))))
        assert answer.code == 206
        assert denied.messages == []


# --- mqadmin


@pytest.mark.parametrize("version", ["4.9.7", "5.3.3"])
async def test_mqadmin_with_and_without_keys(version: str, secured: Broker, mqadmins: MqAdmins) -> None:
    texts = [
        await mqadmins[version].run(
            command[0], "-b", secured.address, *command[1:], nameserver=secured.nameserver, account=account
        )
        for command in (("updateTopic", "-t", unique("made")), ("brokerStatus",))
        for account in (ADMIN, USER, None)
    ]
    assert f"create topic to {secured.address} success" in texts[0]
    assert "Need admin permission for request code=17, but accessKey=application is not" in texts[1]
    assert "No accessKey is configured" in texts[2]
    if secured.kind == "duemq":  # Apache's 4.9.7 without a message in its store fails here, whoever asks
        assert "bootTimestamp" in texts[3]
        assert "bootTimestamp" in texts[4]
    assert "No accessKey is configured" in texts[5]


async def test_mqadmin_changes_the_accounts(secured: Broker, mqadmins: MqAdmins) -> None:
    run = partial(mqadmins["4.9.7"].run, nameserver=secured.nameserver, account=ADMIN)
    file = home_of(secured.kind, secured.store.parent) / "conf" / "plain_acl.yml"
    of_broker = ("-b", secured.address)
    before = await run("clusterAclConfigVersion", *of_broker)
    assert "get broker's plain access config version success." in before
    made = await run(
        "updateAclConfig", *of_broker, "-a", NEW[0], "-s", NEW[1], "-t", "topicA=PUB", "-i", "DENY", "-m", "false"
    )
    assert f"create or update plain access config to {secured.address} success." in made
    async with Wire(secured) as wire:
        assert (await wire.ask(signed(send("topicA"), NEW))).code == 0
        assert (await wire.ask(signed(send("topicB"), NEW))).code == 1
        shown = await run("getAclConfig", *of_broker)
        version = await run("clusterAclConfigVersion", "-c", CLUSTER)
        assert f"{NEW[0]}" in shown
        assert "topicA=PUB" in shown
        assert str(file) in version
        listed = await run("updateGlobalWhiteAddr", *of_broker, "-g", "127.0.0.2,127.0.1.*", "-p", str(file))
        assert f"update global white remote addresses to {secured.address} success." in listed
        wrong = await run("updateAclConfig", *of_broker, "-a", "short", "-s", NEW[1])
        assert "length should longer than 6" in wrong
        gone = await run("deleteAclConfig", *of_broker, "-a", NEW[0])
        assert "delete plain access config account from" in gone
        again = await run("deleteAclConfig", *of_broker, "-a", NEW[0])
        assert f"The accesskey[{NEW[0]}] corresponding to accessConfig has been deleted failed." in again
        assert (await wire.ask(signed(send("topicA"), NEW))).remark is not None
    text = file.read_text()
    assert "- 127.0.0.2\n- 127.0.1.*\n" in text
    assert "dataVersion:\n- counter: 3\n  timestamp: " in text
    assert NEW[0] not in text


# --- duemq's own client


async def test_duemqs_client(secured: Broker) -> None:
    body = unique("body").encode()
    keys = {"access_key": USER[0], "secret_key": USER[1]}
    consumer = Consumer(unique("group"), nameserver=secured.nameserver, from_="first", **keys)  # type: ignore[arg-type]
    consumer.subscribe("topicB")
    async with Producer(secured.nameserver, **keys) as producer, consumer:  # type: ignore[arg-type]
        await producer.send("topicB", body)
        async with asyncio.timeout(60):
            while (message := await consumer.receive()).body != body:
                await message.ack()
        await message.ack()
        with pytest.raises(AccessDeniedError, match="No default permission for topic:topicA"):
            await producer.send("topicA", body)
    async with Producer(secured.nameserver, access_key=USER[0], secret_key="wrong-secret-key") as producer:
        with pytest.raises(AccessDeniedError, match="Check signature failed"):
            await producer.send("topicB", body)
    if secured.kind == "duemq":
        async with Admin(secured.nameserver, access_key=ADMIN[0], secret_key=ADMIN[1]) as admin:
            assert await admin.count("topicA") == 0


# --- the same requests to both


def _requests() -> list[tuple[str, Command, int]]:
    """Requests whose answer depends on access control alone, each with a codec of its header."""
    heartbeat = json.dumps(
        {
            "clientID": "c",
            "producerDataSet": [],
            "consumerDataSet": [
                {
                    "groupName": "groupA",
                    "consumeType": "CONSUME_PASSIVELY",
                    "messageModel": "CLUSTERING",
                    "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
                    "subscriptionDataSet": [],
                }
            ],
        }
    ).encode()
    offset = headers.UpdateConsumerOffset
    requests: list[tuple[str, Command, tuple[str, str] | None]] = [
        ("no key", send("topicB"), None),
        ("unknown key", send("topicB"), ("whoever", "secret-key")),
        ("wrong secret", send("topicB"), WRONG),
        ("PUB|SUB", send("topicB"), USER),
        ("DENY", send("topicA"), USER),
        ("SUB only", send("topicC"), USER),
        ("default", send("topicZ"), USER),
        ("version 1", send("topicA", v1=True), USER),
        ("trace", send("RMQ_SYS_TRACE_TOPIC"), USER),
        ("admin", send("topicA"), ADMIN),
        ("pull", pull("topicB", group="groupC"), USER),
        ("pull by denied group", pull("topicB", group="groupA"), USER),
        ("pull of denied topic", pull("topicA", group="groupC"), USER),
        ("pull of retries", pull("%RETRY%groupA", group="groupC"), USER),
        ("heartbeat of denied group", request(34, None, heartbeat), USER),
        ("goodbye of denied group", request(35, headers.UnregisterClient("c", None, "groupA")), USER),
        ("goodbye of a producer", request(35, headers.UnregisterClient("c", "groupA")), USER),
        ("members of denied group", request(38, headers.ConsumerGroupName("groupA")), USER),
        ("offset of denied group", request(15, offset("groupA", "topicB", 0, 0)), USER),
        ("offset of denied topic", request(15, offset("groupC", "topicA", 0, 0)), USER),
        ("settings", request(26), USER),
        ("topics", request(21), USER),
        ("delete topic", request(215, headers.TopicName("topicA")), USER),
        ("delete group", request(207, headers.DeleteSubscriptionGroup("groupC", False)), USER),
        ("unknown code", request(9999), USER),
        ("unknown code without key", request(9999), None),
        ("bad account", request(50, headers.CreateAccessConfig(NEW[0], NEW[1], topic_perms="T=NOPE")), ADMIN),
        ("bad account, format", request(50, headers.CreateAccessConfig(NEW[0], NEW[1], topic_perms="T")), ADMIN),
        ("bad white address", request(50, headers.CreateAccessConfig(NEW[0], NEW[1], "1.2.3")), ADMIN),
        ("delete nobody", request(51, headers.DeleteAccessConfig("nobody-here")), ADMIN),
        ("white list elsewhere", request(53, headers.UpdateGlobalWhiteAddrs("1.1.1.1", "/etc/hosts")), ADMIN),
        ("accounts", request(54), ADMIN),
    ]
    return [
        (name, signed(_without_empty(command), account), kind)
        for name, command, account in requests
        # Apache's broker takes a wrong account when it is sent a second time.
        for kind in ((JSON, BINARY) if command.code != 50 else (JSON,))
    ]


def _without_empty(command: Command) -> Command:
    copy = request(command.code, None, bytes(command.body))
    copy.ext = {name: value for name, value in command.ext.items() if value}
    return copy


def _comparable(broker: Broker, answer: Command) -> tuple[int, str | None, object]:
    """What has to be the same: the code, the remark without the line of Java, and what 54 tells."""
    remark = (answer.remark or "").partition(", org.apache.rocketmq.acl")[0]
    if answer.code == 0:
        remark = ""  # of pulls and the like, which has nothing to do with access control
    body = json.loads(bytes(answer.body)) if answer.body and b"plainAccessConfigs" in bytes(answer.body) else None
    return answer.code, remark, body


async def test_the_same_file_has_the_same_results_on_both(
    secured: Broker, shared_broker: SharedBroker, tmp_path: Path
) -> None:
    if secured.kind != "duemq":
        pytest.skip("the other side is started by this test")
    home = home_of("duemq", secured.store.parent)
    write_accounts(home)
    apache = secured_broker("apache-4.9.7", tmp_path)
    await apache.start()
    try:
        different = {}
        async with Wire(secured) as ours, Wire(apache) as theirs:
            for topic in TOPICS:
                header = headers.CreateTopic(topic, "TBW102", 4, 4, 6, "SINGLE_TAG", 0, False)
                assert (await theirs.ask(signed(request(17, header)))).code == 0
            for name, command, kind in _requests():
                answers = [
                    _comparable(broker, await wire.ask(command, kind))
                    for broker, wire in ((secured, ours), (apache, theirs))
                ]
                if answers[0] != answers[1]:
                    different[name, kind] = answers
        assert different == {}
        for source in ("127.0.0.2", "127.0.1.9", "127.0.2.1", "127.0.3.5", "127.0.3.10"):
            async with Wire(secured, source) as ours, Wire(apache, source) as theirs:
                for account in (None, WRONG, (ADMIN[0], "wrong-secret-key")):
                    command = signed(_without_empty(send("topicA")), account)
                    answers = [_comparable(secured, await wire.ask(command)) for wire in (ours, theirs)]
                    assert answers[0] == answers[1], (source, account)
    finally:
        await apache.kill()


async def test_no_log_has_a_secret(secured: Broker) -> None:
    if secured.kind != "duemq":
        pytest.skip("RocketMQ logs its accounts with their secrets")
    files = [path for path in secured.store.parent.iterdir() if path.is_file()]
    assert files
    assert not [path.name for path in files if CANARY in path.read_text(errors="replace")]
    assert CANARY in ACCOUNTS
