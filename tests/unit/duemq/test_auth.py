"""The client of users and policies: each request goes to all brokers, as RocketMQ's tools write it, and is signed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from click.testing import CliRunner

from duemq import cli
from duemq.auth import AuthAdmin
from duemq.errors import AccessDeniedError, ArgumentError, ClosedError, NotSupportedError
from duemq.protocol.codes import RequestCode
from duemq.protocol.frames.command import Command
from duemq.protocol.requests import bodies
from duemq.protocol.requests.bodies import BrokerData
from tests.support.access import signature
from tests.unit.duemq.conftest import INTERVALS
from tests.unit.duemq.fake import FakeBroker, failure

KEYS = ("root", "canary-secret-of-root")
CHANGES = [code for code in RequestCode if code.name.startswith("AUTH_") and "GET" not in code.name]


@pytest.fixture
async def brokers() -> AsyncIterator[list[FakeBroker]]:
    """Two brokers of one name server; both say yes to every change."""
    async with FakeBroker(name="broker-a") as first, FakeBroker(name="broker-b") as second:
        both = [first, second]
        data = [BrokerData({0: each.address}, each.name, "DefaultCluster") for each in both]
        known = bodies.cluster_info(data, {"DefaultCluster": [each.name for each in both]})
        first.on(RequestCode.GET_BROKER_CLUSTER_INFO, Command(code=0, body=known))
        for broker in both:
            for code in CHANGES:
                broker.on(code, Command(code=0))
        yield both


def admin_of(brokers: list[FakeBroker]) -> AuthAdmin:
    return AuthAdmin(brokers[0].address, access_key=KEYS[0], secret_key=KEYS[1], _intervals=INTERVALS)


async def test_changes_go_to_all_brokers(brokers: list[FakeBroker]) -> None:
    async with admin_of(brokers) as admin:
        await admin.create_user("orders", "canary-secret-1", "Super")
        await admin.update_user("orders", is_enabled=False)
        await admin.set_policy("orders", ["Topic:a", "Group:*"], ["Pub", "Sub"], source_ips=["10.0.0.1"])
        await admin.set_policy("orders", ["*"], ["All"], decision="Deny", policy_type="Default")
        await admin.delete_policy("orders", "Topic:a")
        await admin.delete_policy("orders")
        await admin.delete_user("orders")
    entries = [
        {"actions": ["Pub", "Sub"], "decision": "Allow", "resource": resource, "sourceIps": ["10.0.0.1"]}
        for resource in ("Topic:a", "Group:*")
    ]
    denied = [{"actions": ["All"], "decision": "Deny", "resource": "*"}]
    subject = "User:orders"
    for broker in brokers:
        received = [each for each in broker.requests if each.code in CHANGES]
        assert [(each.code, json.loads(each.body or b"null")) for each in received] == [
            (3001, {"username": "orders", "password": "canary-secret-1", "userType": "Super"}),
            (3002, {"username": "orders", "userStatus": "disable"}),
            (3007, {"subject": subject, "policies": [{"policyType": "Custom", "entries": entries}]}),
            (3007, {"subject": subject, "policies": [{"policyType": "Default", "entries": denied}]}),
            (3008, None),
            (3008, None),
            (3003, None),
        ]
        for each in received:
            assert each.ext["Signature"] == signature(each.ext, each.body, KEYS[1])
        fields = [{name: each.ext.get(name) for name in ("username", "subject", "resource")} for each in received]
        assert fields[0] == fields[6] == {"username": "orders", "subject": None, "resource": None}
        assert fields[4] == {"username": None, "subject": subject, "resource": "Topic:a"}
        assert fields[5] == {"username": None, "subject": subject, "resource": None}


async def test_an_error_of_one_broker_is_told(brokers: list[FakeBroker]) -> None:
    denied = "User:root has no permission to access Cluster:DefaultCluster from 127.0.0.1, no matched policies."
    brokers[1].on(RequestCode.AUTH_CREATE_USER, failure(16, denied))
    brokers[1].on(RequestCode.AUTH_LIST_ACL, failure(3, "request type 3010 not supported"))
    async with admin_of(brokers) as admin:
        with pytest.raises(AccessDeniedError, match=brokers[1].address):
            await admin.create_user("orders", "x")
        with pytest.raises(NotSupportedError):
            await admin.policies()
        with pytest.raises(ArgumentError, match="must not be blank"):
            await admin.delete_user(" ")
    with pytest.raises(ClosedError):
        await admin.users()


async def test_what_brokers_have_in_different_ways_is_shown_for_each(brokers: list[FakeBroker]) -> None:
    def users(*status: str) -> Command:
        found = [{"username": f"u{n}", "userType": "Normal", "userStatus": each} for n, each in enumerate(status)]
        return Command(code=0, body=json.dumps(found).encode())

    brokers[0].on(RequestCode.AUTH_LIST_USER, users("enable", "enable"))
    brokers[1].on(RequestCode.AUTH_LIST_USER, users("enable", "disable"))
    acl = {
        "subject": "User:u1",
        "policies": [{"policyType": "Custom", "entries": [{"actions": ["Pub"], "decision": "Allow", "resource": "*"}]}],
    }
    brokers[0].on(RequestCode.AUTH_LIST_ACL, Command(code=0, body=json.dumps([acl]).encode()))
    brokers[1].on(RequestCode.AUTH_LIST_ACL, Command(code=0))

    async def shown(*arguments: str) -> list[str]:
        command = [*arguments, "--nameserver", brokers[0].address]
        result = await asyncio.to_thread(CliRunner().invoke, cli.main, command)
        assert result.exit_code == 0, result.output
        return result.output.splitlines()

    first, second = (broker.address for broker in brokers)
    assert await shown("user", "list") == [
        "u0  Normal",
        f"u1  Normal  at {first}",
        f"u1  Normal  disabled  at {second}",
    ]
    assert await shown("acl", "list") == [f"u1  Allow  *  Pub  at {first}"]
    assert await shown("acl", "list", "u") == []


async def test_it_belongs_to_its_event_loop(brokers: list[FakeBroker]) -> None:
    async with admin_of(brokers) as admin:
        with pytest.raises(ArgumentError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, admin.users())
        with pytest.raises(ArgumentError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, admin.__aexit__(None, None, None))
        assert set(await admin.policies()) == {each.address for each in brokers}


@pytest.mark.parametrize(
    ("method", "arguments", "told"),
    [
        ("create_user", {"name": 5, "password": "x"}, "name is of type int: give a str"),
        ("create_user", {"name": "u", "password": b"canary-secret-1"}, "password is of type bytes: give a str"),
        ("create_user", {"name": "u", "password": None}, "password is of type NoneType: give a str"),
        ("create_user", {"name": "u", "password": "canary-secret-1\ud800"}, "password contains '\\ud800', half of"),
        ("create_user", {"name": "u", "password": "x", "user_type": 1}, "user_type is of type int"),
        ("update_user", {"name": "u", "password": 5}, "password is of type int"),
        ("update_user", {"name": "u", "user_type": 5}, "user_type is of type int"),
        ("update_user", {"name": "u", "is_enabled": "no"}, "is_enabled='no': give True or False"),
        ("delete_user", {"name": None}, "name is of type NoneType"),
        ("policies", {"name": 5}, "name is of type int"),
        ("set_policy", {"resources": "Topic:a"}, "resources='Topic:a': give a list of str"),
        ("set_policy", {"resources": [5]}, "an element of resources is of type int"),
        ("set_policy", {"actions": "Pub"}, "actions='Pub': give a list of str"),
        ("set_policy", {"source_ips": "10.0.0.1"}, "source_ips='10.0.0.1': give a list of str"),
        ("set_policy", {"source_ips": None}, "source_ips=None: give a list of str"),
        ("set_policy", {"decision": True}, "decision is of type bool"),
        ("set_policy", {"policy_type": 5}, "policy_type is of type int"),
        ("delete_policy", {"name": "u", "resource": 5}, "resource is of type int"),
        ("delete_policy", {"name": "u", "policy_type": None}, "policy_type is of type NoneType"),
    ],
)
async def test_arguments_of_a_wrong_type_are_refused(
    brokers: list[FakeBroker], method: str, arguments: dict[str, Any], told: str
) -> None:
    if method == "set_policy":
        arguments = {"name": "u", "resources": ["*"], "actions": ["All"], **arguments}
    async with admin_of(brokers) as admin:
        with pytest.raises(ArgumentError) as caught:
            await getattr(admin, method)(**arguments)
    assert str(caught.value).startswith(told)
    assert "canary" not in str(caught.value)
    assert not [each for each in brokers[1].requests if each.code in CHANGES]


def test_a_timeout_is_a_time() -> None:
    with pytest.raises(ArgumentError, match="timeout=0"):
        AuthAdmin(timeout=0)
