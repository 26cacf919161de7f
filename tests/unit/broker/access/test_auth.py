"""A whole broker with ACL 2.0: who is let in, what policies allow, the codes 3001 to 3010, what is durable, and that no
password is shown to anybody whom it does not belong to."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import rocksdict
import structlog

from duemq.broker.access.auth.model import User, UserType, empty_acl
from duemq.broker.access.auth.store import RocksStore
from duemq.broker.dump import __main__ as dump
from duemq.broker.errors import AuthStoreError
from duemq.broker.workers import Background
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import CODECS
from duemq.protocol.requests import headers
from tests.support.access import signed, write_accounts
from tests.support.auth import ON, SUPER, USER, MemoryStore, ask, create_user, entry, update_acl, update_user
from tests.support.broker import Peer, UnboundBroker, running
from tests.support.canary import CANARY
from tests.support.wire import pull, request, send

WRONG = (USER[0], "wrong")
OTHER = ("other", f"{CANARY}-of-other")


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest_asyncio.fixture
async def broker(tmp_path: Path, store: MemoryStore) -> AsyncIterator[UnboundBroker]:
    async with running(tmp_path, *ON, open_auth_store=lambda _: store) as started:
        await done(started.connect(), create_user(USER))
        yield started


async def done(peer: Peer, *commands: Command, account: tuple[str, str] = SUPER) -> None:
    """Have requests answered that have to succeed."""
    for command in commands:
        answer = await peer.ask(signed(command, account))
        assert answer.code == ResponseCode.SUCCESS, answer.remark


async def told(peer: Peer, command: Command, account: tuple[str, str] | None = SUPER) -> tuple[int, str | None]:
    """The code and the remark of an answer that has no body."""
    answer = await peer.ask(signed(command, account))
    assert bytes(answer.body) == b""
    return answer.code, answer.remark


def no_permission(resource: str, detail: str = "no matched policies.", host: str = "127.0.0.1") -> tuple[int, str]:
    return 16, f"User:{USER[0]} has no permission to access {resource} from {host}, {detail}"


# --- authentication


@pytest.mark.parametrize("frame_codec", CODECS)
async def test_who_is_let_in(broker: UnboundBroker, frame_codec: int) -> None:
    """The answers are those of Apache's 5.3.3."""
    peer = broker.connect()
    unsigned = send("T")
    unsigned.ext["AccessKey"] = SUPER[0]
    for command, account, answer in (
        (send("T"), None, (16, "username cannot be null.")),
        (ask(9999), None, (16, "username cannot be null.")),
        (send("T"), ("whoever", "x"), (16, "User:whoever is not found.")),
        (send("T"), WRONG, (16, "check signature failed.")),
        (unsigned, None, (16, "check signature failed.")),
        (ask(9999), USER, (3, " request type 9999 not supported")),
        (send("T"), SUPER, (0, None)),
    ):
        got = await peer.ask(signed(command, account), frame_codec)
        assert (got.code, got.remark) == answer
    assert broker.router._guard is not None
    assert dict(broker.router._guard.refusals) == {"account": 3, "signature": 2}


async def test_a_disabled_user_is_refused_from_the_next_request_on(broker: UnboundBroker) -> None:
    peer = broker.connect()
    await done(peer, update_acl(USER[0], entry("*", "All")))
    await done(peer, send("T"), account=USER)
    await done(peer, update_user(USER[0], userStatus="disable"))
    assert await told(peer, send("T"), USER) == (16, f"User:{USER[0]} is disabled.")
    await done(peer, update_user(USER[0], userStatus="Enable"))
    await done(peer, send("T"), account=USER)


async def test_a_new_password_counts_from_the_next_request_on(broker: UnboundBroker) -> None:
    peer = broker.connect()
    await done(peer, update_acl(USER[0], entry("*", "All")), update_user(USER[0], password=f"{CANARY}-new"))
    assert await told(peer, send("T"), USER) == (16, "check signature failed.")
    await done(peer, send("T"), account=(USER[0], f"{CANARY}-new"))


async def test_codes_of_the_white_lists(tmp_path: Path) -> None:
    settings = (*ON, "authenticationWhitelist=10,310", "authorizationWhitelist= 310 , 21")
    async with running(tmp_path, *settings, open_auth_store=lambda _: MemoryStore()) as broker:
        peer = broker.connect()
        await done(peer, create_user(USER))
        assert (await peer.ask(send("T"))).code == 0  # in both lists
        assert await told(peer, send("T", v1=True), None) == (16, "username cannot be null.")
        assert await told(peer, send("T", v1=True), USER) == no_permission("Topic:T")
        assert (await peer.ask(signed(ask(21), USER))).code == 0
        assert (await peer.ask(ask(21))).code == 16
        assert (await peer.ask(signed(ask(201), USER))).code == 16


