"""The command line, run in this process against a fake broker that runs in a thread; and as a process where signals
and pipes matter."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result

from duemq import cli
from protocol import bodies, fastjson
from protocol.bodies import BrokerData
from protocol.codes import RequestCode
from tests.unit.duemq.fake import FakeBroker, success

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
    result = run("send", "demo", "hello", "--tag", "a", "--key", "k1", "--key", "k2", "--property", "own=v=w")
    (request,) = threaded.broker.requests_of(SEND)
    properties = request.properties()
    assert request.body == b"hello"
    assert (properties["TAGS"], properties["KEYS"], properties["own"]) == ("a", "k1 k2", "v=w")
    queue = request.send_header().queue_id
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"sent {properties['UNIQ_KEY']} to demo@broker-a:{queue} offset 0\n"


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
        (["send", "demo", "x", "--in", "5"], "'5' is no duration"),
        (["send", "demo", "x", "--at", "tomorrow"], "'tomorrow' is no time"),
        (["send", "demo", "x", "--level", "0"], "0 is not in the range"),
        (["send", "demo", "x", "--in", "5s", "--level", "2"], "contradict each other"),
        (["send", "demo", "x", "--property", "novalue"], "is no NAME=VALUE"),
        (["send", "demo", ""], "an empty body"),
        (["send", "demo", "x", "--nameserver", "h:x"], "is no address"),
        (["receive", "demo", "--from", "middle"], "is no time"),
        (["receive", "demo", "--tag", "||"], "write * for all"),
    ],
)
def test_wrong_usage_has_exit_code_2(run: Callable[..., Result], arguments: list[str], complaint: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert complaint in result.stderr


def test_errors_are_one_line_with_exit_code_1(run: Callable[..., Result]) -> None:
    with Threaded() as gone:
        address = gone.broker.address
    for arguments in (["send", "demo", "x"], ["receive", "demo"]):
        result = run(*arguments, "--nameserver", address)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr == f"duemq: cannot connect to {address}: Connection refused\n"


# --- cancel -------------------------------------------------------------------------------------------------------

IDS = ["0" * 31 + "1", "0" * 31 + "2"]


@pytest.mark.parametrize(
    ("outcomes", "lines", "code"),
    [
        (["CANCELLED", "ALREADY_CANCELLED"], ["is cancelled", "was cancelled before"], 0),
        (["CANCELLED", "ALREADY_DELIVERED"], ["is cancelled", "is delivered already"], 1),
        (["NEVER_EXISTED", "CANCELLED"], ["is no message that waits or waited here", "is cancelled"], 1),
    ],
)
def test_cancel_says_what_became_of_each(
    threaded: Threaded, run: Callable[..., Result], outcomes: list[str], lines: list[str], code: int
) -> None:
    broker = threaded.broker
    table = [BrokerData({0: broker.address}, broker.name, "c")]
    told = [{"msgId": each, "result": outcome} for each, outcome in zip(IDS, outcomes, strict=True)]
    broker.on(RequestCode.GET_BROKER_CLUSTER_INFO, success(body=bodies.cluster_info(table, {"c": [broker.name]})))
    broker.on(RequestCode.CANCEL_MESSAGE, success(body=fastjson.dumps(told)))
    result = run("cancel", *IDS)
    assert (result.exit_code, result.stderr) == (code, "")
    assert result.stdout.splitlines() == [f"{each} {line}" for each, line in zip(IDS, lines, strict=True)]
    as_json = run("cancel", *IDS, "--json")
    assert [json.loads(line) for line in as_json.stdout.splitlines()] == [
        {"id": each, "result": outcome} for each, outcome in zip(IDS, outcomes, strict=True)
    ]


@pytest.mark.parametrize("arguments", [["cancel"], ["cancel", "x"], ["cancel", "0" * 32, "0" * 33]])
def test_cancel_wants_ids(run: Callable[..., Result], arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


# --- receive ------------------------------------------------------------------------------------------------------


def test_receive_prints_what_is_there_and_ends(threaded: Threaded, run: Callable[..., Result]) -> None:
    threaded.do(threaded.broker.store("demo", b"a", b"b", text="TAGS\x01t"))
    result = run("receive", "demo")
    assert (result.exit_code, result.stderr) == (0, "")
    assert [line.split("  ")[1:] for line in result.stdout.splitlines()] == [["[t]", "a"], ["[t]", "b"]]
    assert threaded.broker.offsets["duemq-cli", "demo", 0] == 2
    threaded.do(threaded.broker.store("demo", b"c"))
    assert run("receive", "demo").stdout.endswith("  c\n")
    assert json.loads(run("receive", "demo", "--json", "--group", "other", "--count", "1").stdout)["body"] == "a"


def test_receive_without_messages_says_so(threaded: Threaded, run: Callable[..., Result]) -> None:
    threaded.broker.topics["demo"] = 4
    result = run("receive", "demo", "--wait", "10ms")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "duemq: no message in demo for this group\n"


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
    assert threaded.broker.offsets["duemq-cli", "demo", 0] == 3


def test_receive_takes_only_the_tags_asked_for(threaded: Threaded, run: Callable[..., Result]) -> None:
    threaded.do(threaded.broker.store("demo", b"a", text="TAGS\x01t"))
    threaded.do(threaded.broker.store("demo", b"b"))
    assert run("receive", "demo", "--tag", "t || u").stdout.endswith("  [t]  a\n")
    assert threaded.broker.offsets["duemq-cli", "demo", 0] == 2


def test_a_body_that_cannot_be_read_is_an_error_and_stays_unread(
    threaded: Threaded, run: Callable[..., Result]
) -> None:
    threaded.do(threaded.broker.store("demo", b"nonsense", sys_flag=1))
    result = run("receive", "demo")
    assert result.exit_code == 1
    assert "a compressed body that does not unpack" in result.stderr
    assert threaded.broker.offsets["duemq-cli", "demo", 0] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_following_with_everything_committed(threaded: Threaded, number: signal.Signals) -> None:
    threaded.do(threaded.broker.store("demo", b"a", b"b"))
    with process(threaded, "receive", "demo", "--follow") as child:
        assert child.stdout is not None
        assert [child.stdout.readline()[-3:] for _ in range(2)] == [" a\n", " b\n"]
        child.send_signal(number)
        assert child.communicate(timeout=20) == ("", "")
        assert child.returncode == 0
    assert threaded.broker.offsets["duemq-cli", "demo", 0] == 2
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
    assert threaded.broker.offsets["duemq-cli", "demo", 0] == 1


# --- serve --------------------------------------------------------------------------------------------------------


def test_serve_hands_its_options_to_the_broker(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    calls: list[dict[str, Any]] = []
    main = ModuleType("broker.main")

    def serve(**options: Any) -> int:
        calls.append(options)
        return 3

    main.serve = serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "broker.main", main)
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
    monkeypatch.delitem(sys.modules, "broker.main", raising=False)
    monkeypatch.setitem(sys.modules, "structlog", None)
    for name in [name for name in sys.modules if name.partition(".")[0] == "broker"]:
        monkeypatch.delitem(sys.modules, name)
    result = CliRunner().invoke(cli.main, ["serve"])
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "install duemq[broker]" in result.stderr


# --- help ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["send", "receive", "serve"])
def test_every_option_is_explained(command: str) -> None:
    result = CliRunner().invoke(cli.main, [command, "--help"])
    assert result.exit_code == 0
    for parameter in cli.main.commands[command].params:
        assert parameter.param_type_name == "argument" or parameter.help


def test_the_version_is_told() -> None:
    assert "duemq" in CliRunner().invoke(cli.main, ["--version"]).stdout
