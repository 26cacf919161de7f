"""The audit log: every request that changes something has an entry, whatever its result; entries have no secrets; files
change by size; nothing is changed that cannot be recorded."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from duemq.broker.access.permission import Role
from duemq.broker.audit import log as audit_log
from duemq.broker.audit.recorder import MAX_REFUSAL_BYTES_A_MINUTE, MAX_REFUSALS_A_SECOND, is_recorded
from duemq.broker.workers import Background
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames import fastjson
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import CODECS
from duemq.protocol.requests import headers
from duemq.protocol.requests.bodies import SubscriptionGroupConfig
from tests.support.access import ADMIN, USER, signed, write_accounts
from tests.support.broker import Peer, UnboundBroker, running
from tests.support.canary import CANARY
from tests.support.loop import turns
from tests.support.wire import request, send
from tests.unit.broker.names.test_nameserver import registration
from tests.unit.broker.tables.test_clients import heartbeat, subscription
from tests.unit.broker.tables.test_topics import create

CHANGES = {
    RequestCode.UPDATE_AND_CREATE_TOPIC,
    RequestCode.UPDATE_AND_CREATE_TOPIC_LIST,
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST,
    RequestCode.CLONE_GROUP_OFFSET,
    RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE,
    RequestCode.DELETE_EXPIRED_COMMITLOG,
    RequestCode.CLEAN_UNUSED_TOPIC,
    RequestCode.UPDATE_NAMESRV_CONFIG,
    RequestCode.DELETE_TOPIC_IN_BROKER,
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
    RequestCode.DELETE_SUBSCRIPTIONGROUP,
    RequestCode.UPDATE_BROKER_CONFIG,
    RequestCode.UPDATE_AND_CREATE_ACL_CONFIG,
    RequestCode.DELETE_ACL_CONFIG,
    RequestCode.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG,
    RequestCode.GET_BROKER_CLUSTER_ACL_CONFIG,
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
    RequestCode.CONSUME_MESSAGE_DIRECTLY,
    RequestCode.RECALL_MESSAGE,
    RequestCode.CHANGE_RECURRING,
    RequestCode.CHANGE_BY_HANDLE,
    RequestCode.CANCEL_MESSAGE,
    RequestCode.CHANGE_PENDING,
    RequestCode.MOVE_CLOCK,
    RequestCode.WIPE_WRITE_PERM_OF_BROKER,
    RequestCode.ADD_WRITE_PERM_OF_BROKER,
    RequestCode.PUT_KV_CONFIG,
    RequestCode.DELETE_KV_CONFIG,
    RequestCode.DELETE_TOPIC_IN_NAMESRV,
    RequestCode.REGISTER_BROKER,
    RequestCode.UNREGISTER_BROKER,
}
"""What is recorded: what changes something, and the request that shows secret keys."""


@pytest.fixture
async def secured(tmp_path: Path) -> AsyncIterator[UnboundBroker]:
    write_accounts(tmp_path)
    settings = ("aclEnable=true", f"rocketmqHome={tmp_path}", "testClock=true")
    async with running(tmp_path / "store", *settings) as broker:
        yield broker


async def entries(broker: UnboundBroker) -> list[dict[str, Any]]:
    """Return the entries so far."""
    assert broker.running.audit is not None
    while broker.running.audit.log._lines:
        broker.running.audit.log.write()
        await asyncio.sleep(0)
    path = Path(broker.config.audit_path)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def test_what_is_recorded(secured: UnboundBroker) -> None:
    permissions = secured.router.permissions
    recorded = {code for code, permission in permissions.items() if is_recorded(code, permission)}
    others = {code for code in permissions if 3000 <= code < 3100}  # those of ACL 2.0
    assert recorded - others == CHANGES
    assert all(
        permissions[code].role >= Role.OPERATE
        for code in recorded - {RequestCode.RECALL_MESSAGE, RequestCode.CHANGE_RECURRING, RequestCode.CHANGE_BY_HANDLE}
    )


@pytest.mark.parametrize("codec", CODECS)
async def test_an_entry_says_who_did_what_when_from_where_and_with_which_result(
    secured: UnboundBroker, codec: int
) -> None:
    peer = secured.connect(("10.0.0.5", 4000))
    assert (await peer.ask(signed(create("orders", 4), ADMIN), codec)).code == 0
    (entry,) = await entries(secured)
    fields = entry.pop("fields")
    assert entry == {
        "time": entry["time"],
        "action": "UPDATE_AND_CREATE_TOPIC",
        "code": 17,
        "account": ADMIN[0],
        "peer": "10.0.0.5:4000",
        "topic": "orders",
        "result": 0,
    }
    assert fields["write_queue_nums"] == 4
    now = secured.clock.now_ms()
    assert entry["time"].endswith("Z")
    assert abs(audit_ms(entry["time"]) - now) < 1000


def audit_ms(text: str) -> int:
    return round(datetime.datetime.fromisoformat(text).timestamp() * 1000)


async def test_refusals_are_recorded_too(secured: UnboundBroker) -> None:
    peer = secured.connect()
    await peer.ask(signed(create("orders", 4), USER))
    await peer.ask(signed(create("orders", 4), (ADMIN[0], "wrong-secret-key")))
    await peer.ask(create("orders", 4))
    await peer.ask(signed(create("orders", 10**6), ADMIN))
    found = await entries(secured)
    assert [entry["account"] for entry in found] == [USER[0], ADMIN[0], None, ADMIN[0]]
    assert {entry["result"] for entry in found} == {ResponseCode.SYSTEM_ERROR}
    assert "Check signature failed" in found[1]["remark"]
    assert "maxQueuesPerTopic" in found[3]["remark"]


async def test_refusals_of_strangers_do_not_push_others_out(secured: UnboundBroker) -> None:
    peer = secured.connect()
    for _ in range(MAX_REFUSALS_A_SECOND + 30):
        await peer.ask(create("orders", 4))
    secured.clock.advance(1000)
    assert (await peer.ask(signed(create("orders", 4), ADMIN))).code == 0
    await peer.ask(create("orders", 4))
    found = await entries(secured)
    assert [entry["action"] for entry in found].count("UPDATE_AND_CREATE_TOPIC") == MAX_REFUSALS_A_SECOND + 2
    assert [entry["count"] for entry in found if entry["action"] == "refusals_left_out"] == [30]


@pytest.mark.parametrize("account", [None, (ADMIN[0], "wrong-secret-key")])
async def test_refusals_of_strangers_take_few_bytes_a_minute(
    secured: UnboundBroker, account: tuple[str, str] | None
) -> None:
    """Whoever has no account chooses nothing that an entry has, and cannot fill the files within weeks: a field of 256
    characters takes 1536 bytes as JSON."""
    peer, odd = secured.connect(), "\1" * 256
    command = headers.CreateAccessConfig(odd, odd, white_remote_address=odd)
    for _ in range(80):
        for _ in range(MAX_REFUSALS_A_SECOND):
            refused = request(RequestCode.UPDATE_AND_CREATE_ACL_CONFIG, command, b"\1" * 1000)
            await peer.ask(refused if account is None else signed(refused, account))
        secured.clock.advance(1000)
    found = await entries(secured)
    lines = Path(secured.config.audit_path).read_bytes().splitlines(keepends=True)
    assert max(map(len, lines)) < 400
    assert sum(map(len, lines)) < 3 * MAX_REFUSAL_BYTES_A_MINUTE  # 80 s touch two or three minutes
    refusals = [entry for entry in found if entry["action"] != "refusals_left_out"]
    assert {frozenset(entry) for entry in refusals} == {
        frozenset(("time", "action", "code", "account", "peer", "result", "remark"))
    }
    assert len(refusals) + sum(entry.get("count", 0) for entry in found) <= 80 * MAX_REFUSALS_A_SECOND


async def test_refusals_of_accounts_do_not_wait_for_those_of_strangers(secured: UnboundBroker) -> None:
    peer = secured.connect()
    for _ in range(MAX_REFUSALS_A_SECOND + 1):
        await peer.ask(create("orders", 4))
    await peer.ask(signed(create("orders", 4), USER))
    assert (await entries(secured))[-1]["account"] == USER[0]


async def test_a_name_that_is_no_account_is_not_recorded(secured: UnboundBroker) -> None:
    """It may be a secret key that was put into the wrong place."""
    peer = secured.connect(("127.0.0.2", 1))  # which needs no account
    await peer.ask(signed(create("orders", 4), (f"{CANARY}-misplaced", "x")))
    await secured.connect().ask(signed(create("orders", 4), (f"{CANARY}-misplaced", "x")))
    found = await entries(secured)
    assert [(entry["account"], entry["result"]) for entry in found] == [(None, 0), (None, 1)]
    assert CANARY not in Path(secured.config.audit_path).read_text()


async def test_each_kind_of_change_has_an_entry(secured: UnboundBroker) -> None:
    peer = secured.connect()
    group = fastjson.dumps(SubscriptionGroupConfig("readers"))
    changes: list[Command] = [
        request(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=group),
        request(
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST,
            body=fastjson.dumps({"groupConfigList": [{"groupName": "g1"}, {"groupName": "g2"}]}),
        ),
        request(
            RequestCode.UPDATE_AND_CREATE_TOPIC_LIST,
            body=fastjson.dumps({"topicConfigList": [{"topicName": f"t{number}"} for number in range(101)]}),
        ),
        request(RequestCode.DELETE_SUBSCRIPTIONGROUP, headers.DeleteSubscriptionGroup("readers")),
        request(RequestCode.UPDATE_BROKER_CONFIG, body=b"fileReservedTime=48\ntls.server.keyPassword=canary-secret-x"),
        request(RequestCode.WIPE_WRITE_PERM_OF_BROKER, headers.BrokerName("broker-a")),
        request(RequestCode.ADD_WRITE_PERM_OF_BROKER, headers.BrokerName("broker-a")),
        request(RequestCode.PUT_KV_CONFIG, headers.KVEntry("n", "k", "canary-secret-value")),
        request(RequestCode.DELETE_KV_CONFIG, headers.KVKey("n", "k")),
        request(RequestCode.CHANGE_PENDING, headers.ChangePending("cancel", topic="T")),
        request(RequestCode.CANCEL_MESSAGE, headers.CancelMessage("7F00000100002A9F0000000000000000")),
        request(
            RequestCode.CHANGE_BY_HANDLE, headers.ChangeByHandle("cancel", "T", "7F00000100002A9F0000000000000000", "K")
        ),
        request(RequestCode.RECALL_MESSAGE, headers.RecallMessage("T", "handle")),
        request(RequestCode.CHANGE_RECURRING, headers.ChangeRecurring("T", "name", "pause")),
        request(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, headers.ResetOffset("T", "readers", 0)),
        request(RequestCode.MOVE_CLOCK, headers.MoveClock(1000)),
        request(RequestCode.DELETE_TOPIC_IN_BROKER, headers.TopicName("T")),
        request(
            RequestCode.UPDATE_AND_CREATE_ACL_CONFIG,
            headers.CreateAccessConfig("new-account", "canary-secret-new", topic_perms="T=PUB"),
        ),
        request(RequestCode.DELETE_ACL_CONFIG, headers.DeleteAccessConfig("new-account")),
        registration("other", address="10.0.0.9:10911"),
    ]
    for command in changes:
        await peer.ask(signed(command, ADMIN))
    found = await entries(secured)
    assert [entry["code"] for entry in found] == [command.code for command in changes]
    by_code = {entry["code"]: entry for entry in found}
    assert by_code[RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP]["group"] == "readers"
    assert by_code[RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST]["groups"] == ["g1", "g2"]
    assert by_code[RequestCode.UPDATE_AND_CREATE_TOPIC_LIST]["topics"] == [f"t{number}" for number in range(100)]
    assert by_code[RequestCode.DELETE_SUBSCRIPTIONGROUP]["group"] == "readers"
    assert by_code[RequestCode.UPDATE_BROKER_CONFIG]["settings"] == {
        "fileReservedTime": "48",
        "tls.server.keyPassword": "...",
    }
    assert by_code[RequestCode.PUT_KV_CONFIG]["fields"] == {"namespace": "n", "key": "k"}
    assert by_code[RequestCode.UPDATE_AND_CREATE_ACL_CONFIG]["fields"]["topic_perms"] == "T=PUB"
    assert CANARY not in json.dumps(found)


async def test_topics_and_groups_that_clients_create_are_recorded(broker: UnboundBroker) -> None:
    peer = broker.connect(("10.0.0.5", 4000))
    assert (await peer.ask(send("orders"))).code == 0
    assert (await peer.ask(send("orders"))).code == 0
    assert (await peer.ask(heartbeat("client", "consumers", subscriptions=[subscription("orders")]))).code == 0
    found = await entries(broker)
    assert [(entry["action"], entry.get("topic") or entry.get("group"), entry["peer"]) for entry in found] == [
        ("topic_created", "orders", "10.0.0.5:4000"),
        ("group_created", "consumers", "10.0.0.5:4000"),
        ("topic_created", "%RETRY%consumers", "10.0.0.5:4000"),
    ]


async def test_a_registration_is_recorded_when_it_changes_something(broker: UnboundBroker) -> None:
    peer, other = broker.connect(("10.0.0.9", 1)), broker.connect(("10.0.0.9", 2))
    for each in (peer, peer, other, peer):
        assert (await each.ask(registration("other", address="10.0.0.9:10911"))).code == 0
    stranger = broker.connect(("10.0.0.66", 1))
    assert (await stranger.ask(registration("other", address="10.0.0.9:10911"))).code == 0
    found = await entries(broker)
    assert [entry["peer"] for entry in found] == ["10.0.0.9:1", "10.0.0.66:1"]
    assert found[0]["fields"]["broker_name"] == "other"


# --- files


async def test_files_change_by_size_and_the_oldest_goes(tmp_path: Path) -> None:
    async with running(tmp_path, "auditLogFileSize=4096", "auditLogFileNumber=3") as broker:
        peer = broker.connect()
        for number in range(200):
            assert (await peer.ask(create(f"topic{number}", 1))).code == 0
            await entries(broker)
        directory = tmp_path / "audit"
        assert sorted(path.name for path in directory.iterdir()) == ["audit.log", "audit.log.1", "audit.log.2"]
        assert all(4096 <= path.stat().st_size < 5000 for path in directory.iterdir() if path.suffix != ".log")
        numbers = [
            int(json.loads(line)["topic"].removeprefix("topic"))
            for name in ("audit.log.2", "audit.log.1", "audit.log")
            for line in (directory / name).read_text().splitlines()
        ]
        assert numbers == list(range(numbers[0], 200))
        (answer,) = [await peer.ask(request(RequestCode.UPDATE_BROKER_CONFIG, body=b"auditLogFileNumber=1"))]
        assert answer.code == 0
        for number in range(30):
            await peer.ask(create(f"topic{number}", 1))
            await entries(broker)
        assert [path.name for path in directory.iterdir()] == ["audit.log"]


async def test_only_the_brokers_user_may_read_the_files(broker: UnboundBroker, peer: Peer) -> None:
    await peer.ask(create("orders", 1))
    await entries(broker)
    path = Path(broker.config.audit_path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


async def test_the_log_may_be_elsewhere_or_not_at_all(tmp_path: Path) -> None:
    async with running(tmp_path / "a", f"auditLogPath={tmp_path}/log/who.jsonl") as broker:
        assert (await broker.connect().ask(create("orders", 1))).code == 0
        assert len(await entries(broker)) == 1
    assert (tmp_path / "log" / "who.jsonl").exists()
    async with running(tmp_path / "b", "auditLogEnable=false") as broker:
        assert (await broker.connect().ask(create("orders", 1))).code == 0
    assert not (tmp_path / "b" / "audit").exists()


async def test_a_stop_writes_what_waits(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        peer = broker.connect()
        assert (await peer.ask(create("orders", 1))).code == 0
        broker.lanes.hold(Background.TABLES)
        peer.post(*(request(RequestCode.DELETE_KV_CONFIG, headers.KVKey("n", "k")) for _ in range(3)))
        await turns()
    text = (tmp_path / "audit" / "audit.log").read_text()
    assert text.count("\n") == 4


async def test_a_disk_that_is_full_loses_no_entry_and_later_no_change_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: Any
) -> None:
    monkeypatch.setattr(audit_log, "MAX_KEPT", 5)
    async with running(tmp_path) as broker:
        peer = broker.connect()
        (tmp_path / "audit").write_text("a file where the directory should be")
        answers = []
        for number in range(7):
            answers.append((await peer.ask(create(f"topic{number}", 1))).code)
            await turns()
        assert answers == [0] * 5 + [ResponseCode.SERVICE_NOT_AVAILABLE] * 2
        refused = await peer.ask(create("topic9", 1))
        assert refused.remark == "service not available now: the audit log cannot be written"
        assert (await peer.ask(send("topic1"))).code == 0, "messages go on"
        assert [line["event"] for line in logged].count("audit_not_written") == 1

        os.unlink(tmp_path / "audit")
        found = await entries(broker)
        assert [entry["topic"] for entry in found] == [f"topic{number}" for number in range(5)]
        assert (await peer.ask(create("topic9", 1))).code == 0
        assert "audit_written_again" in [line["event"] for line in logged]
