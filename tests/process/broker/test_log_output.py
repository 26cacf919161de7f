"""A broker whose log cannot be written, or is not read, starts, works and stops like any other."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from duemq import Consumer, Producer, ReceivedMessage
from tests.peers import ports

DUEMQ = str(Path(sys.executable).with_name("duemq"))


@contextmanager
def _full_device() -> Iterator[int]:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    yield descriptor
    os.close(descriptor)


@contextmanager
def _pipe_without_reader() -> Iterator[int]:
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@contextmanager
def _pipe_that_nobody_reads() -> Iterator[int]:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, bytes(4096))
    except BlockingIOError:
        os.set_blocking(writer, True)
    yield writer
    os.close(writer)
    os.close(reader)


@contextmanager
def _nothing() -> Iterator[None]:
    yield None


@pytest.mark.parametrize("output", [_full_device, _pipe_without_reader, _pipe_that_nobody_reads, _nothing])
async def test_a_log_that_cannot_be_written(
    tmp_path: Path, output: Callable[[], AbstractContextManager[int | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, nameserver_port = ports.free_broker_port(), ports.free_port()
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    command = [DUEMQ, "serve", "--store", str(tmp_path / "store"), "--port", str(port)]
    command += ["--nameserver-port", str(nameserver_port)]
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(30)
        descriptor = stack.enter_context(output())
        if descriptor is None:
            command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command]
        process = stack.enter_context(subprocess.Popen(command, stdout=descriptor, stderr=descriptor))
        try:
            assert listener.recv(100) == b"READY=1"
            if descriptor is None:
                taken = {os.readlink(f"/proc/{process.pid}/fd/{number}") for number in range(3)}
                assert taken == {"/dev/null"}, "no file of the store is what others print into"
            nameserver = f"127.0.0.1:{nameserver_port}"
            arrived = asyncio.get_running_loop().create_future()

            async def take(message: ReceivedMessage) -> None:
                arrived.set_result(message.body)

            consumer = Consumer("readers", take, nameserver=nameserver, from_="first")
            consumer.subscribe("new")
            async with Producer(nameserver) as producer:
                await producer.send("new", b"body", delay="200ms")
                async with consumer:
                    assert await asyncio.wait_for(arrived, 30) == b"body"
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
