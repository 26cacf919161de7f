"""The command line, run in this process against a fake broker in a thread; and as a process in tests of signals and
pipes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from datetime import datetime, timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from duemq import MessageHandle, cli
from duemq._values.checks import check_topic
from duemq.cli.receive import default_group
from duemq.cli.shared import moment
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames import fastjson
from duemq.protocol.requests import bodies
from duemq.protocol.requests.bodies import BrokerData, QueueData, TopicRoute
from duemq.protocol.requests.headers import SendMessageResponse
from tests.unit.duemq.fake import FakeBroker, failure, success

SEND = RequestCode.SEND_MESSAGE_V2


class Threaded:
    """A fake broker in a loop of its own."""

    def __init__(self, broker: FakeBroker | None = None) -> None:
        self.broker = broker or FakeBroker()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)

    def __enter__(self) -> Threaded:
        self.thread.start()
        self.do(self.broker.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self.do(self.broker.__aexit__())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)


@pytest.fixture
def threaded() -> Iterator[Threaded]:
    with Threaded() as threaded:
        yield threaded


@pytest.fixture
def run(threaded: Threaded) -> Callable[..., Result]:
    def run(*arguments: str, **options: Any) -> Result:
        environment = {"DUEMQ_NAMESERVER": threaded.broker.address}
        return CliRunner().invoke(cli.main, arguments, env=environment, **options)

    return run


def process(threaded: Threaded, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", "from duemq.cli import main; main()", *arguments],
        env={**os.environ, "NAMESRV_ADDR": threaded.broker.address, "DUEMQ_NAMESERVER": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# --- send ---------------------------------------------------------------------------------------------------------


def test_send_prints_where_the_message_is(threaded: Threaded, run: Callable[..., Result]) -> None:
    threaded.broker.on(
        SEND, lambda request: success(SendMessageResponse(IDS[0], request.send_header().queue_id, queue_offset=7))
    )
    result = run("send", "demo", "hello", "--tag", "a", "--key", "k1", "--key", "k2", "--property", "own=v=w")
    (request,) = threaded.broker.requests_of(SEND)
    properties = request.properties()
    assert request.body == b"hello"
    assert (properties["TAGS"], properties["KEYS"], properties["own"]) == ("a", "k1 k2", "v=w")
    queue = request.send_header().queue_id
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"sent {IDS[0]} to demo@broker-a:{queue} offset 7\n"


@pytest.mark.parametrize(("option", "text"), [("--in", "5s"), ("--level", "2")])
def test_send_says_when_a_delayed_message_is_due(
    threaded: Threaded, run: Callable[..., Result], option: str, text: str
) -> None:
    result = run("send", "demo", "hello", option, text)
    assert threaded.broker.requests_of(SEND)[0].properties()["DELAY"] == "2"
    assert result.stdout.endswith(" (in 5s)\n")


def test_send_at_a_time_needs_timers(threaded: Threaded, run: Callable[..., Result]) -> None:
    result = run("send", "demo", "hello", "--at", "2100-01-01T00:00:00.250+00:00")
    assert result.exit_code == 1
    assert result.stderr.startswith("duemq: the broker ")
    assert result.stderr.count("\n") == 1
    threaded.broker.config = "timerWheelEnable=true\n"
    threaded.broker.version = 479
    assert run("send", "demo", "hello", "--at", "2100-01-01T00:00:00.250+00:00").exit_code == 0
    assert threaded.broker.requests_of(SEND)[0].properties()["TIMER_DELIVER_MS"] == "4102444800250"


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_send_needs_a_body_where_standard_input_is_closed(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr("duemq.cli.messages.sys", SimpleNamespace(stdin=None))
    result = run("send", "demo", *arguments)
    assert result.exit_code == 2
    assert "no BODY" in result.stderr


@pytest.mark.parametrize("arguments", [["demo"], ["demo", "-"]])
def test_send_reads_a_body_from_standard_input_as_it_is(
    threaded: Threaded, run: Callable[..., Result], arguments: list[str]
) -> None:
    assert run("send", *arguments, input=b"\x00\xffline\n").exit_code == 0
    assert threaded.broker.requests_of(SEND)[0].body == b"\x00\xffline\n"


def test_send_for_programs(run: Callable[..., Result]) -> None:
    assert json.loads(run("send", "demo", "hello", "--json").stdout)["status"] == "SEND_OK"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["send"], "Missing argument 'TOPIC'"),
        (["send", "de mo", "x"], "has characters other than"),
        (["send", "demo", "x", "--in", "5"], "'5' is not a duration"),
        (["send", "demo", "x", "--at", "tomorrow"], "'tomorrow' is not a time"),
        (["send", "demo", "x", "--level", "0"], "0 is not in the range"),
        (["send", "demo", "x", "--in", "5s", "--level", "2"], "give only one of --in, --at and --level"),
        (["send", "demo", "x", "--replace", "--in", "5s"], "--replace needs exactly one --key"),
        (["send", "demo", "x", "--replace", "--key", "a", "--key", "b"], "--replace needs exactly one --key"),
        (["send", "demo", "x", "--timeout", "0s"], "'0s' leaves no time"),
        (["send", "demo", "x", "--property", "novalue"], "is not NAME=VALUE"),
        (["send", "demo", ""], "the body is empty"),
        (["send", "demo", "x", "--nameserver", "h:x"], "is not an address"),
        (["receive", "demo", "--from", "middle"], "is not a time"),
        (["acl", "allow", "u", "orders", "--action", "Pub"], "'orders' is not a resource; write Topic:NAME"),
        (["acl", "deny", "u", "*", "Queue:q", "--action", "Pub"], "'Queue:q' is not a resource"),
        (["acl", "remove", "u", "Topic:"], "'Topic:' is not a resource"),
        (["receive", "demo", "--tag", "||"], "write * for all"),
    ],
)
def test_wrong_usage_has_exit_code_2(run: Callable[..., Result], arguments: list[str], complaint: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert complaint in result.stderr


@pytest.mark.parametrize(("keys", "advice"), [((), True), (("u", "s"), False)])
def test_advice_for_a_command_without_keys(
    known: FakeBroker, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...], advice: bool
) -> None:
    for name, value in zip(("DUEMQ_ACCESS_KEY", "DUEMQ_SECRET_KEY"), keys, strict=False):
        monkeypatch.setenv(name, value)
    known.on(RequestCode.LIST_PENDING, failure(ResponseCode.NO_PERMISSION, "username cannot be null."))
    result = run("pending", "list")
    assert result.exit_code == 1
    assert "access denied (code 16): username cannot be null" in result.stderr
    assert result.stderr.endswith(" Give the keys of your account with --account FILE\n") == advice


def test_a_file_that_cannot_be_opened_is_named(run: Callable[..., Result]) -> None:
    result = run("user", "init", "root", "--config", "/no/such/directory/broker.conf")
    assert result.exit_code == 1
    assert result.stderr == "duemq: /no/such/directory/broker.conf: No such file or directory\n"


def test_errors_are_one_line_with_exit_code_1(run: Callable[..., Result]) -> None:
    with Threaded() as gone:
        address = gone.broker.address
    for arguments in (["send", "demo", "x"], ["receive", "demo"]):
        result = run(*arguments, "--nameserver", address)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr == f"duemq: cannot connect to {address}: Connection refused\n"


# --- cancel -------------------------------------------------------------------------------------------------------

GONE_LONG_AGO = "was delivered or cancelled long ago, or its store has been compacted since"
IDS = ["7F00000100002A9F000000000000000" + digit for digit in "12"]


@pytest.mark.parametrize(
    ("outcomes", "lines", "code"),
    [
        (["CANCELLED", "ALREADY_CANCELLED"], ["is cancelled", "was already cancelled"], 0),
        (["CANCELLED", "ALREADY_DELIVERED"], ["is cancelled", "was already delivered"], 1),
        (["NO_LONGER_WAITS", "CANCELLED"], [GONE_LONG_AGO, "is cancelled"], 1),
    ],
)
def test_cancel_says_what_became_of_each(
    threaded: Threaded, run: Callable[..., Result], outcomes: list[str], lines: list[str], code: int
) -> None:
    broker = threaded.broker
    table = [BrokerData({0: broker.address}, broker.name, "c")]
    told = [{"msgId": each, "result": outcome} for each, outcome in zip(IDS, outcomes, strict=True)]
    broker.on(RequestCode.GET_BROKER_CLUSTER_INFO, success(body=bodies.cluster_info(table, {"c": [broker.name]})))
    broker.on(RequestCode.CHANGE_PENDING, success(body=fastjson.dumps({"counts": {}, "messages": told})))
    result = run("cancel", *IDS)
    assert (result.exit_code, result.stderr) == (code, "")
    assert result.stdout.splitlines() == [f"{each} {line}" for each, line in zip(IDS, lines, strict=True)]
    as_json = run("cancel", *IDS, "--json")
    assert [json.loads(line) for line in as_json.stdout.splitlines()] == [
        {"id": each, "result": outcome} for each, outcome in zip(IDS, outcomes, strict=True)
    ]


@pytest.mark.parametrize("delay", [("--level", "2"), ("--in", "1s")])
def test_commands_take_the_id_that_send_prints(
    known: FakeBroker, run: Callable[..., Result], delay: tuple[str, str]
) -> None:
    known.on(SEND, success(SendMessageResponse(IDS[0], 0, 0)))
    (named,) = re.findall(r"^sent (\w+) to ", run("send", "demo", "hello", *delay).stdout)
    told = [{"msgId": named, "result": "CANCELLED"}]
    known.on(RequestCode.CHANGE_PENDING, success(body=fastjson.dumps({"counts": {}, "messages": told})))
    for command in (["cancel"], ["pending", "cancel"]):
        result = run(*command, named)
        assert (result.exit_code, result.stdout) == (0, f"{named} is cancelled\n")


@pytest.mark.parametrize("command", [["cancel"], ["pending", "cancel"], ["pending", "reschedule", "--in", "5s"]])
def test_a_senders_id_is_refused_with_what_to_do(
    known: FakeBroker, run: Callable[..., Result], command: list[str]
) -> None:
    sent = json.loads(run("send", "demo", "hello", "--level", "2", "--json").stdout)["message_id"]
    refused = run(*command, sent)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert f"{sent!r} is the id that a sender gave a message" in refused.stderr
    assert f"duemq pending list --topic TOPIC --key {sent}" in refused.stderr


def test_cancel_takes_the_handle_that_send_prints(known: FakeBroker, run: Callable[..., Result]) -> None:
    handle = json.loads(run("send", "demo", "hello", "--level", "2", "--json").stdout)["handle"]
    named = MessageHandle.parse(handle).offset_message_id
    told = [{"msgId": named, "result": "CANCELLED"}]
    known.on(RequestCode.CHANGE_BY_HANDLE, success(body=fastjson.dumps({"counts": {}, "messages": told})))
    for command in (["cancel"], ["pending", "cancel"]):
        result = run(*command, handle)
        assert (result.exit_code, result.stdout) == (0, f"{named} is cancelled\n")
    assert {request.ext["msgId"] for request in known.requests_of(RequestCode.CHANGE_BY_HANDLE)} == {named}
    known.on(RequestCode.CHANGE_BY_HANDLE, failure(ResponseCode.REQUEST_CODE_NOT_SUPPORTED))
    refused = run("cancel", handle)
    assert refused.exit_code == 1
    assert "is not a duemq broker, and cannot cancel a message without a recall handle" in refused.stderr


GONE = "7F00000100002A9F0000000000000042"
"""An id of the broker 127.0.0.1:10911."""


@pytest.mark.parametrize("command", [["cancel"], ["pending", "cancel"], ["pending", "reschedule", "--in", "5s"]])
def test_an_id_of_a_broker_that_is_not_there_is_none_that_never_existed(
    known: FakeBroker, run: Callable[..., Result], command: list[str]
) -> None:
    here = f"7F000001{int(known.address.rpartition(':')[2]):08X}0000000000000042"
    told = [{"msgId": each, "result": "NEVER_EXISTED"} for each in (GONE, here)]
    known.on(RequestCode.CHANGE_PENDING, success(body=fastjson.dumps({"counts": {}, "messages": told})))
    result = run(*command, GONE, here)
    assert (result.exit_code, result.stderr) == (1, "")
    assert result.stdout.splitlines() == [
        f"{GONE} is of the broker 127.0.0.1:10911, which the name servers do not know now; it may wait there",
        f"{here} never waited at these brokers",
    ]
    assert '"BROKER_UNKNOWN"' in run(*command, GONE, "--json").stdout


def test_cancel_says_how_to_go_on_where_there_is_no_answer_in_time(
    known: FakeBroker, run: Callable[..., Result]
) -> None:
    known.on(RequestCode.CHANGE_PENDING, None)
    result = run("cancel", IDS[0], "--timeout", "50ms")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "to CHANGE_PENDING within 0.05 s. Run the same command again to see the result for each" in result.stderr


@pytest.mark.parametrize("arguments", [["cancel"], ["cancel", "x"], ["cancel", IDS[0], "0" * 33]])
def test_cancel_wants_ids(run: Callable[..., Result], arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


# --- pending ------------------------------------------------------------------------------------------------------


@pytest.fixture
def known(threaded: Threaded, monkeypatch: pytest.MonkeyPatch) -> FakeBroker:
    """A broker that the name server knows; times are shown in UTC."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    broker = threaded.broker
    table = [BrokerData({0: broker.address}, broker.name, "c")]
    broker.on(RequestCode.GET_BROKER_CLUSTER_INFO, success(body=bodies.cluster_info(table, {"c": [broker.name]})))
    return broker


