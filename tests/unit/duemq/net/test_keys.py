"""Clients with the keys of an account sign every request; no error and no text of theirs has the secret key."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from duemq import Admin, ArgumentError, Consumer, Producer, cli
from duemq._values.accounts import Keys, read_keys
from duemq.errors import AccessDeniedError, BrokerFailureError, NoPermissionError, error_of
from duemq.protocol.codes import RequestCode
from duemq.protocol.frames.command import Command
from duemq.protocol.requests import bodies
from duemq.protocol.requests.bodies import BrokerData
from duemq.testing import TestClock
from tests.support.access import USER, signature
from tests.support.canary import CANARY
from tests.unit.duemq.cli.test_cli import Threaded
from tests.unit.duemq.conftest import INTERVALS
from tests.unit.duemq.fake import FakeBroker, Request, failure, success

KEYS: dict[str, Any] = {"access_key": USER[0], "secret_key": USER[1]}
TOOLS = f"accessKey: {USER[0]}\nsecretKey: {USER[1]}\n"


def unsigned(requests: Iterable[Request]) -> list[RequestCode]:
    """The codes of requests that do not have the account's signature."""
    return [
        RequestCode(each.code)
        for each in requests
        if each.ext.get("AccessKey") != USER[0] or each.ext.get("Signature") != signature(each.ext, each.body, USER[1])
    ]


def refuse_duemqs_own(broker: FakeBroker) -> None:
    """Have a fake broker tell of itself, and refuse the codes that only duemq has."""
    known = BrokerData({0: broker.address}, broker.name, "cluster")
    told = bodies.cluster_info([known], {"cluster": [broker.name]})
    broker.on(RequestCode.GET_BROKER_CLUSTER_INFO, success(body=told))
    for code in (
        RequestCode.LIST_PENDING,
        RequestCode.MOVE_CLOCK,
        RequestCode.CANCEL_MESSAGE,
        RequestCode.CHANGE_PENDING,
    ):
        broker.on(code, failure(3, "no"))


# --- what is signed


@pytest.mark.parametrize(
    ("codec", "language"), [("json", "JAVA"), ("auto", "JAVA"), ("auto", "PYTHON"), ("msgpack", "PYTHON")]
)
async def test_a_producer_signs_every_request(codec: Any, language: str) -> None:
    async with FakeBroker(language=language, topics={"demo": 2}) as broker:
        async with Producer(broker.address, codec=codec, _intervals=INTERVALS, **KEYS) as producer:
            await producer.send("demo", b"hello", tags="a", keys="k", properties={"x": "ü"})
            await producer.send("demo", b"later", delay=5)
            await producer.send("new", b"made by the send")
        codes = {each.code for each in broker.requests}
        assert {RequestCode.SEND_MESSAGE_V2, RequestCode.HEART_BEAT, RequestCode.GET_ROUTEINFO_BY_TOPIC} <= codes
        assert RequestCode.UNREGISTER_CLIENT in codes
        assert unsigned(broker.requests) == []


async def test_a_consumer_signs_every_request() -> None:
    async with FakeBroker(topics={"demo": 1}) as broker:
        consumer = Consumer("group", nameserver=broker.address, from_="first", _intervals=INTERVALS, **KEYS)
        consumer.subscribe("demo")
        async with (
            Producer(broker.address, _intervals=INTERVALS, **KEYS) as producer,
            consumer,
            asyncio.timeout(20),
        ):
            await producer.send("demo", b"hello")
            message = await consumer.receive()
            await message.ack()
        codes = {each.code for each in broker.requests}
        assert {RequestCode.PULL_MESSAGE, RequestCode.UPDATE_CONSUMER_OFFSET} <= codes
        assert unsigned(broker.requests) == []


async def test_an_admin_and_a_test_clock_sign_every_request() -> None:
    async with FakeBroker() as broker:
        refuse_duemqs_own(broker)
        async with Admin(broker.address, _intervals=INTERVALS, **KEYS) as admin:
            with pytest.raises(Exception, match="does not support the request"):
                await admin.count()
        with pytest.raises(Exception, match="does not support the request"):
            await TestClock(broker.address, **KEYS).now()
        assert {RequestCode.LIST_PENDING, RequestCode.MOVE_CLOCK} <= {each.code for each in broker.requests}
        assert unsigned(broker.requests) == []


async def test_without_keys_nothing_is_signed() -> None:
    async with FakeBroker(topics={"demo": 1}) as broker:
        async with Producer(broker.address, _intervals=INTERVALS, access_key="", secret_key=None) as producer:
            await producer.send("demo", b"hello")
        assert not [each for each in broker.requests if {"AccessKey", "Signature"} & set(each.ext)]


# --- what goes wrong


@pytest.mark.parametrize("make", [Producer, Admin, TestClock, lambda **keys: Consumer("group", **keys)])
def test_one_key_alone_is_refused(make: Any) -> None:
    with pytest.raises(ArgumentError, match="secret_key is missing"):
        make(access_key=USER[0])
    with pytest.raises(ArgumentError, match="access_key is missing") as caught:
        make(secret_key=USER[1])
    assert CANARY not in str(caught.value)


