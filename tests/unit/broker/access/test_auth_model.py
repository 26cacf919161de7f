"""Users and policies as values: what is stored is what RocketMQ stores, any body is read or refused, and decisions are
those of a slow reading of the rules."""

from __future__ import annotations

import ipaddress
import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from duemq.broker.access.auth.model import (
    Acl,
    Action,
    Decision,
    Named,
    Resource,
    ResourceType,
    User,
    acl_info,
    read_policies,
)
from duemq.broker.access.auth.rules import PreparedPolicies, bits
from duemq.broker.errors import Refused
from duemq.protocol.codes import ResponseCode
from duemq.protocol.errors import BodyFormatError
from duemq.protocol.requests import bodies
from duemq.protocol.requests.auth_bodies import AclInfo, UserInfo
from tests.support.access import signed
from tests.support.auth import ON, SUPER, MemoryStore, ask
from tests.support.broker import running
from tests.support.wire import request

USER_BYTES = b'{"password":"changed1","subjectType":1,"userStatus":1,"userType":2,"username":"app"}'
ACL_BYTES = (
    b'{"policies":[{"entries":[{"actions":[3,4],"decision":1,"environment":{},"resource":{"resourceName":"T",'
    b'"resourcePattern":2,"resourceType":4}},{"actions":[4],"decision":1,"environment":{"sourceIps":["127.0.0.1",'
    b'"10.0.0.0/8"]},"resource":{"resourceName":"G","resourcePattern":3,"resourceType":5}},{"actions":[9],"decision":1,'
    b'"environment":{},"resource":{"resourcePattern":1,"resourceType":1}},{"actions":[1],"decision":2,"resource":'
    b'{"resourcePattern":1,"resourceType":4}}],"policyType":1}],"subject":{"subjectType":1,"username":"app"}}'
)
"""What 5.3.3 wrote: by request, and, without an environment, by its migration."""

RESOURCES = (
    "*",
    "Topic:*",
    "Topic:a",
    "Topic:ab",
    "Topic:a*",
    "Topic:ab*",
    "Group:*",
    "Group:a",
    "Cluster:a",
    "Topic:b*",
)
SOURCES = (None, ["10.0.0.1"], ["10.0.0.0/24", "192.168.0.0/16"], ["::1"], ["10.0.1.0/24"])
ENTRY = st.fixed_dictionaries(
    {
        "resource": st.sampled_from(RESOURCES),
        "actions": st.lists(st.sampled_from(["All", "Pub", "Sub", "Get"]), min_size=1, max_size=2),
        "decision": st.sampled_from(["Allow", "Deny"]),
        "sourceIps": st.sampled_from(SOURCES),
    }
)


def acl_of(entries: list[dict[str, Any]], defaults: list[dict[str, Any]]) -> Acl:
    policies = [
        {"policyType": kind, "entries": found} for kind, found in (("Custom", entries), ("Default", defaults)) if found
    ]
    if not policies:
        return Acl(subject=Named(username="u"))
    return Acl(
        policies=tuple(read_policies(msgspec.convert({"policies": policies}, AclInfo))), subject=Named(username="u")
    )


def decided(
    entries: list[dict[str, Any]], defaults: list[dict[str, Any]], kind: str, name: str, actions: set[str], host: str
) -> str | None:
    """The decision by the words of the documentation, over the entries as a request has them."""
    for policy in (entries, defaults):
        found = []
        for entry in policy:
            resource = entry["resource"]
            named = resource.partition(":")[2]
            is_about = resource in ("*", f"{kind}:*", f"{kind}:{name}") or (
                resource.startswith(f"{kind}:") and named.endswith("*") and name.startswith(named[:-1])
            )
            is_from = not entry["sourceIps"] or any(
                ipaddress.ip_address(host) in ipaddress.ip_network(source) for source in entry["sourceIps"]
            )
            if is_about and is_from and (actions & set(entry["actions"]) or "All" in entry["actions"]):
                found.append(entry)

        def is_better(one: dict[str, Any], other: dict[str, Any]) -> bool:
            return rank(one) < rank(other)

        def rank(entry: dict[str, Any]) -> tuple[int, int, str]:
            resource = entry["resource"]
            if resource == "*":
                return 3, 0, entry["decision"] != "Deny"
            if resource.endswith(":*"):
                return 2, 0, entry["decision"] != "Deny"
            if resource.endswith("*"):
                return 1, -len(resource), entry["decision"] != "Deny"
            return 0, 0, entry["decision"] != "Deny"

        best = None
        for entry in found:
            if best is None or is_better(entry, best):
                best = entry
        if best is not None:
            return str(best["decision"])
    return None


def _plain(resource: str, decision: str) -> dict[str, Any]:
    return {"resource": resource, "actions": ["Pub"], "decision": decision, "sourceIps": None}


@example([_plain("Topic:a*", "Deny"), _plain("Topic:ab*", "Allow")], [], "Topic", "abc", {"Pub"}, "::1")
@example([_plain("Topic:ab", "Deny"), _plain("Topic:a*", "Allow")], [], "Topic", "ab", {"Pub"}, "::1")
@example([_plain("Topic:*", "Deny"), _plain("*", "Allow")], [], "Topic", "ab", {"Pub"}, "::1")
@example([_plain("Topic:*", "Deny"), _plain("Topic:a*", "Allow")], [], "Topic", "ab", {"Pub"}, "::1")
@given(
    st.lists(ENTRY, max_size=6),
    st.lists(ENTRY, max_size=3),
    st.sampled_from(["Topic", "Group", "Cluster"]),
    st.sampled_from(["a", "ab", "abc", "b", ""]),
    st.sets(st.sampled_from(["Pub", "Sub", "Get"]), min_size=1),
    st.sampled_from(["10.0.0.1", "10.0.1.9", "192.168.7.7", "::1"]),
)
def test_decisions_are_those_of_the_words(
    entries: list[dict[str, Any]],
    defaults: list[dict[str, Any]],
    kind: str,
    name: str,
    actions: set[str],
    host: str,
) -> None:
    rules = PreparedPolicies(acl_of(entries, defaults))
    wanted = bits(Action[action.upper()] for action in actions)
    decision = rules.decide(ResourceType[kind.upper()], name, wanted, host)
    expected = decided(entries, defaults, kind, name, actions, host)
    assert (decision.name.capitalize() if decision is not None else None) == expected