def waiting(message_id: str, **other: Any) -> dict[str, Any]:
    names = {"msgId": message_id, "uniqueKey": None, "topic": "orders", "queueId": 3, "deliverMs": 5_000}
    rest = {"delayLevel": 0, "keys": None, "tags": None, "bodySize": 5, "bornMs": 1, "storeMs": 2}
    return {**names, **rest, **other}


def page(*messages: dict[str, Any], counted: int = 0, cursor: str | None = None) -> Any:
    return success(body=fastjson.dumps({"messages": messages, "counted": counted, "cursor": cursor}))


def test_what_waits_is_printed_line_by_line(known: FakeBroker, run: Callable[..., Result]) -> None:
    answers = [
        page(waiting(IDS[0], delayLevel=4, keys="a b", tags="t"), cursor="x"),
        page(waiting(IDS[1], tags="\n")),
    ]
    known.on(RequestCode.LIST_PENDING, *answers)
    result = run("pending", "list", "--topic", "orders", "--key", "k", "--from", "2030-01-01T00:00+00:00")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        f"1970-01-01 00:00:05.000  orders  level 4  [t]  (a b)  {IDS[0]}",
        f"1970-01-01 00:00:05.000  orders  [\\n]  {IDS[1]}",
    ]
    selection = {"topic": "orders", "key": "k", "beginMs": "1893456000000", "limit": "1000", "countOnly": "false"}
    assert known.requests_of(RequestCode.LIST_PENDING)[0].ext == selection
    known.on(RequestCode.LIST_PENDING, *answers)
    (line,) = run("pending", "list", "--json", "--limit", "1").stdout.splitlines()
    assert json.loads(line) == {
        "message_id": IDS[0],
        "offset_message_id": IDS[0],
        "broker_address": known.address,
        "topic": "orders",
        "queue_id": 3,
        "due_time_ms": 5000,
        "delay_level": 4,
        "keys": ["a", "b"],
        "tags": "t",
        "body_size": 5,
        "born_time_ms": 1,
        "store_time_ms": 2,
        "recurrence": None,
    }