async def test_a_refusal_is_told_and_not_tried_again() -> None:
    why = "No default permission for topic:demo"
    remark = f"org.apache.rocketmq.acl.common.AclException: {why}, org.apache.rocketmq.acl.plain.Class.method"
    async with FakeBroker(topics={"demo": 2}) as broker:
        broker.on(RequestCode.SEND_MESSAGE_V2, lambda _: failure(1, remark))
        async with Producer(broker.address, _intervals=INTERVALS, **KEYS) as producer:
            with pytest.raises(AccessDeniedError, match=rf"access denied \(code 1\): {why}$"):
                await producer.send("demo", b"hello")
        assert len([each for each in broker.requests if each.code == RequestCode.SEND_MESSAGE_V2]) == 1


@pytest.mark.parametrize(
    "why",
    [
        "username cannot be null",
        "check signature failed",
        "User:a user is not found",
        "User:orders is disabled",
        "User:orders has no permission to access Topic:demo from 127.0.0.1, no matched policies",
    ],
)
async def test_a_refusal_of_acl_2_is_told_and_not_tried_again(why: str) -> None:
    async with FakeBroker(topics={"demo": 2}) as broker:
        broker.on(RequestCode.SEND_MESSAGE_V2, lambda _: failure(16, f"{why}."))
        async with Producer(broker.address, _intervals=INTERVALS, **KEYS) as producer:
            with pytest.raises(AccessDeniedError, match=rf"access denied \(code 16\): {why}$"):
                await producer.send("demo", b"hello")
        assert len([each for each in broker.requests if each.code == RequestCode.SEND_MESSAGE_V2]) == 1


def test_other_failures_are_no_refusals() -> None:
    other = error_of(Command(code=16, remark="the broker[127.0.0.1] sending message is forbidden"), "h:1")
    assert type(other) is NoPermissionError
    error = error_of(Command(code=1, remark="something about an AclException: x"), "h:1")
    assert type(error) is BrokerFailureError


def test_no_text_has_the_secret() -> None:
    made = [Producer(**KEYS), Admin(**KEYS), TestClock(**KEYS), Consumer("group", **KEYS), Keys(*USER)]
    for each in made:
        inside = repr(vars(each)) if hasattr(each, "__dict__") else ""
        assert CANARY not in repr(each) + str(each) + inside
    consumer = made[3]
    assert isinstance(consumer, Consumer)
    assert CANARY not in repr(consumer._member._config)


# --- the command line


@pytest.mark.parametrize("by", ["environment", "option", "variable"])
@pytest.mark.parametrize(
    "command",
    [
        ("send", "demo", "hello"),
        ("receive", "demo", "--wait", "1ms"),
        ("cancel", "7F00000100002A9F0000000000000000"),
        ("pending", "count"),
        ("clock", "advance", "1s"),
    ],
    ids=lambda command: command[0],
)
def test_commands_sign_with_the_keys(tmp_path: Path, by: str, command: tuple[str, ...]) -> None:
    file = tmp_path / "tools.yml"
    file.write_text(TOOLS)
    with Threaded(FakeBroker(topics={"demo": 1})) as threaded:
        refuse_duemqs_own(threaded.broker)
        environment = {"DUEMQ_NAMESERVER": threaded.broker.address}
        if by == "environment":
            environment |= {"DUEMQ_ACCESS_KEY": USER[0], "DUEMQ_SECRET_KEY": USER[1]}
        elif by == "variable":
            environment["DUEMQ_ACCOUNT"] = str(file)
        options = ("--account", str(file)) if by == "option" else ()
        result = CliRunner().invoke(cli.main, [*command, *options], env=environment)
        assert threaded.broker.requests, result.output
        assert unsigned(threaded.broker.requests) == []


@pytest.mark.parametrize(
    "text",
    [
        TOOLS,
        f"# keys\n---\n\nsecretKey: '{USER[1]}'\r\naccessKey: \"{USER[0]}\"\r\n",
        f"accessKey:   {USER[0]}   # of the application\nsecretKey: {USER[1]}\n\n",
    ],
)
def test_a_file_of_keys(text: str) -> None:
    assert read_keys(text) == Keys(*USER)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is missing"),
        (f"accessKey: {USER[0]}\n", "is missing"),
        (f"secretKey:{USER[1]}\n", "line 1: write accessKey: KEY"),
        (f"accessKey: {USER[0]}\n  {USER[1]}\n", "line 2"),
        (f"{TOOLS}secretKey: {USER[1]}\n", "line 3"),
        (f"accessKey: {USER[0]}\nsecretKey: '{USER[1]}\n", "line 2"),
        ("secretKey:\n", "line 1"),
    ],
)
def test_a_wrong_file_of_keys_is_told_without_secrets(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "tools.yml"
    file.write_text(text)
    result: Result = CliRunner().invoke(cli.main, ["send", "demo", "hello", "--account", str(file)])
    assert result.exit_code == 2
    assert why in " ".join(result.output.split())
    assert CANARY not in result.output


def test_a_missing_file_of_keys_is_told(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.main, ["pending", "count", "--account", str(tmp_path / "nowhere")])
    assert result.exit_code == 2
    assert "No such file" in result.output