async def test_without_authorization_every_user_may_do_everything_but_make_supers(tmp_path: Path) -> None:
    settings = (ON[0], ON[2], "authenticationWhitelist=310")
    async with running(tmp_path, *settings, open_auth_store=lambda _: MemoryStore()) as broker:
        peer = broker.connect()
        await done(peer, create_user(USER))
        await done(peer, ask(21), ask(26), create_user(OTHER), account=USER)
        assert (await peer.ask(send("T"))).code == 0
        assert (await peer.ask(pull("TBW102"))).code == 16
        assert (await told(peer, update_user(USER[0], userType="Super"), USER))[0] == 1


@pytest.mark.parametrize("kind", ["Stateless", "Stateful"])
async def test_the_stateful_strategy_takes_a_signed_connection_as_signed(tmp_path: Path, kind: str) -> None:
    strategy = f"authenticationStrategy=org.apache.rocketmq.auth.authentication.strategy.{kind}AuthenticationStrategy"
    async with running(tmp_path, *ON, strategy, open_auth_store=lambda _: MemoryStore()) as broker:
        peer, stranger = broker.connect(), broker.connect()
        await done(stranger, create_user(USER), update_acl(USER[0], entry("Topic:T", "Pub")))

        def unsigned() -> Command:
            command = send("T")
            command.ext["AccessKey"] = USER[0]
            return command

        assert await told(peer, unsigned(), None) == (16, "check signature failed.")
        await done(peer, send("T"), account=USER)
        assert ((await peer.ask(unsigned())).code == 0) is (kind == "Stateful")
        assert await told(stranger, unsigned(), None) == (16, "check signature failed.")
        assert await told(peer, pull("T"), (SUPER[0], "wrong")) == (16, "check signature failed.")
        await done(stranger, update_user(USER[0], password=f"{CANARY}-new"))
        assert await told(peer, unsigned(), None) == (16, "check signature failed.")
        assert broker.running.auth is not None
        peer.connection.abort()
        stranger.connection.abort()
        await broker.lanes.run(Background.TABLES, lambda: None)
        assert not broker.running.auth.authority._known


# --- decisions


@pytest.mark.parametrize(
    ("entries", "topic", "detail"),
    [
        ([entry("Topic:T", "Pub")], "T", None),
        ([entry("Topic:T", "Pub")], "T2", "no matched policies."),
        ([entry("Topic:T*", "Pub")], "T2", None),
        ([entry("Topic:T2*", "Pub")], "T", "no matched policies."),
        ([entry("Topic:*", "Pub")], "T", None),
        ([entry("*", "Pub")], "T", None),
        ([entry("Group:*", "Pub")], "T", "no matched policies."),
        ([entry("Topic:T", "Sub", "Get")], "T", "no matched policies."),
        ([entry("Topic:T", "All")], "T", None),
        ([entry("Topic:T", "All", decision="Deny")], "T", "the decision is deny."),
        # the narrowest resource counts, in whatever order they come
        ([entry("Topic:T", "Pub"), entry("Topic:*", "Pub", decision="Deny")], "T", None),
        ([entry("Topic:*", "Pub", decision="Deny"), entry("Topic:T", "Pub")], "T", None),
        ([entry("Topic:T", "Pub", decision="Deny"), entry("*", "All")], "T", "the decision is deny."),
        ([entry("*", "All"), entry("Topic:T*", "Pub", decision="Deny")], "Tx", "the decision is deny."),
        ([entry("Topic:T*", "Pub", decision="Deny"), entry("Topic:Tx*", "Pub")], "Txy", None),
        ([entry("Topic:Tx*", "Pub"), entry("Topic:T*", "Pub", decision="Deny")], "Txy", None),
        ([entry("Topic:Tx*", "Pub", decision="Deny"), entry("Topic:Txy", "Pub")], "Txy", None),
        ([entry("Topic:Txy", "Pub"), entry("Topic:Tx*", "Pub", decision="Deny")], "Txy", None),
        ([entry("*", "All", decision="Deny"), entry("Topic:*", "Pub")], "T", None),
        # an entry about other actions is about something else
        ([entry("Topic:T", "Sub", decision="Deny"), entry("Topic:*", "Pub")], "T", None),
        # addresses
        ([entry("Topic:T", "Pub", source_ips=["127.0.0.1"])], "T", None),
        ([entry("Topic:T", "Pub", source_ips=["10.0.0.0/8", "127.0.0.0/24"])], "T", None),
        ([entry("Topic:T", "Pub", source_ips=["10.0.0.0/8", "::1"])], "T", "no matched policies."),
        ([entry("Topic:T", "Pub", source_ips=["::/0"])], "T", "no matched policies."),
        ([entry("Topic:T", "Pub", source_ips=["10.0.0.0/8"], decision="Deny"), entry("Topic:*", "Pub")], "T", None),
        # a retry topic stands for its group
        ([entry("Group:G", "Sub")], "%RETRY%G", None),
        ([entry("Topic:*", "All"), entry("Group:H", "All")], "%RETRY%G", "no matched policies."),
    ],
)
async def test_what_policies_allow(
    broker: UnboundBroker, entries: list[dict[str, Any]], topic: str, detail: str | None
) -> None:
    peer = broker.connect()
    await done(peer, update_acl(USER[0], *entries))
    answer = await peer.ask(signed(send(topic), USER))
    if detail is None:
        assert answer.code == 0, answer.remark
    else:
        resource = "Group:G" if topic == "%RETRY%G" else f"Topic:{topic}"
        assert (answer.code, answer.remark) == no_permission(resource, detail)