def test_what_waits_is_counted(known: FakeBroker, run: Callable[..., Result]) -> None:
    known.on(RequestCode.LIST_PENDING, page(counted=7))
    assert run("pending", "count", "--topic", "orders", "--to", "2030-01-01T00:00+00:00").stdout == "7\n"
    (request,) = known.requests_of(RequestCode.LIST_PENDING)
    assert (request.ext["countOnly"], request.ext["topic"], request.ext["endMs"]) == ("true", "orders", "1893456000000")
    assert json.loads(run("pending", "count", "--json").stdout) == {"count": 7}


def test_a_curve_is_drawn_as_bars(known: FakeBroker, run: Callable[..., Result]) -> None:
    def answer(request: Any) -> Any:
        counts = [0, 100, 1, 50][: int(request.ext["steps"])]
        return success(body=fastjson.dumps({"beginMs": 1, "stepMs": 1, "counts": counts}))

    known.on(RequestCode.DUE_CURVE, answer)
    begin = ["--from", "2030-01-01T00:00+00:00", "--step", "1h"]
    drawn = run("pending", "curve", *begin, "--to", "2030-01-01T03:30+00:00", "--topic", "orders")
    assert (drawn.exit_code, drawn.stderr) == (0, "")
    assert drawn.stdout.splitlines() == [
        "2030-01-01 00:00:00.000    0",
        "2030-01-01 01:00:00.000  100  " + "#" * 50,
        "2030-01-01 02:00:00.000    1  #",
        "2030-01-01 03:00:00.000   50  " + "#" * 25,
    ]
    (request,) = known.requests_of(RequestCode.DUE_CURVE)
    assert request.ext == {"topic": "orders", "beginMs": "1893456000000", "stepMs": "3600000", "steps": "4"}
    assert run("pending", "curve", *begin, "--steps", "1").stdout == "2030-01-01 00:00:00.000  0\n"
    assert json.loads(run("pending", "curve", *begin, "--steps", "2", "--json").stdout) == {
        "begin_ms": 1893456000000,
        "step_ms": 3600000,
        "counts": [0, 100],
    }


