"""`duemq serve` as a process: its start, its output, its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.peers import ports, warm
from tests.peers.brokers.duemq import DuemqBroker

DUEMQ = str(Path(sys.executable).with_name("duemq"))


def log_lines(broker: DuemqBroker) -> list[dict[str, Any]]:
    return [json.loads(line) for line in broker.stderr.read_text().splitlines()]


def refused(*arguments: str, environment: dict[str, str] | None = None) -> str:
    """Run a start that has to fail with one line and exit code 2; return the line. A start with all imports is the
    question of other tests."""
    reading, writing = os.pipe()
    _, ending = warm.server().start(["duemq", "serve", *arguments], writing, os.environ | (environment or {}))
    os.close(writing)
    with open(reading, encoding="utf-8") as output, ending:
        ending.settimeout(30)
        code = warm.read_number(ending)
        (line,) = output.read().splitlines()
    assert code == 2, line
    return line


async def test_it_says_where_it_listens_and_listens_there(tmp_path: Path) -> None:
    broker = DuemqBroker(tmp_path)
    await broker.start()
    (line,) = [line for line in log_lines(broker) if line["event"] == "listening"]
    assert line["broker"] == f"127.0.0.1:{broker.port}"
    assert line["name_server"] == broker.nameserver
    assert line["store"] == str(broker.store)
    for port in (broker.port, broker.port - 2, broker.nameserver_port):
        socket.create_connection(("127.0.0.1", port), 5).close()
    await broker.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_stops_it_cleanly(tmp_path: Path, number: int) -> None:
    broker = DuemqBroker(tmp_path, is_warm=True)
    await broker.start()
    assert (broker.store / "abort").exists()
    os.kill(broker.pid, number)
    await broker.stop()
    assert broker.returncode == 0
    assert log_lines(broker)[-1]["event"] == "stopped"
    assert not (broker.store / "abort").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_further_signals_do_not_change_the_exit_code(tmp_path: Path, number: int) -> None:
    """A supervisor or a user may send a signal again at any moment of the stop, its last ones included."""
    broker = DuemqBroker(tmp_path, is_warm=True)
    await broker.start()

    async def send_signals() -> None:
        while broker.running:
            os.kill(broker.pid, number)
            await asyncio.sleep(0)

    os.kill(broker.pid, number)
    sending = asyncio.create_task(send_signals())
    await broker.stop()
    with contextlib.suppress(ProcessLookupError):
        await sending
    assert broker.returncode == 0


async def test_it_tells_systemd_when_it_is_ready_and_when_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(path)
        listener.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", path)
        broker = DuemqBroker(tmp_path / "b", is_warm=True)
        await broker.start()
        assert await asyncio.to_thread(listener.recv, 100) == b"READY=1"
        await broker.stop()
        assert await asyncio.to_thread(listener.recv, 100) == b"STOPPING=1"


async def test_an_existing_broker_conf_starts_and_what_is_ignored_is_named_once(tmp_path: Path) -> None:
    broker = DuemqBroker(
        tmp_path,
        {
            "brokerRole": "ASYNC_MASTER",
            "deleteWhen": "04",
            "fileReservedTime": "48",
            "sendMessageThreadPoolNums": "16",
            "useReentrantLockWhenPutMessage": "true",
            "haListenPort": "10912",
        },
        is_warm=True,
    )
    await broker.start()
    warnings = [line for line in log_lines(broker) if line["event"] == "properties_ignored"]
    assert [line["properties"] for line in warnings] == [
        ["haListenPort", "sendMessageThreadPoolNums", "useReentrantLockWhenPutMessage"]
    ]
    await broker.stop()


def test_a_property_that_nobody_knows_is_named_with_the_nearest_one(tmp_path: Path) -> None:
    command = [DUEMQ, "serve", "--store", str(tmp_path), "--set", "brokerNmae=x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    says = "duemq: there is no property brokerNmae; did you mean brokerName?\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", says)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("listenPort=abc", "listenPort=abc: write a whole number"),
        ("flushDiskType=SOMETIMES", "ASYNC_FLUSH, SYNC_FLUSH"),
        ("messageDelayLevel=1s 5x", "'5x' is not a delay"),
        ("autoCreateTopicEnable=yes", "write true or false"),
        ("maxMessageSize=0", "write a number from"),
        ("aclEnable=true", "rocketmqHome=DIRECTORY"),
        ("authorizationEnabled=true", "without authenticationEnabled=true"),
        ('initAuthenticationUser={"username":"a","password":"b"}', "every user of this machine sees it"),
        ("brokerIP1=somewhere", "write an IP address"),
        ("namesrvAddr=nowhere:port", "is not host:port"),
    ],
)
def test_a_bad_value_is_one_clear_line(tmp_path: Path, setting: str, says: str) -> None:
    assert says in refused("--store", str(tmp_path), "--set", setting)


def test_bad_files_and_flags(tmp_path: Path) -> None:
    assert "cannot be read" in refused("--config", str(tmp_path / "missing.conf"))
    conf = tmp_path / "b.conf"
    conf.write_text("# fine\nbrokerName\n")
    assert "line 2: 'brokerName' is not NAME=VALUE" in refused("--config", str(conf))
    assert "write it as NAME=VALUE" in refused("--set", "brokerName")


def test_the_environment_gives_settings_too(tmp_path: Path) -> None:
    line = refused("--store", str(tmp_path), environment={"DUEMQ_flushDiskType": "X"})
    assert "flushDiskType=X" in line


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    port = ports.free_broker_port()
    with socket.create_server(("127.0.0.1", port)):
        line = refused("--store", str(tmp_path), "--port", str(port), "--nameserver-port", str(ports.free_port()))
    assert line == f"duemq: port {port} on 127.0.0.1 is taken by another process"
    assert list(tmp_path.iterdir()) == [], "nothing was written"


async def test_a_store_in_use_is_named(tmp_path: Path) -> None:
    broker = DuemqBroker(tmp_path, is_warm=True)
    await broker.start()
    second = [str(ports.free_broker_port()), "--nameserver-port", str(ports.free_port())]
    line = await asyncio.to_thread(refused, "--store", str(broker.store), "--port", *second)
    assert line == f"duemq: the store is in use by another process: {broker.store}/lock is locked"
    await broker.stop()


def test_a_store_with_other_file_sizes_is_named(tmp_path: Path) -> None:
    (tmp_path / "commitlog").mkdir()
    (tmp_path / "commitlog" / f"{0:020}").write_bytes(bytes(1000))
    second = ["--port", str(ports.free_broker_port()), "--nameserver-port", str(ports.free_port())]
    line = refused("--store", str(tmp_path), *second)
    assert f"{0:020}: has 1000 bytes, but the configured file size is 1073741824" in line


def test_a_directory_that_may_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    second = ["--port", str(ports.free_broker_port()), "--nameserver-port", str(ports.free_port())]
    assert "file" in refused("--store", str(tmp_path / "file" / "store"), *second)