async def test_the_default_policy_counts_where_the_custom_one_says_nothing(broker: UnboundBroker) -> None:
    peer = broker.connect()
    deny = entry("Topic:T", "Pub", decision="Deny")
    await done(
        peer,
        update_acl(USER[0], deny, policy_type="default"),
        update_acl(USER[0], entry("Topic:*", "Pub")),
    )
    await done(peer, send("T"), account=USER)  # although the default is about a narrower resource
    await done(peer, ask(3008, {"subject": f"User:{USER[0]}", "resource": "Topic:*"}))
    assert await told(peer, send("T"), USER) == no_permission("Topic:T", "the decision is deny.")


async def test_topics_with_messages_of_all_topics_have_to_be_named(broker: UnboundBroker) -> None:
    peer, of_all = broker.connect(), "SCHEDULE_TOPIC_XXXX"
    await done(peer, update_acl(USER[0], entry("*", "All"), entry("Topic:*", "All")))
    assert (await told(peer, pull(of_all), USER))[0] == 16
    await done(peer, update_acl(USER[0], entry(f"Topic:{of_all}", "Sub")))
    assert (await peer.ask(signed(pull(of_all), USER))).code != 16


async def test_a_name_longer_than_any_is_refused_and_not_kept(broker: UnboundBroker) -> None:
    """Decisions are kept by name: a user that may use all topics cannot make the broker keep names of any length."""
    peer = broker.connect()
    await done(peer, update_acl(USER[0], entry("*", "All"), entry("Topic:*", "All")))
    assert broker.running.auth is not None
    allowed = broker.running.auth.users.by_name[USER[0]]._allowed
    for command in (
        send("T" * 256),
        pull("T" * 256),
        pull("T", group="g" * 256),
        request(RequestCode.GET_MAX_OFFSET, headers.QueueOfTopic("T" * 256, 0)),
        request(RequestCode.GET_CONSUMER_LIST_BY_GROUP, headers.ConsumerGroupName("g" * 256)),
    ):
        code, remark = await told(peer, command, USER)
        assert (code, "longer than 255" in str(remark)) == (ResponseCode.SYSTEM_ERROR, True)
    assert not [key for key in allowed if "T" * 256 in str(key) or "g" * 256 in str(key)]


async def test_the_address_of_each_request_counts(broker: UnboundBroker) -> None:
    """Decisions are kept, by address among others."""
    here, there, mapped = (broker.connect((host, 1)) for host in ("10.0.0.1", "10.0.1.1", "::ffff:10.0.0.1"))
    await done(here, update_acl(USER[0], entry("Topic:T", "Pub", source_ips=["10.0.0.0/24"])))
    for _ in range(2):
        await done(here, send("T"), account=USER)
        assert await told(there, send("T"), USER) == no_permission("Topic:T", host="10.0.1.1")
        await done(mapped, send("T"), account=USER)


async def test_a_changed_policy_counts_from_the_next_request_on(broker: UnboundBroker) -> None:
    peer, acl = broker.connect(), {"subject": f"User:{USER[0]}"}
    for _ in range(2):
        assert await told(peer, send("T"), USER) == no_permission("Topic:T")
        await done(peer, update_acl(USER[0], entry("Topic:T", "Pub"), code=3006))
        await done(peer, send("T"), send("T"), account=USER)
        await done(peer, update_acl(USER[0], entry("Topic:T", "Pub", decision="Deny")))
        assert await told(peer, send("T"), USER) == no_permission("Topic:T", "the decision is deny.")
        await done(peer, ask(3008, acl))
    await done(peer, update_user(USER[0], userType="Super"))
    await done(peer, send("T"), account=USER)
    await done(peer, update_user(USER[0], userType="normal"))
    assert await told(peer, send("T"), USER) == no_permission("Topic:T")


async def test_a_later_user_of_the_name_does_not_get_the_policies(broker: UnboundBroker, store: MemoryStore) -> None:
    peer = broker.connect()
    await done(peer, update_acl(USER[0], entry("*", "All")), ask(3003, {"username": USER[0]}))
    assert store.acls == {}
    assert await told(peer, send("T"), USER) == (16, f"User:{USER[0]} is not found.")
    await done(peer, create_user(USER))
    assert await told(peer, send("T"), USER) == no_permission("Topic:T")


async def test_a_user_that_may_send_sees_which_delays_there_are(broker: UnboundBroker) -> None:
    """duemq's own producer asks for them."""
    peer = broker.connect()
    await done(peer, update_acl(USER[0], entry("Topic:TBW102", "Pub")))
    settings = [bytes((await peer.ask(signed(ask(26), account))).body).decode() for account in (USER, SUPER)]
    assert "messageDelayLevel=1s 5s" in settings[0]
    assert ["storePathRootDir" in each for each in settings] == [False, True]
    await done(peer, request(351, headers.TopicName("TBW102")), account=USER)
    assert await told(peer, request(351, headers.TopicName("other")), USER) == no_permission("Topic:other")