@pytest.mark.parametrize(
    ("command", "outcome", "line", "code"),
    [
        (["cancel"], "CANCELLED", "is cancelled", 0),
        (["cancel"], "ALREADY_CANCELLED", "was already cancelled", 0),
        (["cancel"], "ALREADY_DELIVERED", "was already delivered", 1),
        (["cancel"], "NO_LONGER_WAITS", GONE_LONG_AGO, 1),
        (["deliver"], "DELIVERED_NOW", "is due now", 0),
        (["deliver"], "ALREADY_CANCELLED", "was already cancelled", 1),
        (["reschedule", "--in", "1h"], "RESCHEDULED", "has a new time", 0),
    ],
)
def test_messages_are_changed_by_id(
    known: FakeBroker, run: Callable[..., Result], command: list[str], outcome: str, line: str, code: int
) -> None:
    told = {"counts": {outcome: 1}, "messages": [{"msgId": IDS[0], "result": outcome}]}
    known.on(RequestCode.CHANGE_PENDING, success(body=fastjson.dumps(told)))
    result = run("pending", *command, IDS[0])
    assert (result.exit_code, result.stderr, result.stdout) == (code, "", f"{IDS[0]} {line}\n")
    request = known.requests_of(RequestCode.CHANGE_PENDING)[0]
    assert (request.ext["action"], request.ext["msgId"]) == (command[0], IDS[0])
    assert request.ext.get("delayMs") == ("3600000" if "--in" in command else None)
    message = {"offset_message_id": IDS[0], "result": outcome}
    assert json.loads(run("pending", *command, IDS[0], "--json").stdout) == {
        "counts": {outcome: 1},
        "messages": [message],
    }


