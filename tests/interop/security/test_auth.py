"""ACL 2.0 of 5.3 with unmodified clients: Java's and duemq's, and mqadmin 5.3.3; and the store of users and policies,
opened by duemq and by Apache's 5.3.3 in turn.

With `--target apache-5.3.3` the same tests show that Apache's broker does the same. One test puts the same requests to
both in one run.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from duemq import Consumer, Producer
from duemq.errors import AccessDeniedError
from duemq.protocol.frames import fastjson
from duemq.protocol.frames.command import Command
from duemq.protocol.requests import headers
from tests.interop.environment import ClientPool, MqAdmins, SharedBroker, make_broker
from tests.interop.security.test_acl import home_of
from tests.interop.support import Wire, eventually, not_on, numbered
from tests.peers.brokers.broker import CLUSTER, Broker
from tests.peers.clients import unique
from tests.support.access import signed, write_accounts
from tests.support.auth import SUPER, USER, ask, create_user, entry, update_acl, update_user
from tests.support.canary import CANARY
from tests.support.wire import pull, request, send

INNER = ("inner", f"{CANARY}-of-inner")
WRONG = (USER[0], "wrong")
_AUTH = "org.apache.rocketmq.auth"
PROPERTIES = {
    "authenticationEnabled": "true",
    "authenticationProvider": f"{_AUTH}.authentication.provider.DefaultAuthenticationProvider",
    "authenticationMetadataProvider": f"{_AUTH}.authentication.provider.LocalAuthenticationMetadataProvider",
    "authorizationEnabled": "true",
    "authorizationProvider": f"{_AUTH}.authorization.provider.DefaultAuthorizationProvider",
    "authorizationMetadataProvider": f"{_AUTH}.authorization.provider.LocalAuthorizationMetadataProvider",
    "initAuthenticationUser": json.dumps({"username": SUPER[0], "password": SUPER[1]}),
    "innerClientAuthenticationCredentials": json.dumps({"accessKey": INNER[0], "secretKey": INNER[1]}),
    "messageDelayLevel": "1s 1s 1s 1s",
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def secured(shared_broker: SharedBroker, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Broker]:
    """The target with ACL 2.0, two topics, and a user that may use one of them."""
    target = shared_broker.target
    not_on(target, "apache-4.9.7", "it has no users and policies")
    await shared_broker.make_room()
    broker = make_broker(target, tmp_path_factory.mktemp("with-users"), PROPERTIES)
    await broker.start()
    entries = [entry("Topic:topicB", "Pub", "Sub", "Get"), entry("Group:*", "Sub", "Get"), entry("Topic:topicC", "Sub")]
    async with Wire(broker) as wire:
        for command in (
            *(
                request(17, headers.CreateTopic(topic, "TBW102", 4, 4, 6, "SINGLE_TAG", 0))
                for topic in ("topicA", "topicB")
            ),
            create_user(USER),
            update_acl(USER[0], *entries),
        ):
            answer = await wire.ask(signed(command, SUPER))
            assert answer.code == 0, answer.remark
    yield broker
    await broker.kill()


# --- clients


async def test_a_user_sends_and_receives(clients: ClientPool, secured: Broker) -> None:
    java = await clients.java("5.3.3")
    messages = numbered(unique("body"), 8)
    async with (
        await java.consumer(secured.nameserver, unique("group"), "topicB", account=USER, fail_first=1) as consumer,
        await java.producer(secured.nameserver, account=USER) as producer,
    ):
        for mode in ("sync", "async", "oneway"):
            await producer.send("topicB", numbered(unique(mode), 3), mode)
        results = await producer.send("topicB", messages)
        assert [result.status for result in results] == ["SEND_OK"] * 8
        await consumer.receive_bodies([message.body for message in messages])


@pytest.mark.parametrize(
    ("account", "topic", "why"),
    [
        (
            USER,
            "topicA",
            f"User:{USER[0]} has no permission to access Topic:topicA from 127.0.0.1, no matched policies",
        ),
        (WRONG, "topicB", "check signature failed"),
        (("whoever", "secret-key"), "topicB", "User:whoever is not found"),
        (None, "topicB", "username cannot be null"),
    ],
    ids=["no policy", "wrong secret", "unknown", "no keys"],
)
async def test_others_are_told_why_not(
    clients: ClientPool, secured: Broker, account: tuple[str, str] | None, topic: str, why: str
) -> None:
    java = await clients.java("5.3.3")
    async with await java.producer(secured.nameserver, account=account, retries=0) as producer:
        (result,) = await producer.send(topic, numbered("never", 1), "async", check=False)
    assert result.error is not None
    assert result.error.code == 16
    assert why in result.error.message


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
        with pytest.raises(AccessDeniedError, match="no permission to access Topic:topicA"):
            await producer.send("topicA", body)
    async with Producer(secured.nameserver, access_key=USER[0], secret_key="wrong-secret-key") as producer:
        with pytest.raises(AccessDeniedError, match="check signature failed"):
            await producer.send("topicB", body)


# --- mqadmin


async def test_mqadmin(secured: Broker, mqadmins: MqAdmins) -> None:
    """All twelve commands. The copies are of the broker to itself, where they change what there is already."""
    here, itself = ("-b", secured.address), ("-f", secured.address, "-t", secured.address)
    of_user, key = ("-u", "tool"), ("-s", "User:tool")
    secret = f"{CANARY}-of-tool"
    commands = (
        (("createUser", *here, *of_user, "-p", secret, "-t", "Normal"), f"create user to {secured.address} success."),
        (("createUser", *here, *of_user, "-p", secret), "CODE: 16  DESC: The user is existed"),
        (("getUser", *here, *of_user), f"tool {secret} Normal enable"),
        (("updateUser", "-c", CLUSTER, *of_user, "-s", "disable"), f"update user to {secured.address} success."),
        (("listUser", *here, "-f", "too"), f"tool {secret} Normal disable"),
        (("copyUser", *itself, *of_user), "copy user of tool"),
        (
            (
                "createAcl",
                *here,
                *key,
                "-r",
                "Topic:topicA,Group:g*",
                "-a",
                "Pub,Sub",
                "-d",
                "Allow",
                "-i",
                "10.0.0.0/8",
            ),
            f"create acl to {secured.address} success.",
        ),
        (("getAcl", *here, *key), "User:tool Custom Topic:topicA [Pub, Sub] [10.0.0.0/8] Allow"),
        (("updateAcl", *here, *key, "-r", "Topic:topicA", "-a", "Pub", "-d", "Deny"), "update acl to"),
        (("listAcl", *here, "-s", "tool", "-r", "Topic"), "User:tool Custom Topic:topicA [Pub] null Deny"),
        (("copyAcl", *itself, *key), "copy acl of User:tool"),
        (("deleteAcl", *here, *key, "-r", "Topic:topicA"), f"delete acl to {secured.address} success."),
        (("getAcl", "-c", CLUSTER, *key), "User:tool Custom Group:g* [Pub, Sub] [10.0.0.0/8] Allow"),
        (("deleteUser", *here, *of_user), f"delete user to {secured.address} success."),
        (("getAcl", *here, *key), "CODE: 16  DESC: The subject is not exist."),
    )
    run_each = partial(mqadmins["5.3.3"].each, nameserver=secured.nameserver)
    outputs = await run_each([command for command, _ in commands], account=SUPER)
    refused = await run_each([commands[0][0]], account=USER)
    for (command, says), output in zip(commands, outputs, strict=True):
        assert says in " ".join(output.split()) or says in output, (command, output)
    assert f"User:{USER[0]} has no permission to access Cluster:{CLUSTER} from 127.0.0.1" in refused[0]


# --- both brokers


ACCOUNTS = f"""\
accounts:
- accessKey: administrator
  secretKey: {CANARY}-admin
  admin: true