# --- held pulls


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (ask(3003, {"username": USER[0]}), f"User:{USER[0]} is not found."),
        (update_user(USER[0], userStatus="disable"), f"User:{USER[0]} is disabled."),
        (update_user(USER[0], password="another"), "check signature failed."),
        (ask(3008, {"subject": f"User:{USER[0]}"}), no_permission("Topic:TBW102")[1]),
        (
            update_acl(USER[0], entry("Group:*", "Sub", decision="Deny")),
            no_permission("Group:G", "the decision is deny.")[1],
        ),
        (update_acl(USER[0], entry("Topic:other", "Sub")), None),
        (create_user(OTHER), None),
    ],
)
async def test_a_change_ends_the_held_pulls_that_it_forbids(
    broker: UnboundBroker, change: Command, why: str | None
) -> None:
    admin, peer = broker.connect(), broker.connect()
    await done(admin, update_acl(USER[0], entry("Topic:TBW102", "Sub"), entry("Group:*", "Sub")))
    await done(admin, request(200, None, json.dumps({"groupName": "G"}).encode()))
    waiting = signed(pull("TBW102", group="G", suspend_ms=30_000), USER)
    peer.post(waiting)
    of_super = signed(pull("TBW102", group="G", suspend_ms=30_000), SUPER)
    admin.post(of_super)
    assert broker.running.pulls.polls.count == 2
    change.ext.pop("Signature", None)
    await done(admin, change)
    for _ in range(3):
        await broker.lanes.run(Background.TABLES, lambda: None)
    answer = peer.answer_of(waiting)
    assert (answer.remark if answer is not None else None) == why
    assert admin.answer_of(of_super) is None
    assert broker.running.pulls.polls.count == 2 - (why is not None)


# --- users and policies by request


async def test_users(broker: UnboundBroker, store: MemoryStore) -> None:
    """The answers are those of Apache's 5.3.3, but for what would be misunderstood."""
    peer = broker.connect()
    for command, answer in (
        (create_user(USER), (16, "The user is existed")),
        (ask(3001, {"username": "new"}, {}), (16, "password can not be blank")),
        (ask(3001, {}, {"password": "x"}), (29, "The username is blank")),
        (ask(3001, {"username": " "}, {"password": "x"}), (16, "username can not be blank")),
        (ask(3001, {"username": "n" * 256}, {"password": "x"}), None),
        (ask(3001, {"username": "new\n"}, {"password": "x"}), None),
        (ask(3001, {"username": "new"}), (1, "a UserInfo body: Input data was truncated")),
        (create_user(("new", "x"), userType="Root"), (29, "The userType is not one of Super, Normal")),
        (create_user(("new", "x"), userStatus="disabled"), (29, "The userStatus is not one of enable, disable")),
        (update_user("nobody", password="x"), (16, "The user is not exist")),
        (ask(3002, {}, {}), (29, "The username is blank")),
        (ask(3003, {"username": "nobody"}), (0, None)),
        (ask(3003, {}), (16, "username can not be blank")),
        (ask(3004, {"username": "nobody"}), (0, None)),
        (ask(3004, {}), (29, "The username is blank")),
        (ask(3005, {"filter": "zzz"}), (0, None)),
    ):
        got = await told(peer, command)
        assert got == answer if answer is not None else got[0] == 16
    assert set(store.users) == {SUPER[0], USER[0]}
    answer_of = await peer.ask(signed(ask(3004, {"username": USER[0]}), SUPER))
    text = f'{{"password":"{USER[1]}","userStatus":"enable","userType":"Normal","username":"{USER[0]}"}}'
    assert bytes(answer_of.body).decode() == text
    found = await peer.ask(signed(ask(3005, {"filter": "der"}), SUPER))
    assert bytes(found.body).decode() == f"[{text}]"
    await done(peer, ask(3003, {"username": USER[0]}))
    assert set(store.users) == {SUPER[0]}