def test_a_selection_is_changed(known: FakeBroker, run: Callable[..., Result]) -> None:
    known.on(
        RequestCode.CHANGE_PENDING,
        success(body=b'{"counts":{"RESCHEDULED":2,"ALREADY_DELIVERED":1},"messages":[]}'),
        success(body=b'{"counts":{},"messages":[]}'),
    )
    arguments = ["reschedule", "--topic", "t", "--key", "k", "--to", "2029-01-01T00:00+00:00"]
    result = run("pending", *arguments, "--at", "2030-01-01T00:00:00.250+00:00")
    assert result.exit_code == 1
    assert result.stdout.splitlines() == ["2 messages have a new time", "1 message was already delivered"]
    (request,) = known.requests_of(RequestCode.CHANGE_PENDING)
    assert request.ext == {
        "action": "reschedule",
        "deliverMs": "1893456000250",
        "topic": "t",
        "key": "k",
        "endMs": "1861920000000",
    }
    nothing = run("pending", *arguments, "--at", "2030-01-01T00:00:00.250+00:00")
    assert (nothing.exit_code, nothing.stdout) == (0, "no waiting message matches\n")


@pytest.mark.parametrize(
    ("arguments", "what_now"),
    [
        (IDS, "run the same command again to see the result for each message"),
        (
            ["--topic", "t", "--key", "a b", "--from", "2030-01-01T00:00+00:00"],
            "to count the messages that still wait: duemq pending count --topic t --key 'a b' --from "
            "2030-01-01T00:00:00+00:00 --nameserver",
        ),
    ],
)
@pytest.mark.parametrize("command", [["cancel"], ["deliver"], ["reschedule", "--in", "5s"]])
def test_a_change_that_is_not_answered_in_time_goes_on(
    known: FakeBroker, run: Callable[..., Result], command: list[str], arguments: list[str], what_now: str
) -> None:
    known.on(RequestCode.CHANGE_PENDING, None)
    result = run("pending", *command, *arguments, "--timeout", "50ms")
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"to CHANGE_PENDING within 0.05 s. The broker continues with the change; {what_now}" in result.stderr
    known.on(RequestCode.LIST_PENDING, page(counted=7))
    if "count" in what_now:
        again = result.stderr.strip().partition("duemq pending ")[2]
        assert run("pending", *shlex.split(again)).stdout == "7\n"


def test_a_change_that_was_not_begun_does_not_go_on(known: FakeBroker, run: Callable[..., Result]) -> None:
    known.on(RequestCode.HEART_BEAT, None)
    result = run("pending", "cancel", "--topic", "t", "--key", "k", "--timeout", "50ms")
    assert (result.exit_code, "goes on" in result.stderr) == (1, False)
    assert known.requests_of(RequestCode.CHANGE_PENDING) == []


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["cancel"], "give IDs, or else --topic"),
        (["cancel", "x"], "not an offset message id"),
        (["cancel", IDS[0], "--topic", "t"], "give IDs, or else --topic"),
        (["cancel", "--topic", "t"], "at least one of"),
        (["reschedule", IDS[0]], "give one of --in and --at"),
        (["reschedule", IDS[0], "--in", "5s", "--at", "2030-01-01T00:00"], "give one of --in and --at"),
        (["reschedule", IDS[0], "--in", "soon"], "is not a duration"),
        (["list", "--from", "soon"], "is not a time"),
        (["list", "--from", "2h", "--to", "1h"], "--to must be after --from"),
        (["list", "--limit", "0"], "range"),
        (["list", "--timeout", "0ms"], "'0ms' leaves no time"),
        (["cancel", "--topic", "t", "--from", "2030-01-02", "--to", "2030-01-01"], "--to must be after --from"),
        (["curve", "--step", "999ms"], "1s or more"),
        (["curve", "--steps", "10001"], "range"),
        (["curve", "--to", "2020-01-01T00:00"], "after --from"),
        (["curve", "--to", "2100-01-01T00:00", "--steps", "5"], "cannot be combined with --steps"),
        (["curve", "--to", "2100-01-01T00:00", "--step", "1s"], "1 to 10000 steps"),
    ],
)
def test_pending_wants_to_know_which(
    known: FakeBroker, run: Callable[..., Result], arguments: list[str], complaint: str
) -> None:
    result = run("pending", *arguments)
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert known.requests_of(RequestCode.CHANGE_PENDING) == []


