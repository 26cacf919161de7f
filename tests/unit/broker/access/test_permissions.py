"""What each request code needs: every code by every kind of account of plain_acl.yml, and by users of ACL 2.0 with each
action; and what is known of a record's topic."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import pytest_asyncio

from duemq.broker.access.auth.model import Acl, User
from duemq.broker.access.permission import ACCOUNT, OPEN, Permission, PlainAction, Role
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames import fastjson
from duemq.protocol.frames.command import Command
from duemq.protocol.requests import headers
from duemq.protocol.requests.headers import NoFields
from tests.support.access import signed as signed_by
from tests.support.access import write_accounts
from tests.support.auth import MemoryStore
from tests.support.broker import UnboundBroker, running
from tests.support.canary import CANARY
from tests.support.wire import pull, request, send

NONE, LOOK, OPERATE, ADMINISTER = Role.NONE, Role.LOOK, Role.OPERATE, Role.ADMINISTER
PUB, SUB, ANY = PlainAction.PUB, PlainAction.SUB, PlainAction.ANY
Needed = tuple[Role, PlainAction | None, PlainAction | None]
"""A role, an action on the topic, an action on the group."""

NEEDED: Final[dict[RequestCode, Needed]] = {
    RequestCode.SEND_MESSAGE: (NONE, PUB, None),
    RequestCode.SEND_MESSAGE_V2: (NONE, PUB, None),
    RequestCode.SEND_BATCH_MESSAGE: (NONE, PUB, None),
    RequestCode.RECALL_MESSAGE: (NONE, PUB, None),
    RequestCode.CHANGE_RECURRING: (NONE, PUB, None),
    RequestCode.CHANGE_BY_HANDLE: (NONE, PUB, None),
    RequestCode.PULL_MESSAGE: (NONE, SUB, SUB),
    RequestCode.LITE_PULL_MESSAGE: (NONE, SUB, SUB),
    RequestCode.QUERY_CONSUMER_OFFSET: (NONE, SUB, SUB),
    RequestCode.UPDATE_CONSUMER_OFFSET: (NONE, SUB, SUB),
    RequestCode.HEART_BEAT: (NONE, SUB, SUB),
    RequestCode.LOCK_BATCH_MQ: (NONE, SUB, SUB),
    RequestCode.UNLOCK_BATCH_MQ: (NONE, SUB, SUB),
    RequestCode.UNREGISTER_CLIENT: (NONE, None, SUB),
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: (NONE, None, SUB),
    RequestCode.CONSUMER_SEND_MSG_BACK: (NONE, None, SUB),
    RequestCode.VIEW_MESSAGE_BY_ID: (NONE, None, None),
    RequestCode.CHECK_CLIENT_CONFIG: (NONE, None, None),
    RequestCode.GET_MAX_OFFSET: (NONE, ANY, None),
    RequestCode.GET_MIN_OFFSET: (NONE, ANY, None),
    RequestCode.GET_EARLIEST_MSG_STORETIME: (NONE, ANY, None),
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: (NONE, ANY, None),
    RequestCode.LIST_PENDING: (LOOK, ANY, None),
    RequestCode.DUE_CURVE: (LOOK, ANY, None),
    RequestCode.GET_ALL_CONSUMER_OFFSET: (LOOK, None, None),
    RequestCode.GET_ALL_DELAY_OFFSET: (LOOK, None, None),
    RequestCode.GET_TIMER_CHECK_POINT: (LOOK, None, None),
    RequestCode.GET_TIMER_METRICS: (LOOK, None, None),
    RequestCode.GET_ALL_TOPIC_CONFIG: (LOOK, None, None),
    RequestCode.GET_TOPIC_CONFIG: (LOOK, None, None),
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: (LOOK, None, None),
    RequestCode.GET_TOPIC_STATS_INFO: (LOOK, None, None),
    RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: (LOOK, None, None),
    RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: (LOOK, None, None),
    RequestCode.GET_CONSUME_STATS: (LOOK, None, None),
    RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: (LOOK, None, None),
    RequestCode.GET_CONSUMER_CONNECTION_LIST: (LOOK, None, None),
    RequestCode.GET_PRODUCER_CONNECTION_LIST: (LOOK, None, None),
    RequestCode.GET_ALL_PRODUCER_INFO: (LOOK, None, None),
    RequestCode.GET_CONSUMER_RUNNING_INFO: (LOOK, None, None),
    RequestCode.GET_BROKER_RUNTIME_INFO: (LOOK, None, None),
    RequestCode.VIEW_BROKER_STATS_DATA: (LOOK, None, None),
    RequestCode.GET_BROKER_CONSUME_STATS: (LOOK, None, None),
    RequestCode.QUERY_TOPICS_BY_CONSUMER: (LOOK, None, None),
    RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER: (LOOK, None, None),
    RequestCode.QUERY_CONSUME_TIME_SPAN: (LOOK, None, None),
    RequestCode.QUERY_CORRECTION_OFFSET: (LOOK, None, None),
    RequestCode.QUERY_CONSUME_QUEUE: (LOOK, None, None),
    RequestCode.GET_NAMESRV_CONFIG: (LOOK, None, None),
    RequestCode.GET_BROKER_CONFIG: (NONE, None, None),
    RequestCode.GET_BROKER_CLUSTER_ACL_INFO: (LOOK, None, None),
    RequestCode.GET_BROKER_CLUSTER_INFO: (LOOK, None, None),
    RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: (LOOK, None, None),
    RequestCode.GET_TOPICS_BY_CLUSTER: (LOOK, None, None),
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: (LOOK, None, None),
    RequestCode.GET_KV_CONFIG: (LOOK, None, None),
    RequestCode.GET_KVLIST_BY_NAMESPACE: (LOOK, None, None),
    RequestCode.CANCEL_MESSAGE: (OPERATE, None, None),
    RequestCode.CHANGE_PENDING: (OPERATE, None, None),
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: (OPERATE, None, None),
    RequestCode.CLONE_GROUP_OFFSET: (OPERATE, None, None),
    RequestCode.CONSUME_MESSAGE_DIRECTLY: (OPERATE, None, None),
    RequestCode.UPDATE_AND_CREATE_TOPIC: (ADMINISTER, None, None),
    RequestCode.UPDATE_AND_CREATE_TOPIC_LIST: (ADMINISTER, None, None),
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: (ADMINISTER, None, None),
    RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE: (ADMINISTER, None, None),
    RequestCode.DELETE_EXPIRED_COMMITLOG: (ADMINISTER, None, None),
    RequestCode.CLEAN_UNUSED_TOPIC: (ADMINISTER, None, None),
    RequestCode.UPDATE_NAMESRV_CONFIG: (ADMINISTER, None, None),
    RequestCode.DELETE_TOPIC_IN_BROKER: (ADMINISTER, None, None),
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: (ADMINISTER, None, None),
    RequestCode.DELETE_SUBSCRIPTIONGROUP: (ADMINISTER, None, None),
    RequestCode.UPDATE_BROKER_CONFIG: (ADMINISTER, None, None),
    RequestCode.UPDATE_AND_CREATE_ACL_CONFIG: (ADMINISTER, None, None),
    RequestCode.DELETE_ACL_CONFIG: (ADMINISTER, None, None),
    RequestCode.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG: (ADMINISTER, None, None),
    RequestCode.GET_BROKER_CLUSTER_ACL_CONFIG: (ADMINISTER, None, None),
    RequestCode.MOVE_CLOCK: (ADMINISTER, None, None),
    RequestCode.REPORT_BRIDGE: (OPERATE, None, None),
    RequestCode.WIPE_WRITE_PERM_OF_BROKER: (ADMINISTER, None, None),
    RequestCode.ADD_WRITE_PERM_OF_BROKER: (ADMINISTER, None, None),
    RequestCode.PUT_KV_CONFIG: (ADMINISTER, None, None),
    RequestCode.DELETE_KV_CONFIG: (ADMINISTER, None, None),
    RequestCode.DELETE_TOPIC_IN_NAMESRV: (ADMINISTER, None, None),
    RequestCode.REGISTER_BROKER: (ADMINISTER, None, None),
    RequestCode.UNREGISTER_BROKER: (ADMINISTER, None, None),
    RequestCode.QUERY_DATA_VERSION: (ADMINISTER, None, None),
}
INSTEAD_OF_ROLE: Final = {RequestCode.GET_TOPIC_CONFIG: ANY}
"""The action on the topic with which no role is needed."""
ROCKETMQ_ADMIN_CODES: Final = {17, 25, 200, 207, 215}
"""Permission.ADMIN_CODE of 4.9.7."""

_CLUSTER_LOOK: Final = (None, None, "Get List")
_CLUSTER_CHANGE: Final = (None, None, "Update")
NEEDED_BY_USERS: Final[dict[RequestCode, tuple[str | None, str | None, str | None]]] = {
    RequestCode.SEND_MESSAGE: ("Pub", None, None),
    RequestCode.SEND_MESSAGE_V2: ("Pub", None, None),
    RequestCode.SEND_BATCH_MESSAGE: ("Pub", None, None),
    RequestCode.RECALL_MESSAGE: ("Pub", None, None),
    RequestCode.CHANGE_RECURRING: ("Pub", None, None),
    RequestCode.CHANGE_BY_HANDLE: ("Pub", None, None),
    RequestCode.PULL_MESSAGE: ("Sub", "Sub", None),
    RequestCode.LITE_PULL_MESSAGE: ("Sub", "Sub", None),
    RequestCode.QUERY_CONSUMER_OFFSET: ("Sub Get", "Sub Get", None),
    RequestCode.UPDATE_CONSUMER_OFFSET: ("Sub Update", "Sub Update", None),
    RequestCode.HEART_BEAT: ("Sub", "Sub", None),
    RequestCode.LOCK_BATCH_MQ: ("Sub", "Sub", None),
    RequestCode.UNLOCK_BATCH_MQ: ("Sub", "Sub", None),
    RequestCode.UNREGISTER_CLIENT: (None, "Sub", None),
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: (None, "Sub Get", None),
    RequestCode.CONSUMER_SEND_MSG_BACK: (None, "Sub", None),
    RequestCode.VIEW_MESSAGE_BY_ID: (None, None, None),
    RequestCode.CHECK_CLIENT_CONFIG: (None, None, None),
    RequestCode.GET_MAX_OFFSET: ("Sub Get", None, None),
    RequestCode.GET_MIN_OFFSET: ("Sub Get", None, None),
    RequestCode.GET_EARLIEST_MSG_STORETIME: ("Sub Get", None, None),
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: ("Sub Get", None, None),
    RequestCode.LIST_PENDING: ("Sub Get", None, None),
    RequestCode.DUE_CURVE: ("Sub Get", None, None),
    RequestCode.GET_TOPIC_CONFIG: ("Pub Sub Get", None, None),
    RequestCode.GET_TOPIC_STATS_INFO: ("Get", None, None),
    RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: ("Get", None, None),
    RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: (None, "Get", None),
    RequestCode.GET_CONSUME_STATS: ("Get", "Get", None),
    RequestCode.QUERY_TOPICS_BY_CONSUMER: (None, "Get", None),
    RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER: ("Get", "Get", None),
    RequestCode.QUERY_CONSUME_TIME_SPAN: ("Get", "Get", None),
    RequestCode.QUERY_CORRECTION_OFFSET: ("Get", "Get", None),
    RequestCode.QUERY_CONSUME_QUEUE: ("Get", None, None),
    RequestCode.CLONE_GROUP_OFFSET: ("Update", "Update", None),
    RequestCode.UPDATE_AND_CREATE_TOPIC_LIST: ("Create", None, None),
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: (None, "Create", None),
    RequestCode.GET_CONSUMER_CONNECTION_LIST: (None, "Get", None),
    RequestCode.GET_CONSUMER_RUNNING_INFO: (None, "Get", None),
    RequestCode.CONSUME_MESSAGE_DIRECTLY: (None, "Sub", "Update"),
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: ("Update", "Update", None),
    RequestCode.UPDATE_AND_CREATE_TOPIC: ("Create", None, None),
    RequestCode.DELETE_TOPIC_IN_BROKER: ("Delete", None, None),
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: (None, "Create", None),
    RequestCode.DELETE_SUBSCRIPTIONGROUP: (None, "Delete", None),
    RequestCode.GET_ALL_CONSUMER_OFFSET: _CLUSTER_LOOK,
    RequestCode.GET_ALL_DELAY_OFFSET: _CLUSTER_LOOK,
    RequestCode.GET_TIMER_CHECK_POINT: _CLUSTER_LOOK,
    RequestCode.GET_TIMER_METRICS: _CLUSTER_LOOK,
    RequestCode.GET_ALL_TOPIC_CONFIG: _CLUSTER_LOOK,
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: _CLUSTER_LOOK,
    RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: _CLUSTER_LOOK,
    RequestCode.GET_PRODUCER_CONNECTION_LIST: _CLUSTER_LOOK,
    RequestCode.GET_ALL_PRODUCER_INFO: _CLUSTER_LOOK,
    RequestCode.GET_BROKER_RUNTIME_INFO: _CLUSTER_LOOK,
    RequestCode.GET_BROKER_CONSUME_STATS: _CLUSTER_LOOK,
    RequestCode.GET_NAMESRV_CONFIG: _CLUSTER_LOOK,
    RequestCode.VIEW_BROKER_STATS_DATA: _CLUSTER_LOOK,
    RequestCode.GET_BROKER_CONFIG: (None, None, None),
    RequestCode.GET_BROKER_CLUSTER_INFO: _CLUSTER_LOOK,
    RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: _CLUSTER_LOOK,
    RequestCode.GET_TOPICS_BY_CLUSTER: _CLUSTER_LOOK,
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: _CLUSTER_LOOK,
    RequestCode.GET_KV_CONFIG: _CLUSTER_LOOK,
    RequestCode.GET_KVLIST_BY_NAMESPACE: _CLUSTER_LOOK,
    RequestCode.REPORT_BRIDGE: _CLUSTER_LOOK,
    RequestCode.AUTH_GET_USER: _CLUSTER_LOOK,
    RequestCode.AUTH_LIST_USER: _CLUSTER_LOOK,
    RequestCode.AUTH_GET_ACL: _CLUSTER_LOOK,
    RequestCode.AUTH_LIST_ACL: _CLUSTER_LOOK,
    RequestCode.QUERY_DATA_VERSION: (None, None, "Update Get"),
    RequestCode.CANCEL_MESSAGE: _CLUSTER_CHANGE,
    RequestCode.CHANGE_PENDING: _CLUSTER_CHANGE,
    RequestCode.UPDATE_BROKER_CONFIG: _CLUSTER_CHANGE,
    RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE: _CLUSTER_CHANGE,
    RequestCode.DELETE_EXPIRED_COMMITLOG: _CLUSTER_CHANGE,
    RequestCode.CLEAN_UNUSED_TOPIC: _CLUSTER_CHANGE,
    RequestCode.UPDATE_NAMESRV_CONFIG: _CLUSTER_CHANGE,
    RequestCode.MOVE_CLOCK: _CLUSTER_CHANGE,
    RequestCode.WIPE_WRITE_PERM_OF_BROKER: _CLUSTER_CHANGE,
    RequestCode.ADD_WRITE_PERM_OF_BROKER: _CLUSTER_CHANGE,
    RequestCode.PUT_KV_CONFIG: _CLUSTER_CHANGE,
    RequestCode.DELETE_KV_CONFIG: _CLUSTER_CHANGE,
    RequestCode.DELETE_TOPIC_IN_NAMESRV: _CLUSTER_CHANGE,
    RequestCode.REGISTER_BROKER: _CLUSTER_CHANGE,
    RequestCode.UNREGISTER_BROKER: _CLUSTER_CHANGE,
    RequestCode.AUTH_CREATE_USER: _CLUSTER_CHANGE,
    RequestCode.AUTH_UPDATE_USER: _CLUSTER_CHANGE,
    RequestCode.AUTH_DELETE_USER: _CLUSTER_CHANGE,
    RequestCode.AUTH_CREATE_ACL: _CLUSTER_CHANGE,
    RequestCode.AUTH_UPDATE_ACL: _CLUSTER_CHANGE,
    RequestCode.AUTH_DELETE_ACL: _CLUSTER_CHANGE,
}
"""With ACL 2.0: the actions on the topic, on the group and on the cluster, one of which each request needs."""
USER_ACTIONS: Final = ("Pub", "Sub", "Create", "Update", "Delete", "Get", "List")

SECRET = f"{CANARY}-of-all"
NAMES: Final = {
    f"{role.name.lower()}-{topic}-{group}": (role, topic, group)
    for role in (NONE, LOOK, OPERATE)
    for topic in ("DENY", "PUB", "SUB", "PUB|SUB")
    for group in ("DENY", "PUB", "SUB", "PUB|SUB")
}
"""Accounts: one for each role and default permission of topics and groups."""
ACTIONS: Final = {"DENY": 0, "PUB": PUB, "SUB": SUB, "PUB|SUB": ANY}


def accounts() -> str:
    lines = ["accounts:"]
    for name, (role, topic, group) in NAMES.items():
        lines += [
            f"- accessKey: '{name}'",
            f"  secretKey: {SECRET}",
            f"  role: {role.name.lower()}",
            f"  defaultTopicPerm: {topic}",
            f"  defaultGroupPerm: {group}",
        ]
    lines += ["- accessKey: administrator", f"  secretKey: {SECRET}", "  admin: true"]
    lines += ["- accessKey: limited-administrator", f"  secretKey: {SECRET}", "  admin: true"]
    lines += ["  topicPerms: [Other=PUB]"]
    return "\n".join(lines)


@pytest_asyncio.fixture
async def broker(tmp_path: Path) -> AsyncIterator[UnboundBroker]:
    write_accounts(tmp_path, accounts())
    async with running(
        tmp_path / "store", "aclEnable=true", f"rocketmqHome={tmp_path}", "recallMessageEnable=true"
    ) as broker:
        yield broker


def signed(command: Command, name: str) -> Command:
    return signed_by(command, (name, SECRET))


@cache
def header_of(header_type: type[headers.Header]) -> headers.Header:
    """A header with a value in each field that has to be there, and in all that name topics and groups."""
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(header_type):
        if field.name == "topic":
            values[field.name] = "Topic"
        elif field.name in ("group", "consumer_group", "group_name", "compare_group", "dest_group"):
            values[field.name] = "Group"
        elif field.name == "topic_filter_type":
            values[field.name] = "SINGLE_TAG"
        elif field.required:
            values[field.name] = 0 if field.type not in (str, bool) else "x" if field.type is str else False
    return header_type(**values)


_QUEUE = {"brokerName": "broker-a", "queueId": 0, "topic": "Topic"}
BODIES: Final = {
    RequestCode.HEART_BEAT: {
        "clientID": "client",
        "producerDataSet": [{"groupName": "producers"}],
        "consumerDataSet": [{"groupName": "Group", "subscriptionDataSet": [{"topic": "Topic"}]}],
    },
    RequestCode.LOCK_BATCH_MQ: {"consumerGroup": "Group", "clientId": "client", "mqSet": [_QUEUE]},
    RequestCode.UNLOCK_BATCH_MQ: {"consumerGroup": "Group", "clientId": "client", "mqSet": [_QUEUE]},
}
BODIES_OF_USERS: Final = BODIES | {
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: {"groupName": "Group"},
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: {"groupConfigList": [{"groupName": "Group"}]},
    RequestCode.UPDATE_AND_CREATE_TOPIC_LIST: {"topicConfigList": [{"topicName": "Topic"}]},
}


def a_request(broker: UnboundBroker, code: RequestCode, bodies: Mapping[RequestCode, Any] = BODIES) -> Command:
    header_type: type[headers.Header] = broker.router._routes[code].decoder.header_type
    body = bodies.get(code)
    header = header_of(header_type) if header_type is not NoFields else None
    return request(code, header, fastjson.dumps(body) if body is not None else b"")


def is_refused(answer: Command) -> bool:
    remark = answer.remark or ""
    refused = "AclException" in remark
    assert not refused or answer.code == ResponseCode.SYSTEM_ERROR
    return refused


# --- the registry


async def test_every_handler_declares_its_permission(broker: UnboundBroker) -> None:
    declared = broker.router.permissions
    assert set(declared) == {*NEEDED, RequestCode.GET_ROUTEINFO_BY_TOPIC}
    assert [code for code, permission in declared.items() if permission.is_open] == [RequestCode.GET_ROUTEINFO_BY_TOPIC]
    for code, permission in declared.items():
        assert permission is OPEN or permission.role == NEEDED[RequestCode(code)][0], RequestCode(code).name
        assert str(permission)


async def test_rocketmqs_admin_codes_need_an_administrator(broker: UnboundBroker) -> None:
    declared = broker.router.permissions
    assert {code for code in ROCKETMQ_ADMIN_CODES if declared[code].role is not ADMINISTER} == set()


async def test_a_handler_without_a_permission_does_not_start(broker: UnboundBroker) -> None:
    with pytest.raises(TypeError, match="request code 9999 has no declared permission"):
        broker.router.add(9999, NoFields, lambda *_: None, lambda *_: None)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        broker.router.add(9999, NoFields, lambda *_: None)  # type: ignore[call-arg,arg-type]


def test_a_permission_says_what_it_is() -> None:
    assert str(OPEN) == "nothing"
    assert str(ACCOUNT) == "an account"
    assert str(Permission(LOOK, record="offset")) == "the role look, SUB for the topic of the record at offset"


# --- every code by every account


@pytest.mark.parametrize("code", NEEDED, ids=lambda code: code.name)
async def test_every_code_by_every_account(broker: UnboundBroker, code: RequestCode) -> None:
    peer = broker.connect()
    role, topic, group = NEEDED[code]
    wrong = []
    for name, (has_role, topic_text, group_text) in NAMES.items():
        allowed = (
            (has_role >= role or bool(ACTIONS[topic_text] & INSTEAD_OF_ROLE.get(code, 0)))
            and (topic is None or bool(ACTIONS[topic_text] & topic))
            and (group is None or bool(ACTIONS[group_text] & group))
        )
        answer = await peer.ask(signed(a_request(broker, code), name))
        if is_refused(answer) is allowed:
            wrong.append((name, answer.remark))
    assert wrong == []
    answer = await peer.ask(signed(a_request(broker, code), "administrator"))
    assert not is_refused(answer), answer.remark


NO_KEY: Final = "org.apache.rocketmq.acl.common.AclException: No accessKey is configured"


async def test_every_code_by_nobody(broker: UnboundBroker) -> None:
    """One broker for all codes: what it refuses changes nothing."""
    wrong = []
    for code in NEEDED:
        peer = broker.connect()
        answer = await peer.ask(a_request(broker, code))
        if not is_refused(answer) or answer.remark != NO_KEY:
            wrong.append((code.name, "not signed", answer.remark))
        answer = await peer.ask(signed_by(a_request(broker, code), ("administrator", SECRET + "x")))
        told = "Check signature failed for accessKey=administrator"
        if answer.remark is None or not answer.remark.endswith(told) or answer.body:
            wrong.append((code.name, "signed with another secret", answer.remark))
        if broker.router.connections != {peer.connection}:
            wrong.append((code.name, "connections", str(broker.router.connections)))
        peer.transport.close()
        while broker.router.connections:
            await asyncio.sleep(0)
    assert wrong == []


async def test_every_code_without_its_fields_tells_strangers_nothing(broker: UnboundBroker) -> None:
    peer = broker.connect()
    answers = {code: await peer.ask(request(code)) for code in NEEDED}
    assert {code.name: answer.remark for code, answer in answers.items() if answer.remark != NO_KEY} == {}


async def test_a_code_that_nobody_knows_tells_strangers_nothing(broker: UnboundBroker) -> None:
    peer = broker.connect()
    assert is_refused(await peer.ask(request(9999)))
    answer = await peer.ask(signed(request(9999), "none-DENY-DENY"))
    assert (answer.code, answer.remark) == (3, " request type 9999 not supported")


async def test_the_role_counts_before_the_fields(broker: UnboundBroker) -> None:
    answer = await broker.connect().ask(signed(request(RequestCode.UPDATE_AND_CREATE_TOPIC), "look-PUB-PUB"))
    assert answer.remark is not None
    assert answer.remark.endswith("Need admin permission for request code=17, but accessKey=look-PUB-PUB is not")


async def test_an_administrator_whose_permissions_are_listed_has_only_those(broker: UnboundBroker) -> None:
    peer, name = broker.connect(), "limited-administrator"
    assert is_refused(await peer.ask(signed(send("Topic"), name)))
    assert not is_refused(await peer.ask(signed(send("Other"), name)))
    assert is_refused(await peer.ask(signed(pull("Topic"), name)))
    assert not is_refused(await peer.ask(signed(request(RequestCode.GET_BROKER_CLUSTER_ACL_CONFIG), name)))


@pytest.mark.parametrize("name", ["none-PUB-DENY", "look-DENY-DENY", "administrator"])
async def test_accounts_without_a_role_see_the_settings_that_producers_need(broker: UnboundBroker, name: str) -> None:
    shown = bytes((await broker.connect().ask(signed(request(26), name))).body).decode()
    names = [line.partition("=")[0] for line in shown.splitlines()]
    assert ("storePathRootDir" in names) is (name != "none-PUB-DENY")
    if name == "none-PUB-DENY":
        assert names == ["maxMessageSize", "messageDelayLevel", "timerMaxDelaySec", "timerWheelEnable"]


# --- with ACL 2.0


def users_and_policies() -> MemoryStore:
    """A user for each action on each kind of resource, who may do everything with the other kinds; and one who may do
    everything with all, one who may do nothing, and a super user."""
    users, acls = [], []
    resources = ("Topic:Topic", "Group:Group", "Cluster:DefaultCluster")

    def add(name: str, actions: Mapping[str, str], user_type: int = 2) -> None:
        users.append({"username": name, "password": SECRET, "userType": user_type, "userStatus": 1, "subjectType": 1})
        entries = [
            {
                "resource": {"resourceType": kind, "resourceName": resource.partition(":")[2], "resourcePattern": 2},
                "actions": [("All", "", *USER_ACTIONS).index(actions[resource]) + 1],
                "decision": 1,
            }
            for kind, resource in zip((4, 5, 2), resources, strict=True)
            if resource in actions
        ]
        subject = {"subjectType": 1, "username": name}
        acls.append({"subject": subject, "policies": [{"policyType": 1, "entries": entries}]})

    everything = dict.fromkeys(resources, "All")
    add("everything", everything)
    add("nothing", {})
    add("super", {}, 1)
    for resource in resources:
        for action in USER_ACTIONS:
            add(f"{resource}-{action}", everything | {resource: action})
    return MemoryStore(msgspec.convert(users, list[User]), msgspec.convert(acls, list[Acl]))


@pytest_asyncio.fixture
async def with_users(tmp_path: Path) -> AsyncIterator[UnboundBroker]:
    settings = ("authenticationEnabled=true", "authorizationEnabled=true", "recallMessageEnable=true")
    store = users_and_policies()
    async with running(tmp_path / "store", *settings, open_auth_store=lambda _: store) as broker:
        yield broker


async def test_every_handler_is_in_the_table_of_users(with_users: UnboundBroker) -> None:
    assert set(with_users.router.permissions) == {*NEEDED_BY_USERS, RequestCode.GET_ROUTEINFO_BY_TOPIC}


@pytest.mark.parametrize("code", NEEDED_BY_USERS, ids=lambda code: code.name)
async def test_every_code_by_every_user(with_users: UnboundBroker, code: RequestCode) -> None:
    peer = with_users.connect()

    async def is_let_in(name: str | None) -> bool:
        command = a_request(with_users, code, BODIES_OF_USERS)
        command.ext.pop("username", None)  # which would end users of this test
        answer = await peer.ask(signed_by(command, (name, SECRET) if name is not None else None))
        remark = answer.remark or ""
        refused = "has no permission to access" in remark or remark == "username cannot be null."
        assert not refused or (answer.code, bytes(answer.body)) == (ResponseCode.NO_PERMISSION, b"")
        return not refused

    wrong = []
    needed = NEEDED_BY_USERS[code]
    for resource, actions in zip(("Topic:Topic", "Group:Group", "Cluster:DefaultCluster"), needed, strict=True):
        for action in USER_ACTIONS:
            if await is_let_in(f"{resource}-{action}") is (actions is not None and action not in actions.split()):
                wrong.append((resource, action))
    assert wrong == []
    assert await is_let_in("everything")
    assert await is_let_in("super")
    assert await is_let_in("nothing") is (needed == (None, None, None))
    assert not await is_let_in(None)


@pytest.mark.parametrize("action", USER_ACTIONS)
async def test_a_record_is_read_with_sub_or_get_for_its_topic(with_users: UnboundBroker, action: str) -> None:
    offset = with_users.store.log.end
    peer = with_users.connect()
    assert (await peer.ask(signed_by(send("Topic"), ("super", SECRET)))).code == ResponseCode.SUCCESS
    account = (f"Topic:Topic-{action}", SECRET)
    viewed = await peer.ask(signed_by(request(33, headers.ViewMessage(offset)), account))
    back = headers.ConsumerSendMsgBack(offset=offset, group="Group", delay_level=0)
    returned = await peer.ask(signed_by(request(36, back), account))
    is_refused = [(each.remark or "").endswith("no matched policies.") for each in (viewed, returned)]
    assert is_refused == [action not in ("Sub", "Get"), action != "Sub"]


# --- records


@pytest.fixture
def offsets() -> dict[str, int]:
    return {}


async def stored_at(broker: UnboundBroker, command: Command) -> int:
    """Send a message, and return its physical offset."""
    begin = broker.store.log.end
    answer = await broker.connect().ask(signed(command, "administrator"))
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return begin


@pytest.mark.parametrize("properties", [None, "DELAY\x013", "TIMER_DELAY_MS\x01600000"], ids=["now", "level", "timer"])
@pytest.mark.parametrize("name", ["look-PUB-SUB", "look-SUB-SUB"])
async def test_a_record_is_read_with_sub_for_its_topic(
    broker: UnboundBroker, properties: str | None, name: str
) -> None:
    offset = await stored_at(broker, send("Topic", properties=properties))
    peer = broker.connect()
    answer = await peer.ask(signed(request(33, headers.ViewMessage(offset)), name))
    assert is_refused(answer) is name.startswith("look-PUB")
    if is_refused(answer):
        assert answer.remark is not None
        assert answer.remark.endswith("No default permission for topic:Topic")
        assert not answer.body


@pytest.mark.parametrize("name", ["look-PUB-SUB", "look-SUB-SUB"])
async def test_a_record_is_sent_back_with_sub_for_its_topic(broker: UnboundBroker, name: str) -> None:
    """Otherwise a consumer could have any message put into its own retry topic, and read it there."""
    offset = await stored_at(broker, send("Topic"))
    end = broker.store.log.end
    header = headers.ConsumerSendMsgBack(offset=offset, group="Group", delay_level=0)
    answer = await broker.connect().ask(signed(request(36, header), name))
    assert is_refused(answer) is name.startswith("look-PUB")
    assert (broker.store.log.end == end) is is_refused(answer)