async def test_policies(broker: UnboundBroker, store: MemoryStore) -> None:
    peer, of_user = broker.connect(), {"subject": f"User:{USER[0]}"}
    await done(
        peer,
        update_acl(
            USER[0], entry("Topic:a", "pub", "SUB", "Pub"), entry("Group:g*", "All", source_ips=["::1", "10.0.0.0/8"])
        ),
        update_acl(USER[0], entry("*", "List", decision="deny"), policy_type="DEFAULT"),
        update_acl(USER[0], entry("Topic:a", "Sub"), entry("Topic:b", "Get")),
    )
    answer = await peer.ask(signed(ask(3009, of_user), SUPER))
    assert json.loads(bytes(answer.body)) == {
        "policies": [
            {
                "entries": [
                    {"actions": ["Sub"], "decision": "Allow", "resource": "Topic:a"},
                    {
                        "actions": ["All"],
                        "decision": "Allow",
                        "resource": "Group:g*",
                        "sourceIps": ["::1", "10.0.0.0/8"],
                    },
                    {"actions": ["Get"], "decision": "Allow", "resource": "Topic:b"},
                ],
                "policyType": "Custom",
            },
            {"entries": [{"actions": ["List"], "decision": "Deny", "resource": "*"}], "policyType": "Default"},
        ],
        "subject": f"User:{USER[0]}",
    }
    for ext, resources in (
        ({}, ["Topic:a", "Group:g*", "Topic:b", "*"]),
        ({"resourceFilter": "Topic"}, ["Topic:a", "Topic:b"]),
        ({"resourceFilter": "User"}, ["Topic:a", "Group:g*", "Topic:b", "*"]),
        ({"subjectFilter": "nobody"}, []),
        ({"subjectFilter": "order", "resourceFilter": "*"}, ["Group:g*", "*"]),
    ):
        body = bytes((await peer.ask(signed(ask(3010, ext), SUPER))).body)
        found = json.loads(body)[0]["policies"] if body else []
        assert [each["resource"] for policy in found for each in policy["entries"]] == resources
    await done(
        peer,
        ask(3008, {**of_user, "resource": "Topic:a"}),
        ask(3008, {**of_user, "resource": "Topic:zzz"}),
        ask(3008, {**of_user, "resource": "*", "policyType": "Default"}),
    )
    assert [[each.resource.key for each in policy.entries] for policy in store.acls[USER[0]].policies] == [
        ["Group:g*", "Topic:b"]
    ]
    await done(peer, ask(3008, of_user))
    assert store.acls == {}
    assert await told(peer, ask(3009, of_user)) == (0, None)


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        (update_acl("nobody", entry("Topic:T", "Pub")), (16, "The subject of User:nobody is not exist.")),
        (ask(3006, {"subject": "Role:orders"}, {"policies": []}), (16, "The subject type is null.")),
        (ask(3006, {"subject": f"User:{USER[0]}"}, {"policies": []}), (16, "The policies is empty.")),
        (update_acl(USER[0]), (16, "The policies is empty.")),
        (update_acl(USER[0], entry("Nope:T", "Pub")), (16, "The resource is null.")),
        (update_acl(USER[0], {"actions": ["Pub"], "decision": "Allow"}), (16, "The resource is null.")),
        (update_acl(USER[0], entry("Any:T", "Pub")), (16, "The resource type is Any: write * for everything.")),
        (update_acl(USER[0], entry("Topic:a*b*", "Pub")), None),
        (update_acl(USER[0], entry("Topic:T")), (16, "The actions is empty.")),
        (update_acl(USER[0], entry("Topic:T", "Any")), (16, "The actions can not be Any.")),
        (update_acl(USER[0], entry("Topic:T", "Pub", "Nope")), (16, "The action Nope is unknown.")),
        (update_acl(USER[0], entry("Topic:T", "Pub", decision="x")), (16, "The decision is null or illegal.")),
        (update_acl(USER[0], entry("Topic:T", "Pub", source_ips=["1.2.3"])), (16, "The source ip is invalid.")),
        (update_acl(USER[0], entry("Topic:T", "Pub", source_ips=["localhost/8"])), (16, "The source ip is invalid.")),
        (update_acl(USER[0], entry("Topic:T", "Pub", source_ips=[" "])), (16, "The source ip is empty.")),
        (
            update_acl(USER[0], entry("Topic:T", "Pub"), policy_type="Defalt"),
            (29, "The policyType is not one of Custom, Default"),
        ),
        (
            update_acl(USER[0], *(entry(f"Topic:{number}", "Pub") for number in range(10_001))),
            (16, "The policies of a user may have at most 10000 entries."),
        ),
        (ask(3008, {}), (16, "The subject is null.")),
        (ask(3008, {"subject": "User:nobody"}), (16, "The subject is not exist.")),
        (ask(3008, {"subject": f"User:{USER[0]}"}), (16, "The acl is not exist.")),
        # RocketMQ deletes all policies for a resource that it does not understand.
        (ask(3008, {"subject": f"User:{USER[0]}", "resource": "Nope"}), (16, "The resource is null.")),
        (ask(3009, {"subject": "User:nobody"}), (16, "The subject is not exist.")),
        (ask(3009, {}), (16, "The subject type is null.")),
    ],
)
async def test_wrong_policies_change_nothing(
    broker: UnboundBroker, store: MemoryStore, command: Command, answer: tuple[int, str] | None
) -> None:
    command.ext.pop("Signature", None)
    got = await told(broker.connect(), command)
    assert got == answer if answer is not None else got[0] == 16
    assert store.acls == {}