def test_send_sends_the_bytes_of_its_argument_also_if_they_are_not_utf8(threaded: Threaded) -> None:
    """They were a UnicodeEncodeError."""
    code = "from duemq.cli import main; main()"
    command = [os.fsencode(sys.executable), b"-c", code.encode(), b"send", b"demo", b"\xff\xc3\xa4"]
    environment = {**os.environ, "DUEMQ_NAMESERVER": threaded.broker.address}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    (request,) = threaded.broker.requests_of(SEND)
    assert request.body == b"\xff\xc3\xa4"


# --- receive ------------------------------------------------------------------------------------------------------


def test_receive_prints_what_is_there_and_ends(threaded: Threaded, run: Callable[..., Result]) -> None:
    threaded.do(threaded.broker.store("demo", b"a", b"b", text="TAGS\x01t"))
    result = run("receive", "demo")
    assert (result.exit_code, result.stderr) == (0, "")
    assert [line.split("  ")[1:] for line in result.stdout.splitlines()] == [["[t]", "a"], ["[t]", "b"]]
    assert threaded.broker.offsets["duemq-cli-demo", "demo", 0] == 2
    threaded.do(threaded.broker.store("demo", b"c"))
    assert run("receive", "demo").stdout.endswith("  c\n")
    assert json.loads(run("receive", "demo", "--json", "--group", "other", "--count", "1").stdout)["body"] == "a"


def test_receive_without_messages_says_so(threaded: Threaded, run: Callable[..., Result]) -> None:
    threaded.broker.topics["demo"] = 4
    result = run("receive", "demo", "--wait", "2s")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "duemq: no message in demo for the group duemq-cli-demo\n"


def test_receive_waits_for_a_first_message_that_comes_later(threaded: Threaded, run: Callable[..., Result]) -> None:
    async def store_when_it_waits() -> None:
        await threaded.broker.until(lambda: len(threaded.broker.requests_of(RequestCode.PULL_MESSAGE)) >= 8)
        await threaded.broker.store("demo", b"late")

    threaded.broker.topics["demo"] = 4
    storing = asyncio.run_coroutine_threadsafe(store_when_it_waits(), threaded.loop)
    assert run("receive", "demo").stdout.endswith("  late\n")
    storing.result(10)


def test_receive_stops_after_so_many_messages(threaded: Threaded, run: Callable[..., Result]) -> None:
    threaded.do(threaded.broker.store("demo", *(b"%d" % number for number in range(5))))
    assert run("receive", "demo", "--follow", "--count", "3").stdout.count("\n") == 3
    assert threaded.broker.offsets["duemq-cli-demo", "demo", 0] == 3


def test_receive_takes_only_the_tags_asked_for(threaded: Threaded, run: Callable[..., Result]) -> None:
    threaded.do(threaded.broker.store("demo", b"a", text="TAGS\x01t"))
    threaded.do(threaded.broker.store("demo", b"b"))
    assert run("receive", "demo", "--tag", "t || u").stdout.endswith("  [t]  a\n")
    assert threaded.broker.offsets[default_group("demo", "t || u"), "demo", 0] == 2


def test_a_body_that_cannot_be_read_is_an_error_and_stays_unread(
    threaded: Threaded, run: Callable[..., Result]
) -> None:
    threaded.do(threaded.broker.store("demo", b"nonsense", sys_flag=1))
    result = run("receive", "demo")
    assert result.exit_code == 1
    assert "a compressed body that does not unpack" in result.stderr
    assert threaded.broker.offsets["duemq-cli-demo", "demo", 0] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_following_with_everything_committed(threaded: Threaded, number: signal.Signals) -> None:
    threaded.do(threaded.broker.store("demo", b"a", b"b"))
    with process(threaded, "receive", "demo", "--follow") as child:
        assert child.stdout is not None
        assert [child.stdout.readline()[-3:] for _ in range(2)] == [" a\n", " b\n"]
        child.send_signal(number)
        assert child.communicate(timeout=20) == ("", "")
        assert child.returncode == 0
    assert threaded.broker.offsets["duemq-cli-demo", "demo", 0] == 2
    assert not threaded.broker.members


def test_a_closed_pipe_ends_quietly_and_what_was_not_read_stays(threaded: Threaded) -> None:
    threaded.do(threaded.broker.store("demo", b"a"))
    with process(threaded, "receive", "demo", "--follow") as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline().endswith(" a\n")
        child.stdout.close()
        threaded.do(threaded.broker.store("demo", b"b"))
        assert child.stderr.read() == ""
        assert child.wait(20) == 0
    assert threaded.broker.offsets["duemq-cli-demo", "demo", 0] == 1


