"""A whole broker with access control: what RocketMQ's brokers answer with the same file, in every codec; white lists,
changes of the files, the codes 50 to 54, what is counted and logged, and that no secret is shown anywhere."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from duemq.broker.errors import ConfigError
from duemq.broker.settings.config import Origin
from duemq.broker.workers import Background
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames import fastjson
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import BINARY, CODECS, JSON, MSGPACK
from duemq.protocol.requests import headers
from tests.support.access import ACCOUNTS, ADMIN, USER, signature, signed, write_accounts
from tests.support.broker import UnboundBroker, running
from tests.support.canary import CANARY
from tests.support.wire import pull, request, send
from tests.unit.broker.tables.test_topics import create

DENIED = "org.apache.rocketmq.acl.common.AclException: "
TOO_SHORT = "and secretKey=*** cannot be null and length should longer than 6"
NEW = ("new-account", "canary-secret-of-new")


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[UnboundBroker]:
    write_accounts(tmp_path)
    async with running(tmp_path / "store", "aclEnable=true", f"rocketmqHome={tmp_path}") as started:
        yield started


def denied(answer: Command) -> str | None:
    """Why a request was refused, None if it was not."""
    remark = answer.remark or ""
    if not remark.startswith(DENIED):
        return None
    assert (answer.code, bytes(answer.body)) == (ResponseCode.SYSTEM_ERROR, b"")
    return remark.removeprefix(DENIED)


def heartbeat(group: str, *topics: str) -> Command:
    consumer = {"groupName": group, "subscriptionDataSet": [{"topic": topic} for topic in topics]}
    return request(34, None, fastjson.dumps({"clientID": "c", "consumerDataSet": [consumer]}))


def commit(group: str, topic: str) -> Command:
    return request(15, headers.UpdateConsumerOffset(group, topic, 0, 0))


async def looked(broker: UnboundBroker) -> None:
    """Have the broker look at the files, and wait until it has."""
    assert broker.running.acl_files is not None
    broker.running.acl_files.look()
    await broker.lanes.run(Background.ACCESS, lambda: None)
    await asyncio.sleep(0)


# --- as RocketMQ's brokers


@pytest.mark.parametrize("frame_codec", CODECS)
@pytest.mark.parametrize(
    ("command", "account", "why"),
    [
        (send("topicB"), None, "No accessKey is configured"),
        (send("topicB"), ("whoever", "x"), "No acl config for whoever"),
        (send("topicB"), (USER[0], "wrong"), f"Check signature failed for accessKey={USER[0]}"),
        (send("topicB"), USER, None),
        (send("topicB", v1=True), USER, None),
        (send("topicA"), USER, "No default permission for topic:topicA"),
        (send("topicA", v1=True), USER, "No default permission for topic:topicA"),
        (send("topicA", code=320), USER, "No default permission for topic:topicA"),
        (send("topicC"), USER, "No default permission for topic:topicC"),
        (send("topicZ"), USER, "No default permission for topic:topicZ"),
        (send("%RETRY%groupA"), USER, "No default permission for group:groupA"),
        (send("%RETRY%groupA", v1=True), USER, "No default permission for group:groupA"),
        (send("%RETRY%groupC"), USER, None),
        (send("%RETRY%groupZ"), USER, None),
        (send("%DLQ%groupA"), USER, "No default permission for group:groupA"),
        (send("RMQ_SYS_TRACE_TOPIC"), USER, None),
        (send("topicA"), ADMIN, None),
        (pull("topicB", group="groupC"), USER, None),
        (pull("topicB", group="groupZ"), USER, None),
        (pull("topicB", group="groupA"), USER, "No default permission for group:groupA"),
        (pull("topicA", group="groupC"), USER, "No default permission for topic:topicA"),
        (pull("RMQ_SYS_TRACE_TOPIC", group="groupC"), USER, "No default permission for topic:RMQ_SYS_TRACE_TOPIC"),
        (pull("%RETRY%groupC", group="groupC"), USER, None),
        (pull("%RETRY%groupA", group="groupC"), USER, "No default permission for group:groupA"),
        (pull("%DLQ%groupA", group="groupC"), USER, "No default permission for group:groupA"),
        (pull("%DLQ%groupC", group="groupC"), USER, None),
        (heartbeat("groupC", "topicB", "topicC"), USER, None),
        (heartbeat("groupC", "topicB", "topicA"), USER, "No default permission for topic:topicA"),
        (heartbeat("groupA", "topicB"), USER, "No default permission for group:groupA"),
        (request(34, None, b'{"clientID":"c","producerDataSet":[{"groupName":"groupA"}]}'), USER, None),
        (request(35, headers.UnregisterClient("c", None, "groupA")), USER, "No default permission for group:groupA"),
        (request(35, headers.UnregisterClient("c", "groupA")), USER, None),
        (request(38, headers.ConsumerGroupName("groupA")), USER, "No default permission for group:groupA"),
        (commit("groupC", "topicA"), USER, "No default permission for topic:topicA"),
        (commit("groupA", "topicB"), USER, "No default permission for group:groupA"),
        (commit("groupC", "topicB"), USER, None),
        (request(28), USER, None),
        (request(207, headers.DeleteSubscriptionGroup("groupC")), USER,
         f"Need admin permission for request code=207, but accessKey={USER[0]} is not"),
        (request(105, headers.GetRouteInfo("topicA")), None, None),
    ],
)  # fmt: skip
async def test_answers(
    broker: UnboundBroker, frame_codec: int, command: Command, account: tuple[str, str] | None, why: str | None
) -> None:
    answer = await broker.connect().ask(signed(_copy(command), account), frame_codec)
    assert denied(answer) == why, answer.remark


def _copy(command: Command) -> Command:
    ext = {name: value for name, value in command.ext.items() if value}  # the binary header has no empty texts
    return Command(code=command.code, opaque=command.opaque, version=407, language="JAVA", ext=ext, body=command.body)


async def test_messages_of_all_topics_need_a_permission_of_their_own(tmp_path: Path) -> None:
    write_accounts(tmp_path, f"accounts:\n- accessKey: {USER[0]}\n  secretKey: {USER[1]}\n  defaultTopicPerm: SUB\n"
        "  defaultGroupPerm: SUB\n  topicPerms: [rmq_sys_wheel_timer=SUB]\n")  # fmt: skip
    async with running(tmp_path / "store", "aclEnable=true", f"rocketmqHome={tmp_path}") as broker:
        peer = broker.connect()
        answer = await peer.ask(signed(pull("SCHEDULE_TOPIC_XXXX"), USER))
        assert denied(answer) == "No default permission for topic:SCHEDULE_TOPIC_XXXX"
        assert denied(await peer.ask(signed(pull("rmq_sys_wheel_timer"), USER))) is None
        assert denied(await peer.ask(signed(pull("any"), USER))) is None


async def test_only_sub_counts_for_sends_to_a_retry_topic(tmp_path: Path) -> None:
    write_accounts(
        tmp_path,
        f"accounts:\n- accessKey: {USER[0]}\n  secretKey: {USER[1]}\n  defaultTopicPerm: PUB\n"
        "  groupPerms: [published=PUB, subscribed=SUB]\n  topicPerms: ['%DLQ%listed=PUB']\n",
    )
    async with running(tmp_path / "store", "aclEnable=true", f"rocketmqHome={tmp_path}") as broker:
        peer = broker.connect()
        for topic, why in (
            ("%RETRY%published", "No default permission for group:published"),
            ("%RETRY%subscribed", None),
            ("%DLQ%published", "No default permission for group:published"),
            ("%DLQ%subscribed", None),
            ("%DLQ%listed", None),
            ("%DLQ%other", "No default permission for group:other"),
            ("other", None),
        ):
            assert denied(await peer.ask(signed(send(topic), USER))) == why, topic


async def test_a_request_about_all_topics_needs_the_default_permission(broker: UnboundBroker) -> None:
    peer = broker.connect()
    list_all, list_one = headers.ListPending(), headers.ListPending(topic="topicC")
    assert denied(await peer.ask(signed(request(30003, list_all), USER))) == "No default permission for all topics"
    assert denied(await peer.ask(signed(request(30003, list_one), USER))) is None
    assert denied(await peer.ask(signed(request(30003, list_all), ADMIN))) is None


# --- frames


async def test_a_value_that_is_no_text_is_signed_as_its_text(broker: UnboundBroker) -> None:
    peer = broker.connect()
    await peer.ask(signed(send("topicB"), USER))
    peer.forget()
    command = send("topicB")
    text = {**command.ext, "AccessKey": USER[0]}
    ext: dict[str, Any] = {**text, "e": 0, "k": False, "unknown": 5, "gone": None}
    ext["Signature"] = signature({**text, "e": "0", "k": "false", "unknown": "5"}, b"body", USER[1])
    head = json.dumps({"code": 310, "extFields": ext, "opaque": 77, "flag": 0, "version": 407}, separators=(",", ":"))
    body = b"body"
    frame = (4 + len(head) + len(body)).to_bytes(4, "big") + len(head).to_bytes(4, "big") + head.encode() + body
    peer.feed(frame)
    (answer,) = peer.responses
    assert (answer.code, answer.remark) == (ResponseCode.SUCCESS, None)


async def test_signed_and_unsigned_sends_of_one_read(broker: UnboundBroker) -> None:
    peer = broker.connect()
    good = [signed(send("topicB", b"%d" % number), USER) for number in range(6)]
    bad = [send("topicB"), signed(send("topicA"), USER), signed(send("topicB"), (USER[0], "wrong"))]
    answers = await peer.ask_all([good[0], bad[0], good[1], good[2], bad[1], good[3], bad[2], good[4], good[5]])
    assert [answer.code for answer in answers] == [0, 1, 0, 0, 1, 0, 1, 0, 0]
    assert [answer.ext["queueOffset"] for answer in answers if not answer.code] == ["0", "1", "2", "3", "4", "5"]


async def test_a_refused_request_without_answer_changes_nothing(broker: UnboundBroker) -> None:
    peer, other = broker.connect(), broker.connect()
    await peer.ask(signed(send("topicB"), USER))
    end = broker.store.log.end
    peer.forget()
    peer.post(send("topicB", oneway=True), signed(send("topicA", oneway=True), USER))
    assert peer.responses == []
    assert broker.store.log.end == end
    assert (await other.ask(signed(send("topicB"), USER))).code == 0
    assert (await peer.ask(signed(send("topicB"), USER))).code == 0


@pytest.mark.parametrize("value", ["", "ü", "\ud800", "A" * 28, "=" * 28, "x" * 100_000])
async def test_a_hostile_signature_is_refused(broker: UnboundBroker, value: str) -> None:
    peer = broker.connect()
    command = signed(send("topicB"), USER)
    command.ext["Signature"] = value
    if value == "\ud800":
        head = json.dumps({"code": 310, "extFields": command.ext, "opaque": 1}, separators=(",", ":")).encode()
        frame = (4 + len(head)).to_bytes(4, "big") + len(head).to_bytes(4, "big") + head
        peer.connection.data_received(frame)  # half a surrogate pair breaks the stream, as without access control
        return
    assert denied(await peer.ask(command)) == f"Check signature failed for accessKey={USER[0]}"


@pytest.mark.parametrize("value", ["", "x" * 100_000, "%s", "\x00", "ü"])
async def test_a_hostile_access_key_is_refused(broker: UnboundBroker, value: str) -> None:
    command = send("topicB")
    command.ext |= {"AccessKey": value, "Signature": "x"}
    answer = await broker.connect().ask(command)
    assert denied(answer) == (f"No acl config for {value[:255]}" if value else "No accessKey is configured")


async def test_the_signature_of_another_request_is_refused(broker: UnboundBroker) -> None:
    command, other = signed(send("topicB"), USER), signed(send("topicB", b"other"), USER)
    command.ext["Signature"] = other.ext["Signature"]
    assert denied(await broker.connect().ask(command)) == f"Check signature failed for accessKey={USER[0]}"


async def test_a_field_that_is_there_twice_is_checked_as_it_is_used(broker: UnboundBroker) -> None:
    """The last one is used: a signature for the first does not help."""
    peer = broker.connect()
    await peer.ask(signed(send("topicB"), USER))
    for topics, why in ((("topicB", "topicA"), "topicA"), (("topicA", "topicB"), None)):
        command = signed(send(topics[1]), USER)
        fields = json.dumps(command.ext, separators=(",", ":")).replace('"b":', f'"b":"{topics[0]}","b":')
        head = f'{{"code":310,"extFields":{fields},"opaque":{len(peer.responses) + 1},"flag":0}}'.encode()
        body = b"body"
        peer.feed((4 + len(head) + len(body)).to_bytes(4, "big") + len(head).to_bytes(4, "big") + head + body)
        assert denied(peer.responses[-1]) == (f"No default permission for topic:{why}" if why else None)


async def test_a_held_pull_is_answered_and_keeps_no_fields(broker: UnboundBroker) -> None:
    peer = broker.connect()
    assert (await peer.ask(signed(send("topicB"), USER))).code == 0
    peer.forget()
    peer.post(signed(pull("topicB", 1, group="groupC", suspend_ms=10_000), USER))
    held = [each.request for each in gc.get_objects() if type(each).__name__ == "HeldPull"]
    assert all(getattr(each, "fields", None) is None for each in held)
    assert (await broker.connect().ask(signed(send("topicB"), USER))).code == 0
    await asyncio.sleep(0)
    assert [answer.code for answer in peer.responses] == [ResponseCode.SUCCESS]


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_strangers_ask_is_refused_and_changes_nothing(broker: UnboundBroker, seed: int) -> None:
    peer, chance = broker.connect(), random.Random(seed)
    topics, end = set(broker.topics.table), broker.store.log.end
    names = [*"abcdefghijklm", "topic", "AccessKey", "Signature", "consumerGroup", "accessKey", "secretKey", "fields"]
    texts = ["", "0", "-1", "topicB", USER[0], ADMIN[0], USER[1], "true", "\x01\x02", "ü" * 50, "x" * 3000]
    commands = []
    for _ in range(100):
        code = chance.choice([*RequestCode, 0, 9999])
        command = request(code if code != RequestCode.GET_ROUTEINFO_BY_TOPIC else 1)
        command.ext = {chance.choice(names): chance.choice(texts) for _ in range(chance.randrange(8))}
        command.body = chance.choice([b"", b"{", b'{"clientID":"c"}', chance.randbytes(50)])
        commands.append(command)
    for command in commands:
        answer = await peer.ask(command, chance.choice([JSON, BINARY, MSGPACK] if command.code < 2**15 else [JSON]))
        assert denied(answer) is not None, (command, answer)
    assert (set(broker.topics.table), broker.store.log.end) == (topics, end)
    assert broker.router.connections == {peer.connection}


# --- white lists


@pytest.mark.parametrize(
    ("host", "account", "why"),
    [
        ("127.0.0.2", None, None),
        ("127.0.1.77", None, None),
        ("::ffff:127.0.1.77", None, None),
        ("127.0.2.1", None, "No accessKey is configured"),
        ("127.0.0.2", ("whoever", "x"), None),
        ("127.0.3.5", (ADMIN[0], "wrong"), None),
        ("127.0.3.10", (ADMIN[0], "wrong"), f"Check signature failed for accessKey={ADMIN[0]}"),
        ("127.0.3.5", (USER[0], "wrong"), f"Check signature failed for accessKey={USER[0]}"),
        ("127.0.3.5", None, "No accessKey is configured"),
        ("fe80::1%eth0", None, "No accessKey is configured"),
    ],
)
async def test_white_lists(broker: UnboundBroker, host: str, account: tuple[str, str] | None, why: str | None) -> None:
    peer = broker.connect((host, 40000))
    assert denied(await peer.ask(signed(send("topicA"), account))) == why
    delete = request(207, headers.DeleteSubscriptionGroup("groupC"))
    assert denied(await peer.ask(signed(delete, account))) == why


# --- changes of the files


async def test_a_changed_file_counts_from_the_next_look_on(broker: UnboundBroker, tmp_path: Path, logged: Any) -> None:
    peer = broker.connect()
    assert denied(await peer.ask(signed(send("topicA"), USER))) is not None
    assert denied(await peer.ask(signed(send("topicB"), USER))) is None
    path = write_accounts(
        tmp_path, ACCOUNTS.replace("topicA=DENY", "topicA=PUB").replace("topicB=PUB|SUB", "topicB=SUB")
    )
    await looked(broker)
    assert denied(await peer.ask(signed(send("topicA"), USER))) is None
    assert denied(await peer.ask(signed(send("topicB"), USER))) is not None
    assert [line["files"] for line in logged if line["event"] == "accounts_changed"] == [[str(path)]]
    await looked(broker)
    assert len([line for line in logged if line["event"] == "accounts_changed"]) == 1


async def test_a_wrong_file_leaves_the_accounts_and_is_told_once(
    broker: UnboundBroker, tmp_path: Path, logged: Any
) -> None:
    peer = broker.connect()
    path = write_accounts(tmp_path, ACCOUNTS.replace("admin: true", "admin: perhaps"))
    for _ in range(3):
        await looked(broker)
    assert denied(await peer.ask(signed(send("topicA"), ADMIN))) is None
    (line,) = (line for line in logged if line["event"] == "accounts_not_changed")
    assert line["log_level"] == "error"
    assert line["reason"] == f"{path}, line 22: admin must be true or false"
    write_accounts(tmp_path, ACCOUNTS.replace(ADMIN[1], "canary-secret-changed"))
    await looked(broker)
    assert denied(await peer.ask(signed(send("topicA"), ADMIN))) is not None
    assert denied(await peer.ask(signed(send("topicA"), (ADMIN[0], "canary-secret-changed")))) is None


@pytest.mark.parametrize("kind", ["fifo", "device", "directory", "socket"])
async def test_what_is_no_regular_file_is_refused_without_waiting(
    broker: UnboundBroker, tmp_path: Path, logged: Any, kind: str
) -> None:
    peer, path = broker.connect(), tmp_path / "conf" / "plain_acl.yml"
    path.unlink()
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "directory":
            path.mkdir()
        case "socket":
            server = socket.socket(socket.AF_UNIX)
            server.bind(os.path.relpath(path))  # a socket's path is short
            server.close()
    for _ in range(2):
        await looked(broker)
    (line,) = (line for line in logged if line["event"] == "accounts_not_changed")
    assert line["reason"] == f"{path}: is not a regular file"
    assert denied(await peer.ask(signed(send("topicA"), ADMIN))) is None
    path.rmdir() if kind == "directory" else path.unlink()
    write_accounts(tmp_path, ACCOUNTS.replace(ADMIN[1], "canary-secret-changed"))
    await looked(broker)
    assert denied(await peer.ask(signed(send("topicA"), (ADMIN[0], "canary-secret-changed")))) is None


async def test_files_that_cannot_be_read_hold_up_nothing_else(broker: UnboundBroker) -> None:
    """A mount may hang: topics, settings and the audit log do not wait for the files of accounts."""
    broker.lanes.hold(Background.ACCESS)
    assert broker.running.acl_files is not None
    broker.running.acl_files.look()
    peer = broker.connect()
    change = request(RequestCode.UPDATE_AND_CREATE_ACL_CONFIG, headers.CreateAccessConfig("new-account", "new-secret"))
    peer.post(signed(change, ADMIN))
    assert (await peer.ask(signed(create("topicX", 1), ADMIN))).code == 0
    assert peer.answer_of(change) is None


async def test_a_file_that_is_being_written_does_not_count_yet(
    broker: UnboundBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert broker.running.acl_files is not None
    peer, read = broker.connect(), broker.running.acl_files._read
    half, whole = ACCOUNTS.replace("topicA=DENY", "topicA=PUB"), ACCOUNTS.replace("topicA=DENY", "topicA=PUB|SUB")
    write_accounts(tmp_path, half)

    def read_while_it_is_written(stamps: Any) -> Any:
        state = read(stamps)
        write_accounts(tmp_path, whole)
        monkeypatch.undo()
        return state

    monkeypatch.setattr(broker.running.acl_files, "_read", read_while_it_is_written)
    await looked(broker)
    assert denied(await peer.ask(signed(send("topicA"), USER))) is not None
    await looked(broker)
    assert denied(await peer.ask(signed(send("topicA"), USER))) is None


async def test_a_directory_that_cannot_be_read_leaves_the_accounts(
    broker: UnboundBroker, tmp_path: Path, logged: Any
) -> None:
    (tmp_path / "conf" / "acl").write_text("not a directory")
    await looked(broker)
    assert denied(await broker.connect().ask(signed(send("topicA"), ADMIN))) is None
    assert [line["reason"] for line in logged if line["event"] == "accounts_not_changed"] == [
        f"{tmp_path}/conf/acl: Not a directory"
    ]


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (f"accessKey: {USER[0]}", "accessKey: somebody-else", f"No acl config for {USER[0]}"),
        (f"secretKey: {USER[1]}", "secretKey: another-secret", f"Check signature failed for accessKey={USER[0]}"),
        ("topicB=PUB|SUB", "topicB=PUB", "No default permission for topic:topicB"),
        ("groupC=SUB", "groupC=DENY", "No default permission for group:groupC"),
        ("groupA=DENY", "groupA=SUB", None),
    ],
)
async def test_a_change_ends_the_held_pulls_that_it_forbids(
    broker: UnboundBroker, tmp_path: Path, old: str, new: str, why: str | None
) -> None:
    peer = broker.connect()
    make = headers.CreateTopic("topicB", "TBW102", 1, 1, 6, "SINGLE_TAG", 0)
    assert (await peer.ask(signed(request(17, make), ADMIN))).code == 0
    await peer.ask(signed(request(200, None, fastjson.dumps({"groupName": "groupC"})), ADMIN))
    waiting = [signed(pull("topicB", group="groupC", suspend_ms=30_000), account) for account in (USER, ADMIN)]
    peer.post(*waiting)
    free = broker.connect(("127.0.0.2", 1))
    by_address = pull("topicB", group="groupC", suspend_ms=30_000)
    free.post(by_address)
    assert broker.running.pulls.polls.count == 3
    write_accounts(tmp_path, ACCOUNTS.replace(old, new))
    await looked(broker)
    for _ in range(5):
        await asyncio.sleep(0)
    answer = peer.answer_of(waiting[0])
    assert (denied(answer) if answer is not None else None) == why
    assert peer.answer_of(waiting[1]) is None
    assert free.answer_of(by_address) is None
    write_accounts(tmp_path, ACCOUNTS.replace("- 127.0.0.2\n", ""))
    await looked(broker)
    for _ in range(5):
        await asyncio.sleep(0)
    refused = free.answer_of(by_address)
    assert refused is not None
    assert denied(refused) == "No white list has 127.0.0.2 any more"


async def test_files_that_cannot_be_looked_at_are_told_once(broker: UnboundBroker, tmp_path: Path, logged: Any) -> None:
    (tmp_path / "conf" / "acl").mkdir()
    (tmp_path / "conf" / "acl" / "broken.yml").symlink_to(tmp_path / "nowhere")
    for _ in range(3):
        await looked(broker)
    assert [line["reason"] for line in logged if line["event"] == "accounts_not_changed"] == [
        f"{tmp_path}/conf/acl/broken.yml: No such file or directory"
    ]
    assert denied(await broker.connect().ask(signed(send("topicA"), ADMIN))) is None


async def test_more_files(broker: UnboundBroker, tmp_path: Path, logged: Any) -> None:
    peer = broker.connect()
    one = f"accounts:\n- accessKey: {NEW[0]}\n  secretKey: {NEW[1]}\n  admin: true\n"
    write_accounts(tmp_path, one, "acl/team/one.yml")
    write_accounts(tmp_path, one.replace("admin: true", "admin: false"), "acl/two.yaml")
    write_accounts(tmp_path, "[", "acl/.hidden.yml")
    write_accounts(tmp_path, "[", "acl/..data/hidden.yml")
    write_accounts(tmp_path, "[", "acl/tools.yml")
    write_accounts(tmp_path, "[", "acl/other.txt")
    await looked(broker)
    # Files of one directory come before those of its directories, as their names do not matter there.
    assert denied(await peer.ask(signed(send("topicA"), NEW))) == "No default permission for topic:topicA"
    (doubtful,) = (line for line in logged if line["event"] == "accounts_doubtful")
    assert "one.yml, line 2: another file has the account new-account too" in doubtful["reason"]
    (tmp_path / "conf" / "acl" / "two.yaml").unlink()
    await looked(broker)
    assert denied(await peer.ask(signed(send("topicA"), NEW))) is None


async def test_a_file_that_is_gone_takes_its_accounts_with_it(broker: UnboundBroker, tmp_path: Path) -> None:
    (tmp_path / "conf" / "plain_acl.yml").unlink()
    await looked(broker)
    assert denied(await broker.connect().ask(signed(send("topicA"), ADMIN))) == f"No acl config for {ADMIN[0]}"


async def test_a_file_that_others_may_read_is_told(tmp_path: Path, logged: Any) -> None:
    write_accounts(tmp_path).chmod(0o644)
    async with running(tmp_path / "store", "aclEnable=true", f"rocketmqHome={tmp_path}"):
        assert ["chmod o=" in line["reason"] for line in logged if line["event"] == "accounts_doubtful"] == [True]


@pytest.mark.parametrize(
    ("text", "why"),
    [(None, "there is neither"), ("[", "plain_acl.yml, line 2: "), ("accounts: {}", "line 1: accounts")],
)
async def test_a_broker_without_accounts_does_not_start(tmp_path: Path, text: str | None, why: str) -> None:
    if text is not None:
        write_accounts(tmp_path, text)
    with pytest.raises(ConfigError, match=why):
        async with running(tmp_path / "store", "aclEnable=true", f"rocketmqHome={tmp_path}"):
            raise AssertionError("it started")
    assert not (tmp_path / "store").exists()


async def test_the_accounts_are_beside_the_configuration_file(tmp_path: Path) -> None:
    write_accounts(tmp_path)
    origin = Origin(str(tmp_path / "conf" / "broker.conf"))
    async with running(tmp_path / "store", "aclEnable=true", origin=origin) as broker:
        assert denied(await broker.connect().ask(signed(send("topicA"), ADMIN))) is None


async def test_without_a_place_for_accounts_a_broker_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rocketmqHome=DIRECTORY"):
        async with running(tmp_path / "store", "aclEnable=true"):
            raise AssertionError("it started")


async def test_without_access_control_nothing_is_checked(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        peer = broker.connect()
        assert (await peer.ask(signed(send("topicA"), ("whoever", "x")))).code == 0
        route = broker.router._routes[RequestCode.SEND_MESSAGE_V2]
        assert route.handler.__qualname__ == "SendHandlers.send"
        answer = await peer.ask(request(RequestCode.GET_BROKER_CLUSTER_ACL_CONFIG))
        assert answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED


# --- codes 50 to 54


def update(**fields: Any) -> Command:
    header = headers.CreateAccessConfig(**{"access_key": NEW[0], "secret_key": NEW[1], **fields})
    return request(RequestCode.UPDATE_AND_CREATE_ACL_CONFIG, header)


async def ask(broker: UnboundBroker, command: Command) -> tuple[int, str | None]:
    answer = await broker.connect().ask(signed(command))
    return answer.code, answer.remark


async def test_an_account_is_made_changed_and_deleted(broker: UnboundBroker, tmp_path: Path) -> None:
    path = tmp_path / "conf" / "plain_acl.yml"
    peer = broker.connect()
    assert await ask(broker, update(topic_perms="topicA=PUB,topicB=SUB", default_group_perm="SUB")) == (0, None)
    assert denied(await peer.ask(signed(send("topicA"), NEW))) is None
    text = path.read_text()
    assert (
        f"- accessKey: {NEW[0]}\n  secretKey: {NEW[1]}\n  admin: false\n  defaultGroupPerm: SUB\n  topicPerms:\n"
        "  - topicA=PUB\n  - topicB=SUB\ndataVersion:\n- counter: 1\n  timestamp: "
    ) in text
    assert await ask(broker, update(secret_key="canary-secret-changed", topic_perms="topicA=SUB")) == (0, None)
    assert denied(await peer.ask(signed(send("topicA"), NEW))) == f"Check signature failed for accessKey={NEW[0]}"
    changed = (NEW[0], "canary-secret-changed")
    assert denied(await peer.ask(signed(send("topicA"), changed))) == "No default permission for topic:topicA"
    assert "  defaultGroupPerm: SUB\n" in path.read_text()  # what the request does not name stays
    assert "counter: 2\n" in path.read_text()
    delete = request(51, headers.DeleteAccessConfig(NEW[0]))
    assert await ask(broker, delete) == (0, None)
    assert denied(await peer.ask(signed(send("topicA"), changed))) == f"No acl config for {NEW[0]}"
    assert NEW[0] not in path.read_text()
    assert await ask(broker, request(51, headers.DeleteAccessConfig(NEW[0]))) == (
        210, f"The accesskey[{NEW[0]}] corresponding to accessConfig has been deleted failed.",
    )  # fmt: skip
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == ["plain_acl.yml"]


async def test_an_account_is_changed_where_it_is(broker: UnboundBroker, tmp_path: Path) -> None:
    text = f"accounts:\n- accessKey: {NEW[0]}\n  secretKey: {NEW[1]}\n  role: operate\n"
    path = write_accounts(tmp_path, text, "acl/one.yml")
    assert await ask(broker, update(admin=True)) == (0, None)
    assert "  role: operate\n  admin: true\n" in path.read_text()
    assert (tmp_path / "conf" / "plain_acl.yml").read_text() == ACCOUNTS


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"access_key": "short"}, f"The accessKey=short {TOO_SHORT}"),
        ({"secret_key": "sec"}, f"The accessKey={NEW[0]} {TOO_SHORT}"),
        ({"secret_key": None}, f"The accessKey={NEW[0]} {TOO_SHORT}"),
        (
            {"topic_perms": "topicA=NOPE"},
            "Parse resource permission error for topicA=NOPE.\n"
            "The expected permissions are 'SUB' or 'PUB' or 'SUB|PUB' or 'PUB|SUB'.",
        ),
        (
            {"group_perms": "groupA"},
            "Parse Resource format error for groupA.\n"
            "The expected resource format is 'Res=Perm'. For example: topicA=SUB",
        ),
        ({"white_remote_address": "1.2.3"}, "Netaddress examine Exception netaddress is 1.2.3"),
        ({"default_topic_perm": "NOPE"}, "defaultTopicPerm=NOPE is not one of DENY, PUB, SUB, PUB|SUB, SUB|PUB"),
    ],
)  # fmt: skip
async def test_a_wrong_account_is_refused(
    broker: UnboundBroker, tmp_path: Path, fields: dict[str, Any], why: str
) -> None:
    assert await ask(broker, update(**fields)) == (209, why)
    assert (tmp_path / "conf" / "plain_acl.yml").read_text() == ACCOUNTS


async def test_a_white_list_is_changed(broker: UnboundBroker, tmp_path: Path) -> None:
    path = tmp_path / "conf" / "plain_acl.yml"
    free = broker.connect(("10.1.2.3", 4000))
    assert denied(await free.ask(send("topicA"))) is not None
    assert await ask(broker, request(53, headers.UpdateGlobalWhiteAddrs("10.1.*.*,::1"))) == (0, None)
    assert denied(await free.ask(send("topicA"))) is None
    assert path.read_text().startswith("globalWhiteRemoteAddresses:\n- 10.1.*.*\n- ::1\naccounts:\n")
    assert await ask(broker, request(53, headers.UpdateGlobalWhiteAddrs("", str(path)))) == (0, None)
    assert denied(await free.ask(send("topicA"))) is not None
    assert path.read_text().startswith("globalWhiteRemoteAddresses: []\n")


@pytest.mark.parametrize(
    ("addresses", "file", "why"),
    [
        ("1.1.1.1,nonsense", "", "Netaddress examine Exception netaddress is nonsense"),
        ("1.1.1.1", "/etc/passwd", "The globalWhiteAddresses[1.1.1.1] has been updated failed."),
        ("1.1.1.1", "conf/nowhere.yml", "The globalWhiteAddresses[1.1.1.1] has been updated failed."),
    ],
)
async def test_a_wrong_white_list_is_refused(broker: UnboundBroker, addresses: str, file: str, why: str) -> None:
    assert await ask(broker, request(53, headers.UpdateGlobalWhiteAddrs(addresses, file))) == (211, why)


async def test_the_versions_and_the_accounts_are_told(broker: UnboundBroker, tmp_path: Path) -> None:
    path = str(tmp_path / "conf" / "plain_acl.yml")
    peer = broker.connect()
    assert await ask(broker, update(topic_perms="topicA=PUB")) == (0, None)
    ext = (await peer.ask(signed(request(52), USER))).ext
    version = json.loads(ext["version"])
    assert version["counter"] == 1
    assert json.loads(ext["allAclFileVersion"]) == {path: version}
    assert (ext["brokerName"], ext["clusterName"], ext["brokerAddr"]) == (
        "broker-a",
        "DefaultCluster",
        "127.0.0.1:10911",
    )
    assert denied(await peer.ask(signed(request(54), USER))) is not None
    body = json.loads(bytes((await peer.ask(signed(request(54)))).body))
    assert body["globalWhiteAddrs"] == ["127.0.0.2", "127.0.1.*"]
    assert [account["accessKey"] for account in body["plainAccessConfigs"]] == [USER[0], ADMIN[0], NEW[0]]
    assert body["plainAccessConfigs"][1] == {
        "accessKey": ADMIN[0], "secretKey": ADMIN[1], "admin": True, "whiteRemoteAddress": "127.0.3.1-9",
    }  # fmt: skip


async def test_changes_at_the_same_time_are_all_made(broker: UnboundBroker, tmp_path: Path) -> None:
    peer = broker.connect()
    names = [f"account-{number}" for number in range(8)]
    answers = await peer.ask_all([signed(update(access_key=name)) for name in names])
    assert [answer.code for answer in answers] == [0] * len(names)
    text = (tmp_path / "conf" / "plain_acl.yml").read_text()
    assert [name for name in names if f"accessKey: {name}\n" not in text] == []
    assert "counter: 8\n" in text


async def test_a_file_that_cannot_be_written_is_told(
    broker: UnboundBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str, *_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", path)

    monkeypatch.setattr(broker._files, "write_whole", fail)
    path = tmp_path / "conf" / "plain_acl.yml"
    assert await ask(broker, update()) == (209, f"{path}: No space left on device")
    assert denied(await broker.connect().ask(signed(send("topicA"), NEW))) == f"No acl config for {NEW[0]}"


# --- what is told


async def test_refusals_are_counted_and_logged(broker: UnboundBroker, logged: Any) -> None:
    peer = broker.connect()
    for command in (
        send("topicB"),
        signed(send("topicB"), ("canary-secret-put-into-the-wrong-place", "x")),
        signed(send("topicB"), (USER[0], "wrong")),
        signed(send("topicA"), USER),
        signed(request(207, headers.DeleteSubscriptionGroup("groupC")), USER),
    ):
        assert denied(await peer.ask(command)) is not None
    lines = [(line["code"], line["reason"]) for line in logged if line["event"] == "access_refused"]
    assert lines == [
        (310, "No accessKey is configured"),
        (310, "no account has the access key"),
        (310, f"Check signature failed for accessKey={USER[0]}"),
        (310, f"No default permission for topic:topicA, accessKey={USER[0]}"),
        (207, f"Need admin permission for request code=207, but accessKey={USER[0]} is not"),
    ]
    table = json.loads(bytes((await peer.ask(signed(request(28)))).body))["table"]
    counts = {name: table[f"accessRefused_{name}"] for name in ("account", "signature", "role", "permission")}
    assert counts == {"account": "2", "signature": "1", "role": "1", "permission": "1"}


async def test_lines_about_refusals_are_few(broker: UnboundBroker, logged: Any) -> None:
    peer = broker.connect()
    answers = await peer.ask_all([send("topicB") for _ in range(500)])
    assert all(denied(answer) for answer in answers)
    assert len([line for line in logged if line["event"] == "access_refused"]) == 50
    assert broker.router._guard is not None
    assert broker.router._guard.refusals["account"] == 500


async def test_no_secret_is_shown(broker: UnboundBroker, tmp_path: Path, logged: Any) -> None:
    """Whatever is asked, wrong or right, no answer but that of 54 has a secret, and no line of the log."""
    peer = broker.connect()
    shown: list[Command] = []
    for command in (
        send("topicB"),
        signed(send("topicB"), (USER[0], "canary-secret-that-is-wrong")),
        signed(send("topicA"), USER),
        signed(request(25, None, b"aclEnable=false"), ADMIN),
        signed(request(25, None, b"rocketmqHome=/tmp"), ADMIN),
        *(signed(request(code), ADMIN) for code in (21, 26, 28, 43, 45, 52, 201, 328, 9999)),
        signed(update(access_key="short"), ADMIN),
        signed(update(topic_perms="T"), ADMIN),
        signed(update(white_remote_address="x"), ADMIN),
        signed(update(), ADMIN),
        signed(update(), USER),
        signed(request(51, headers.DeleteAccessConfig(NEW[0])), ADMIN),
        signed(request(51, headers.DeleteAccessConfig(NEW[0])), ADMIN),
        signed(request(53, headers.UpdateGlobalWhiteAddrs("x")), ADMIN),
    ):
        shown.append(await peer.ask(command))
    for text in ("[", ACCOUNTS.replace("secretKey: ", "secretKey:", 1), ACCOUNTS + "  x: [", ACCOUNTS * 2, "\0"):
        write_accounts(tmp_path, text)
        await looked(broker)
        shown.append(await peer.ask(signed(update(), ADMIN)))
    assert not [answer for answer in shown if CANARY in f"{answer.remark}{answer.ext}{bytes(answer.body)!r}"]
    assert len(logged) > 10
    assert not [line for line in logged if CANARY in repr(line)]
    assert CANARY not in repr(vars(broker.running.acl_files)) + repr(broker.settings.config)


def test_the_codecs_are_all_tried() -> None:
    assert CODECS == (JSON, BINARY, MSGPACK)