- accessKey: application
  secretKey: {CANARY}-application
  admin: false
  defaultTopicPerm: DENY
  defaultGroupPerm: SUB
  topicPerms:
  - topicA=DENY
  - topicB=PUB|SUB
  - topicC=SUB
  groupPerms:
  - groupA=DENY
  - groupB=SUB|PUB
- accessKey: nothing-listed
  secretKey: {CANARY}-nothing
- accessKey: publisher
  secretKey: {CANARY}-publisher
  defaultTopicPerm: PUB|SUB
"""
MIGRATED = ("application", f"{CANARY}-application")


def _requests() -> list[tuple[Command, tuple[str, str] | None]]:
    """Requests whose answers depend on access control alone, in an order that matters."""
    subject = {"subject": f"User:{USER[0]}"}
    offset, commit = headers.QueryConsumerOffset, headers.UpdateConsumerOffset
    heartbeat = {
        "clientID": "c",
        "producerDataSet": [],
        "consumerDataSet": [{"groupName": "groupA", "subscriptionDataSet": [], "consumeType": "CONSUME_PASSIVELY"}],
    }
    return [
        (send("topicB"), None),
        (send("topicB"), ("whoever", "x")),
        (send("topicB"), WRONG),
        (ask(9999), None),
        (ask(9999), MIGRATED),
        # what became of plain_acl.yml
        (send("topicA"), MIGRATED),
        (send("topicB"), MIGRATED),
        (send("topicC"), MIGRATED),
        (send("topicZ"), MIGRATED),
        (send("topicB", v1=True), MIGRATED),
        (send("topicA", v1=True), MIGRATED),
        (pull("topicB", group="groupC"), MIGRATED),
        (pull("topicB", group="groupA"), MIGRATED),
        (pull("topicA", group="groupC"), MIGRATED),
        (pull("%RETRY%groupA", group="groupA"), MIGRATED),
        (ask(34, {"x": "y"}, heartbeat), MIGRATED),
        (request(35, headers.UnregisterClient("c", None, "groupA")), MIGRATED),
        (request(35, headers.UnregisterClient("c", "groupA")), MIGRATED),
        (request(38, headers.ConsumerGroupName("groupA")), MIGRATED),
        (request(14, offset("groupA", "topicB", 0)), MIGRATED),
        (request(15, commit("groupA", "topicB", 0, 0)), MIGRATED),
        (request(15, commit("groupC", "topicA", 0, 0)), MIGRATED),
        (request(17, headers.CreateTopic("new", "TBW102", 4, 4, 6, "SINGLE_TAG", 0)), MIGRATED),
        (request(215, headers.TopicName("topicB")), MIGRATED),
        (request(207, headers.DeleteSubscriptionGroup("groupC")), MIGRATED),
        (request(202, headers.TopicName("topicB")), MIGRATED),
        (request(203, headers.ConsumerGroupName("groupC")), MIGRATED),
        (request(222, headers.ResetOffset("topicB", "groupC", 0)), MIGRATED),
        # users and policies
        (create_user(USER), MIGRATED),
        (create_user(USER), SUPER),
        (create_user(USER), SUPER),
        (ask(3001, {}, {"password": "x"}), SUPER),
        (ask(3001, {"username": "new"}, {}), SUPER),
        (update_user("nobody", password="x"), SUPER),
        (update_acl("nobody", entry("Topic:T", "Pub")), SUPER),
        (update_acl(USER[0], entry("Nope:T", "Pub")), SUPER),
        (update_acl(USER[0], entry("Topic:T", "Any")), SUPER),
        (update_acl(USER[0], entry("Topic:T")), SUPER),
        (update_acl(USER[0], entry("Topic:T", "Pub", decision="x")), SUPER),
        (update_acl(USER[0], entry("Topic:T", "Pub", source_ips=["1.2.3"])), SUPER),
        (update_acl(USER[0], entry("Topic:T", "Pub", source_ips=["10.0.0.0/8", "::1"]), code=3006), SUPER),
        (send("T"), USER),
        (update_acl(USER[0], entry("Topic:*", "all", decision="deny"), policy_type="Default"), SUPER),
        (send("U"), USER),
        (update_acl(USER[0], entry("Topic:T", "Pub"), entry("Group:g*", "Sub"), entry("*", "List")), SUPER),
        (send("T"), USER),
        (pull("T", group="g1"), USER),
        (update_acl(USER[0], entry("Topic:T", "Pub", "Sub", source_ips=["127.0.0.0/8"])), SUPER),
        (pull("T", group="g1"), USER),
        (pull("T", group="h1"), USER),
        (ask(3008, {**subject, "resource": "*"}), SUPER),
        (ask(3008, {"subject": "User:nobody"}), SUPER),
        (ask(3009, {"subject": "User:nobody"}), SUPER),
        (update_acl(USER[0], entry(f"Cluster:{CLUSTER}", "Update")), SUPER),
        (create_user(("other", "x"), userType="Super"), USER),
        (update_user(SUPER[0], password="x"), USER),
        (ask(3003, {"username": SUPER[0]}), USER),
        (create_user(("other", f"{CANARY}-of-other")), USER),
        (update_user("other", userStatus="disable"), SUPER),
        (send("T"), ("other", f"{CANARY}-of-other")),
        (ask(3003, {"username": "publisher"}), SUPER),
        (ask(3003, {"username": "publisher"}), SUPER),
        *((ask(3004, {"username": name}), SUPER) for name in ("administrator", "publisher", USER[0])),
        *((ask(3009, {"subject": f"User:{name}"}), SUPER) for name in ("administrator", USER[0], MIGRATED[0])),
        (ask(3010, {"resourceFilter": "g"}), SUPER),
        (ask(3010, {"subjectFilter": "app", "resourceFilter": "topicB"}), SUPER),
        *LISTS,
    ]


LISTS = [(ask(code), SUPER) for code in (3005, 3010)]
"""All users and policies."""


async def answers(
    broker: Broker, requests: Sequence[tuple[Command, tuple[str, str] | None]]
) -> list[tuple[object, ...]]:
    """The code, the remark of a refusal, and the body about users and policies of each answer."""
    found: list[tuple[object, ...]] = []
    async with Wire(broker) as wire:
        for command, account in requests:
            command.ext = {name: value for name, value in command.ext.items() if value and name != "Signature"}
            answer = await wire.ask(signed(command, account))
            refused = answer.code in (3, 16, 29)
            code = answer.code if refused or (answer.code < 3000 and command.code > 3000) else "let in"
            body = bytes(answer.body) if 3004 <= command.code <= 3010 else b""
            found.append((command.code, account, code, answer.remark if refused else None, body))
    return found


async def test_both_brokers_answer_the_same_and_open_each_others_store(
    shared_broker: SharedBroker, tmp_path: Path
) -> None:
    """Both migrate the same plain_acl.yml and get the same requests; then each opens what the other one wrote, also
    after kill -9."""
    if shared_broker.target != "duemq":
        pytest.skip("both brokers are started by this test")
    brokers = []
    for kind in ("apache-5.3.3", "duemq"):
        directory = tmp_path / kind
        home = home_of(kind, directory)
        write_accounts(home, ACCOUNTS)
        properties = PROPERTIES | {"migrateAuthFromV1Enabled": "true", "rocketmqHome": str(home)}
        brokers.append(make_broker(kind, directory, properties))
    apache, ours = brokers
    await asyncio.gather(apache.start(), ours.start())
    try:
        for broker in brokers:
            async with Wire(broker) as wire:
                for topic in ("topicA", "topicB", "topicC", "T"):
                    header = headers.CreateTopic(topic, "TBW102", 4, 4, 6, "SINGLE_TAG", 0)
                    assert (await wire.ask(signed(request(17, header), SUPER))).code == 0
        migrated = [await answers(broker, LISTS) for broker in brokers]
        assert migrated[0] == migrated[1]
        assert '"resource":"Topic:topicB"' in str(migrated[1][1][-1])
        theirs, own = [await answers(broker, _requests()) for broker in brokers]
        assert [pair for pair in zip(theirs, own, strict=True) if pair[0] != pair[1]] == []
        await asyncio.gather(apache.kill(), ours.kill())

        # each with the other one's store
        first = make_broker("duemq", tmp_path / "1", PROPERTIES, store=apache.store)
        second = make_broker(
            "apache-5.3.3",
            tmp_path / "2",
            PROPERTIES | {"brokerName": "broker-b"},
            store=ours.store,
            nameserver=first.nameserver,
        )
        swapped = [first, second]
        brokers += swapped
        for broker in swapped:
            await broker.start()
        # RocketMQ's broker signs its registration with innerClientAuthenticationCredentials.
        async with Wire(first) as wire:

            async def registered() -> bool:
                answer = await wire.ask(signed(ask(106), SUPER))
                return "broker-b" in fastjson.loads(answer.body)["brokerAddrTable"]

            await eventually(registered)
        expected = own[-2:]
        more = [
            (create_user(("more", f"{CANARY}-of-more")), SUPER),
            (update_acl("more", entry("Topic:more", "Pub")), SUPER),
            (send("more"), ("more", f"{CANARY}-of-more")),
            (ask(3003, {"username": MIGRATED[0]}), SUPER),
        ]
        for broker in swapped:
            assert await answers(broker, LISTS) == expected
            assert {answer[2] for answer in await answers(broker, more)} == {0, "let in"}
        changed = [await answers(broker, LISTS) for broker in swapped]
        assert changed[0] == changed[1] != expected
        await asyncio.gather(swapped[0].stop(), swapped[1].kill())
        back = make_broker("duemq", tmp_path / "3", PROPERTIES, store=ours.store)
        brokers.append(back)
        await back.start()
        assert await answers(back, LISTS) == changed[0]
    finally:
        for broker in brokers:
            if broker.running:
                await broker.kill()


async def test_no_log_has_a_secret(secured: Broker) -> None:
    if secured.kind != "duemq":
        pytest.skip("RocketMQ's logs are its own matter")
    files = [path for path in secured.store.parent.iterdir() if path.is_file() and path.name != "broker.conf"]
    assert files
    assert not [path.name for path in files if CANARY in path.read_text(errors="replace")]