REFUSED = failure(16, "User:billing has no permission to access Topic:demo from 127.0.0.1, no matched policies.")


@pytest.mark.parametrize("options", [["--follow"], ["--wait", "1m"]])
@pytest.mark.parametrize("code", [RequestCode.HEART_BEAT, RequestCode.PULL_MESSAGE])
def test_receive_ends_at_once_with_one_line_if_access_is_refused(
    threaded: Threaded, run: Callable[..., Result], code: RequestCode, options: list[str]
) -> None:
    threaded.do(threaded.broker.store("demo", b"a"))
    threaded.broker.on(code, REFUSED)
    result = run("receive", "demo", *options)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert "User:billing has no permission to access Topic:demo" in result.stderr
    assert result.stderr.endswith("Give the keys of your account with --account FILE\n")


@pytest.mark.parametrize(
    ("code", "answer", "reason"),
    [
        (RequestCode.GET_ROUTEINFO_BY_TOPIC, failure(ResponseCode.TOPIC_NOT_EXIST, ""), "demo: it does not exist"),
        (RequestCode.PULL_MESSAGE, failure(16, "the group may not consume"), "permission denied (code 16): the group"),
        (RequestCode.PULL_MESSAGE, failure(26, "no group"), "has no such consumer group (code 26): no group"),
        (RequestCode.PULL_MESSAGE, None, "demo could not be read within 2s: not all of its brokers have answered"),
    ],
)
def test_receive_says_what_kept_it_from_receiving(
    threaded: Threaded, run: Callable[..., Result], code: RequestCode, answer: Any, reason: str
) -> None:
    threaded.do(threaded.broker.store("demo", b"a"))
    threaded.broker.on(code, answer)
    result = run("receive", "demo", "--wait", "2s")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert reason in result.stderr


def test_receive_does_not_call_a_topic_empty_that_may_not_be_read(
    threaded: Threaded, run: Callable[..., Result]
) -> None:
    route = TopicRoute(
        broker_datas=[BrokerData({0: threaded.broker.address}, "broker-a", "cluster")],
        queue_datas=[QueueData("broker-a", 2, 4, 4)],
    )
    threaded.broker.on(RequestCode.GET_ROUTEINFO_BY_TOPIC, success(body=route.to_json(strict=False)))
    result = run("receive", "demo", "--wait", "2s")
    assert result.exit_code == 1
    assert result.stderr == "duemq: no route to the topic demo: none of its queues can be read now\n"


def test_receive_ends_if_its_broker_fails_in_between(threaded: Threaded, run: Callable[..., Result]) -> None:
    """It used to wait for that broker for good."""
    threaded.do(threaded.broker.store("demo", b"a"))
    pull = FakeBroker.pull
    at = threaded.broker

    async def pull_once(request: Any) -> Any:
        is_first = request.ext["queueId"] == "0" and request.ext["queueOffset"] == "0"
        return await pull(at, request) if is_first else failure(ResponseCode.SYSTEM_ERROR, "disk gone")

    threaded.broker.overrides[RequestCode.PULL_MESSAGE] = pull_once
    result = run("receive", "demo", "--wait", "2s")
    assert result.exit_code == 1
    assert result.stdout.endswith("  a\n")
    assert "disk gone" in result.stderr
    assert result.stderr.count("\n") == 1


def test_receive_tells_if_the_group_will_get_printed_messages_again(
    threaded: Threaded, run: Callable[..., Result]
) -> None:
    threaded.do(threaded.broker.store("demo", b"a"))
    threaded.broker.on(RequestCode.UPDATE_CONSUMER_OFFSET, failure(ResponseCode.SYSTEM_ERROR, "disk full"))
    result = run("receive", "demo")
    assert result.exit_code == 1
    assert result.stdout.endswith("  a\n")
    assert "may receive printed messages again" in result.stderr
    assert "disk full" in result.stderr
    assert result.stderr.count("\n") == 1


def test_receive_does_not_call_a_topic_empty_whose_queues_others_have(
    threaded: Threaded, run: Callable[..., Result]
) -> None:
    threaded.do(threaded.broker.store("demo", b"a"))
    threaded.broker.topics["demo"] = 1
    threaded.broker.members.append("!first")
    result = run("receive", "demo", "--wait", "2s")
    assert result.exit_code == 0
    assert result.stderr == "duemq: other members of the group duemq-cli-demo have all queues of demo\n"