async def test_who_may_change_users_is_no_super_user(broker: UnboundBroker, store: MemoryStore) -> None:
    """Whoever may change the cluster may make users, but neither make nor change a super user or its policies, nor see
    passwords."""
    peer = broker.connect()
    await done(peer, update_acl(USER[0], entry(f"Cluster:{broker.config.cluster_name}", "Update", "Get")))
    await done(peer, create_user(OTHER), account=USER)
    for command, answer in (
        (create_user(("new", "x"), userType="Super"), (1, "The super user can only be create by super user")),
        (update_user(USER[0], userType="Super"), (1, "The super user can only be update by super user")),
        (update_user(SUPER[0], password="x"), (16, "The super user can only be update by super user")),
        (ask(3003, {"username": SUPER[0]}), (16, "The super user can only be update by super user")),
        (update_acl(SUPER[0], entry("*", "All")), (16, "The super user can only be update by super user")),
        (update_acl(SUPER[0], entry("*", "All"), code=3006), (16, "The super user can only be update by super user")),
        (ask(3008, {"subject": f"User:{SUPER[0]}"}), (16, "The super user can only be update by super user")),
    ):
        assert await told(peer, command, USER) == answer
    assert SUPER[0] not in store.acls
    for command in (ask(3004, {"username": OTHER[0]}), ask(3004, {"username": USER[0]}), ask(3005)):
        body = bytes((await peer.ask(signed(command, USER))).body)
        assert body
        assert CANARY.encode() not in body


@pytest.mark.parametrize(
    "command",
    [
        ask(3003, {"username": SUPER[0]}),
        update_user(SUPER[0], userStatus="disable"),
        update_user(SUPER[0], userType="Normal"),
    ],
)
async def test_the_last_super_user_stays(broker: UnboundBroker, command: Command) -> None:
    peer = broker.connect()
    command.ext.pop("Signature", None)
    assert await told(peer, command) == (
        16,
        f"{SUPER[0]} is the last super user that is enabled, create another one first",
    )
    await done(peer, create_user(OTHER, userType="super"))
    again = ask(command.code, {}, None)
    again.ext, again.body = {"username": SUPER[0]}, command.body
    await done(peer, again)


# --- durability


async def test_nothing_counts_before_it_is_on_the_disk(broker: UnboundBroker, store: MemoryStore) -> None:
    peer = broker.connect()
    broker.lanes.hold(Background.TABLES)
    answer = asyncio.ensure_future(peer.ask(signed(update_acl(USER[0], entry("Topic:T", "Pub")), SUPER)))
    await asyncio.sleep(0)
    assert await told(peer, send("T"), USER) == no_permission("Topic:T")
    assert not answer.done()
    broker.lanes.let_go(Background.TABLES)
    assert (await answer).code == 0
    await done(peer, send("T"), account=USER)
    store.fails = True
    for change in (
        create_user(OTHER),
        update_user(USER[0], password="x"),
        ask(3003, {"username": USER[0]}),
        update_acl(USER[0], entry("Topic:T", "Pub", decision="Deny")),
        ask(3008, {"subject": f"User:{USER[0]}"}),
    ):
        assert await told(peer, change) == (1, "users and policies cannot be written (no space)")
    await done(peer, send("T"), account=USER)
    assert (await peer.ask(signed(send("T"), OTHER))).remark == "User:other is not found."


async def test_users_and_policies_are_there_after_a_restart(tmp_path: Path) -> None:
    """In RocksDB; `tests/interop` has the same with Apache's broker."""
    async with running(tmp_path, *ON) as broker:
        peer = broker.connect()
        await done(peer, create_user(USER), create_user(OTHER), update_acl(USER[0], entry("Topic:T", "Pub")))
        await done(peer, ask(3003, {"username": OTHER[0]}), update_user(SUPER[0], password=f"{CANARY}-new"))
        with pytest.raises(AuthStoreError, match="another broker is running on this store"):
            RocksStore(str(tmp_path / "config"))
    modes = [(tmp_path / "config" / name).stat().st_mode & 0o777 for name in ("users", "acls")]
    assert modes == [0o700, 0o700]
    async with running(tmp_path, *ON) as broker:  # the first password of the super user does not come back
        peer = broker.connect()
        await done(peer, send("T"), account=USER)
        assert await told(peer, send("U"), USER) == no_permission("Topic:U")
        assert await told(peer, send("T"), SUPER) == (16, "check signature failed.")
        assert await told(peer, send("T"), OTHER) == (16, "User:other is not found.")