def test_the_bytes_are_rocketmqs() -> None:
    assert msgspec.json.encode(msgspec.json.decode(USER_BYTES, type=User)) == USER_BYTES
    assert msgspec.json.encode(msgspec.json.decode(ACL_BYTES, type=Acl)) == ACL_BYTES


@given(st.lists(ENTRY, min_size=1, max_size=5))
def test_what_is_read_is_told_again(entries: list[dict[str, Any]]) -> None:
    acl = acl_of(entries, [])
    assert msgspec.json.decode(msgspec.json.encode(acl), type=Acl) == acl
    told = acl_info(acl)
    assert tuple(read_policies(told)) == acl.policies


def test_entries_of_a_store_with_a_host_name_allow_nothing_and_deny_everywhere() -> None:
    """RocketMQ takes a name for a network, and looks for its address at each request."""
    for decision, expected in ((1, None), (2, Decision.DENY)):
        text = ACL_BYTES.replace(b"10.0.0.0/8", b"localhost/8").replace(b'"decision":1', b'"decision":%d' % decision)
        rules = PreparedPolicies(msgspec.json.decode(text, type=Acl))
        assert rules.decide(ResourceType.GROUP, "G1", bits([Action.SUB]), "10.0.0.1") is expected
        assert rules.decide(ResourceType.GROUP, "G1", bits([Action.SUB]), "127.0.0.1") is Decision(decision)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=8)
    | st.sampled_from([*RESOURCES, "User:u", "Pub", "Allow"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["policies", "entries", "resource", "actions", "decision", "sourceIps", "policyType", "subject"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_any_body_is_read_or_refused(body: Any) -> None:
    data = json.dumps(body).encode()
    with suppress(BodyFormatError):
        bodies.decode_request(data, UserInfo)
    with suppress(BodyFormatError, Refused):
        info = bodies.decode_request(data, AclInfo)
        for policy in read_policies(info):
            assert policy.entries
            assert all(entry.actions for entry in policy.entries)


@given(st.text(max_size=20) | st.sampled_from(RESOURCES))
def test_a_resource_is_told_as_it_was_read(key: str) -> None:
    with suppress(Refused):
        resource = Resource.parse(key)
        assert resource.key.lower() == key.lower()
        assert Resource.parse(resource.key) == resource


@pytest.mark.parametrize(
    "key", ["", "Topic", ":", "Any:", "Any:x", "Topic:a*b", "Topic:**", "Topic:" + "x" * 300, "None:x"]
)
def test_what_would_be_misunderstood_is_no_resource(key: str) -> None:
    if key == "Topic":
        assert Resource.parse(key).resource_name == ""  # it is about none
        return
    with pytest.raises(Refused):
        Resource.parse(key)


async def test_nonsense_is_answered_and_harms_nothing(tmp_path: Path, logged: list[Any]) -> None:
    """Every code with fields and bodies of all sorts, by a super user and by nobody."""
    luck = random.Random(7)
    texts = [None, "", " ", "*", "User:root", "User:", "x" * 300, "\x00", "ü:*", "Custom", "root", "Topic:*", "\ud7ff"]
    values: list[Any] = [None, "", 1, -1, [], {}, [None], ["Pub"], "Super", "enable", "Topic:a", [{}], True, "x" * 300]
    names = ["username", "filter", "subject", "policyType", "resource", "subjectFilter", "resourceFilter", "other"]
    keys = ["username", "password", "userType", "userStatus", "policies", "entries", "subject"]

    def body() -> bytes:
        kind = luck.randrange(4)
        if kind == 0:
            return luck.randbytes(luck.randrange(40))
        fields = {luck.choice(keys): luck.choice(values) for _ in range(luck.randrange(4))}
        if kind == 1:
            entry = {
                luck.choice(["resource", "actions", "decision", "sourceIps"]): luck.choice(values) for _ in range(4)
            }
            fields["policies"] = [{"policyType": luck.choice(values), "entries": [entry]}]
        return json.dumps(fields).encode()

    async with running(tmp_path, *ON, open_auth_store=lambda _: MemoryStore()) as broker:
        peer = broker.connect()
        for number in range(800):
            command = request(luck.randrange(3001, 3011), None, body())
            command.ext = {name: text for name in names if (text := luck.choice(texts)) is not None}
            if command.code in (3002, 3003) and command.ext.get("username") == SUPER[0]:
                continue
            answer = await peer.ask(signed(command, SUPER if number % 4 else None))
            assert (answer.code == ResponseCode.NO_PERMISSION) or number % 4
        assert (await peer.ask(signed(ask(3005), SUPER))).code == 0
        assert {line["event"] for line in logged} <= {
            "users_read",
            "users_made",
            "store_opened",
            "listening",
            "access_refused",
            "request_refused",
            "user_created",
            "user_changed",
            "user_deleted",
            "policies_changed",
            "policies_deleted",
        }