def test_following_reports_a_failure_once_and_goes_on_when_it_is_over(
    threaded: Threaded, run: Callable[..., Result]
) -> None:
    threaded.do(threaded.broker.store("demo", b"a"))
    answers = iter([failure(ResponseCode.SYSTEM_ERROR, "disk slow")] * 12)
    threaded.broker.overrides[RequestCode.PULL_MESSAGE] = lambda request: (
        next(answers, None) or threaded.broker.pull(request)
    )
    with process(threaded, "receive", "demo", "--follow", "--count", "1") as child:
        output, errors = child.communicate(timeout=20)
    assert (child.returncode, output[-3:]) == (0, " a\n")
    assert errors.count("disk slow") == 1


def test_each_topic_and_selection_of_tags_has_a_default_group_of_its_own() -> None:
    """Members of one group with different subscriptions take messages from each other."""
    assert default_group("orders", "*") == "duemq-cli-orders"
    assert default_group("orders", "b || a") == default_group("orders", "a||b||a")
    groups = {default_group(topic, tags) for topic in ("orders", "o" * 126, "o" * 127) for tags in ("*", "a", "b")}
    assert len(groups) == 9
    for group in groups:
        check_topic("%RETRY%" + group)


def test_receive_goes_on_where_the_same_topic_and_tags_were_left(
    threaded: Threaded, run: Callable[..., Result]
) -> None:
    threaded.do(threaded.broker.store("demo", b"a", text="TAGS\x01t"))
    assert run("receive", "demo", "--tag", "t").stdout.endswith("  a\n")
    assert run("receive", "demo", "--tag", "t", "--wait", "1s").stdout == ""
    assert run("receive", "demo").stdout.endswith("  a\n")


# --- serve --------------------------------------------------------------------------------------------------------


def test_serve_hands_its_options_to_the_broker(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    calls: list[dict[str, Any]] = []
    main = ModuleType("duemq.broker.main")

    def serve(**options: Any) -> int:
        calls.append(options)
        return 3

    main.serve = serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "duemq.broker.main", main)
    config = tmp_path / "broker.conf"
    config.touch()
    result = CliRunner().invoke(
        cli.main,
        ["serve", "--config", str(config), "--store", "data", "--host", "h", "--port", "1", "--nameserver-port", "2",
         "--set", "a=b", "--set", "c=d=e", "--log-format", "json"],
    )  # fmt: skip
    assert result.exit_code == 3
    assert calls == [
        {
            "config_file": str(config),
            "store": "data",
            "host": "h",
            "port": 1,
            "nameserver_port": 2,
            "settings": ["a=b", "c=d=e"],
            "log_format": "json",
        }
    ]


def test_serve_without_the_brokers_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "duemq.broker.main", raising=False)
    monkeypatch.setitem(sys.modules, "structlog", None)
    for name in [name for name in sys.modules if name.partition(".")[0] == "broker"]:
        monkeypatch.delitem(sys.modules, name)
    result = CliRunner().invoke(cli.main, ["serve"])
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "pip install 'duemq[broker]'" in result.stderr


# --- help ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["send", "receive", "serve"])
def test_every_option_is_explained(command: str) -> None:
    result = CliRunner().invoke(cli.main, [command, "--help"])
    assert result.exit_code == 0
    found = cli.main.get_command(click.Context(cli.main), command)
    assert found is not None
    for parameter in found.params:
        assert parameter.param_type_name == "argument" or parameter.help


def test_the_list_of_commands_says_of_each_what_it_says_of_itself() -> None:
    result = CliRunner().invoke(cli.main, ["--help"])
    context = click.Context(cli.main)
    listed = dict(line.split(maxsplit=1) for line in result.stdout.partition("Commands:\n")[2].splitlines())
    assert list(listed) == cli.main.list_commands(context)
    for name, text in listed.items():
        command = cli.main.get_command(context, name)
        assert command is not None
        assert text == command.get_short_help_str(80)


def test_the_version_is_told() -> None:
    assert "duemq" in CliRunner().invoke(cli.main, ["--version"]).stdout


def test_a_time_may_be_given_as_a_distance_from_now() -> None:
    begin = datetime.now().astimezone()
    in_an_hour, also, an_hour_ago = moment("1h"), moment("+1h"), moment("-1h")
    spent = datetime.now().astimezone() - begin
    for found, span in ((in_an_hour, 1), (also, 1), (an_hour_ago, -1)):
        assert timedelta(0) <= found - begin - timedelta(hours=span) <= spent
    assert moment("2030-01-31T08:30+02:00") == datetime.fromisoformat("2030-01-31T08:30+02:00")
    for wrong in ("", "-", "1", "tomorrow", "--1h", "+-1h", "9999999999999d"):
        with pytest.raises(click.BadParameter, match="is not a time"):
            moment(wrong)


def test_users_of_a_broker_without_acl_2(known: FakeBroker, run: Callable[..., Result]) -> None:
    known.on(RequestCode.AUTH_LIST_USER, failure(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, "request type 3005"))
    result = run("user", "list")
    assert result.exit_code == 1
    assert "need authenticationEnabled=true" in result.stderr