async def test_on_a_full_disk_the_broker_starts_with_the_users_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, *ON) as broker:
        await done(broker.connect(), create_user(USER))
    real, is_full = rocksdict.Rdict, True

    def opened(path: str, options: Any, families: Any, *, access_type: Any) -> Any:
        if is_full and access_type is not read_only:
            raise Exception(f"IO error: No space left on device: While appending to file: {path}/MANIFEST-000017")
        return real(path, options, families, access_type=access_type)

    read_only = rocksdict.AccessType.read_only()
    monkeypatch.setattr(rocksdict.AccessType, "read_only", lambda: read_only, raising=False)
    monkeypatch.setattr(rocksdict, "Rdict", opened)
    async with running(tmp_path, *ON) as broker:
        peer = broker.connect()
        assert (await told(peer, send("T"), USER)) == no_permission("Topic:T")
        refused = await told(peer, update_acl(USER[0], entry("Topic:T", "Pub")))
        assert refused == (1, f"{tmp_path}/config/acls cannot be written: there is no space left")
        is_full = False
        await done(peer, update_acl(USER[0], entry("Topic:T", "Pub")), create_user(OTHER))
        await done(peer, send("T"), account=USER)
    async with running(tmp_path, *ON) as broker:
        await done(broker.connect(), send("T"), account=USER)
        assert await told(broker.connect(), send("T"), OTHER) != (16, "User:other is not found.")


async def test_after_a_full_disk_the_next_change_is_made_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RocksDB itself goes on refusing changes for seconds; then it also fails to close without an error."""
    real, is_full = rocksdict.Rdict, False

    class Full:
        """A database whose log could not be written once."""

        def __init__(self, *arguments: Any, **named: Any) -> None:
            self._real, self._has_failed = real(*arguments, **named), False

        def put(self, *arguments: Any, **named: Any) -> None:
            self._has_failed |= is_full
            if self._has_failed:
                raise Exception("IO error: No space left on device: While appending to file: 000004.log")
            self._real.put(*arguments, **named)

        def close(self) -> None:
            self._real.close()
            if self._has_failed:
                raise Exception("IO error: Writer has previous error.")

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

    monkeypatch.setattr(rocksdict, "Rdict", Full)
    store = RocksStore(str(tmp_path))
    users = [User(password=CANARY, user_type=UserType.NORMAL, username=f"user{number}") for number in range(4)]
    store.put_user(users[0])
    is_full = True
    for _ in range(2):
        with pytest.raises(AuthStoreError, match="No space left"):
            store.put_user(users[1])
    is_full = False
    store.put_user(users[2])
    store.close()
    store = RocksStore(str(tmp_path))
    assert [user.username for user in store.load()[0]] == ["user0", "user2"]
    store.close()


async def test_a_store_that_is_none_of_rocketmqs_stops_the_start(tmp_path: Path) -> None:
    async with running(tmp_path, *ON):
        pass
    families = {name: rocksdict.Options(raw_mode=True) for name in ("default", "kvDataVersion", "forbidden")}
    users = rocksdict.Rdict(
        str(tmp_path / "config" / "users"), rocksdict.Options(raw_mode=True), column_families=families
    )
    users.put(b"orders", f'{{"password":"{CANARY}"}}'.encode())
    users.close()
    with pytest.raises(AuthStoreError, match=r"the value of 'orders' is not one that RocketMQ 5\.3 writes") as caught:
        async with running(tmp_path, *ON):
            pass
    assert CANARY not in str(caught.value)


def damage(directory: Path, kind: str) -> None:
    """Change a bit in the middle of the largest file of a kind in a database."""
    file = max(directory.glob(f"*.{kind}"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("kind", ["sst", "log"])
@pytest.mark.parametrize("database", ["users", "acls"])
async def test_a_damaged_database_stops_each_start(tmp_path: Path, database: str, kind: str) -> None:
    """One changed bit makes users unknown, among them perhaps the one of initAuthenticationUser, which must not be made
    anew with its first password; and makes denials unknown."""
    store, killed = tmp_path / "store", tmp_path / "killed"
    async with running(store, *ON):
        pass
    config = RocksStore(str(store / "config"))
    for number in range(200):
        config.put_user(User(password=CANARY, user_type=UserType.NORMAL, username=f"user{number:03}"))
        config.put_acl(empty_acl(f"user{number:03}"))
    if kind == "sst":  # an open database has the changes since it was opened in its log
        config.close()
        RocksStore(str(store / "config")).close()
    shutil.copytree(store, killed)
    if kind == "log":
        config.close()
    damage(killed / "config" / database, kind)
    for _ in range(2):  # the first start mends nothing, and makes no user
        with pytest.raises(AuthStoreError, match=f"config/{database} cannot be .*it is damaged. Put a copy") as caught:
            async with running(killed, *ON):
                pass
        assert CANARY not in str(caught.value)


async def test_an_unfinished_write_at_the_end_of_the_log_is_dropped(tmp_path: Path) -> None:
    config = RocksStore(str(tmp_path / "config"))
    for number in range(20):
        config.put_user(User(password=CANARY, user_type=UserType.NORMAL, username=f"user{number:03}"))
    shutil.copytree(tmp_path / "config", tmp_path / "killed")
    config.close()
    (log,) = (tmp_path / "killed" / "users").glob("*.log")
    log.write_bytes(log.read_bytes()[:-5])
    store = RocksStore(str(tmp_path / "killed"))
    assert [user.username for user in store.load()[0]] == [f"user{number:03}" for number in range(19)]
    store.close()


# --- settings, logs, migration


async def test_neither_log_nor_settings_have_a_password(tmp_path: Path) -> None:
    inner = f'innerClientAuthenticationCredentials={{"accessKey":"inner","secretKey":"{CANARY}-inner"}}'
    with structlog.testing.capture_logs() as logged:
        async with running(tmp_path, *ON, inner, open_auth_store=lambda _: MemoryStore()) as broker:
            peer = broker.connect()
            await done(peer, create_user(USER), update_user(USER[0], password=f"{CANARY}-new"))
            await told(peer, ask(3001, {"username": "x"}, {"password": 1, "x": CANARY}))
            misplaced = send("T")
            misplaced.ext |= {"AccessKey": CANARY, "Signature": "x"}
            await peer.ask(misplaced)
            settings = bytes((await peer.ask(signed(ask(26), SUPER))).body).decode()
            assert broker.running.auth is not None
            assert CANARY not in repr(broker.running.auth.users.by_name[USER[0]].user)
            await done(peer, ask(26), account=("inner", f"{CANARY}-inner"))
    assert {"users_made", "user_created", "user_changed", "access_refused"} <= {line["event"] for line in logged}
    assert CANARY not in str(logged)
    assert CANARY not in settings
    assert "initAuthenticationUser=******\n" in settings
    assert "innerClientAuthenticationCredentials=******\n" in settings


ACCOUNTS = f"""\
globalWhiteRemoteAddresses: [10.0.0.1]
accounts:
- accessKey: administrator
  secretKey: {CANARY}-admin
  admin: true
  topicPerms: [only=PUB]
- accessKey: application
  secretKey: {CANARY}-application
  whiteRemoteAddress: 10.0.0.2
  defaultTopicPerm: SUB|PUB
  defaultGroupPerm: DENY
  topicPerms: [a=PUB, b= SUB , c=DENY, d=NOPE]
  groupPerms: [g=PUB|SUB]
- accessKey: nothing-listed
  secretKey: {CANARY}-nothing
- accessKey: existing
  secretKey: {CANARY}-unused
"""


async def test_accounts_become_users_once(tmp_path: Path) -> None:
    write_accounts(tmp_path, ACCOUNTS)
    store = MemoryStore()
    settings = (*ON, "migrateAuthFromV1Enabled=true", f"rocketmqHome={tmp_path}")
    async with running(tmp_path / "1", *ON, open_auth_store=lambda _: store) as broker:
        await done(broker.connect(), create_user(("existing", f"{CANARY}-old")))
    store.is_closed = False
    with structlog.testing.capture_logs() as logged:
        async with running(tmp_path / "1", *settings, open_auth_store=lambda _: store) as broker:
            peer = broker.connect()
            await done(peer, request(26), account=("administrator", f"{CANARY}-admin"))
            await done(peer, send("a"), send("z"), account=("application", f"{CANARY}-application"))
            # As at RocketMQ's brokers, the default counts for the actions that the list does not name.
            await done(peer, send("b"), account=("application", f"{CANARY}-application"))
            for topic in ("c", "d"):
                assert (await peer.ask(signed(send(topic), ("application", f"{CANARY}-application")))).code == 16
            assert (await peer.ask(signed(send("a"), ("existing", f"{CANARY}-unused")))).code == 16
    lost = [line["what"].partition(":")[0] for line in logged if line["event"] == "not_migrated"]
    assert lost == ["globalWhiteRemoteAddresses", "whiteRemoteAddress"]
    assert CANARY not in str(logged)
    del store.users["application"]
    store.is_closed = False
    write_accounts(tmp_path, "accounts: [")
    with pytest.raises(Exception, match=r"plain_acl.yml, line 2"):
        async with running(tmp_path / "1", *settings, open_auth_store=lambda _: store):
            pass
    assert store.is_closed


async def test_a_dump_shows_users_and_policies_without_passwords(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(tmp_path, *ON) as broker:
        peer = broker.connect()
        await done(peer, create_user(USER), update_acl(USER[0], entry("Topic:T*", "Pub", source_ips=["10.0.0.1"])))
        # Of the whole folder, only the databases: the running broker replaces its other files.
        databases = [tmp_path / "config" / name for name in ("users", "acls")]
        assert all(path.is_dir() for path in databases)
        before = {path: path.stat().st_mtime_ns for folder in databases for path in folder.rglob("*")}
        capsys.readouterr()
        assert dump.main([str(tmp_path / "config")]) == 0
        assert {path: path.stat().st_mtime_ns for folder in databases for path in folder.rglob("*")} == before
    shown = capsys.readouterr().out
    assert "user=root type=Super status=enable\n" in shown
    assert "user=orders policy=Custom decision=Allow resource=Topic:T* actions=Pub sources=10.0.0.1\n" in shown
    for path in (tmp_path / "config" / "users").iterdir():
        assert dump.main([str(path)]) == 0
    assert CANARY not in shown + capsys.readouterr().out
    (tmp_path / "config" / "users" / "CURRENT").write_bytes(b"nonsense\n")
    assert dump.main([str(tmp_path / "config" / "users")]) == 1
    assert "damaged: " in capsys.readouterr().out
