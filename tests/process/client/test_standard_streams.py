"""Commands whose standard input, output or error is closed, full, or read by nobody: they end with an exit code that
says so, and with one line or none."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from duemq import Consumer, Producer
from tests.peers.brokers.duemq import DuemqBroker

DUEMQ = str(Path(sys.executable).with_name("duemq"))
CLOSED = "duemq: standard output cannot be written: Bad file descriptor\n"
FULL = "duemq: standard output cannot be written: No space left on device\n"
OUTPUTS = {">&-": CLOSED, "> /dev/full": FULL, "<&- >&-": CLOSED, ">&- 2>&-": "", "> /dev/full 2> /dev/full": ""}
"""What a command that has something to print writes to standard error, by the redirection of its output."""
ERRORS = ["2>&-", "2> /dev/full", ">&- 2>&-", "<&- >&- 2>&-", "> /dev/full 2> /dev/full"]


async def run(command: str, redirection: str, nameserver: str = "") -> tuple[int | None, str, str]:
    """Run a command by the shell; return its exit code, standard output and standard error."""
    line = f'exec "$DUEMQ" {command} {redirection}'
    environment = {"DUEMQ": DUEMQ, "DUEMQ_NAMESERVER": nameserver, "PYTHONPATH": ":".join(sys.path)}
    child = await asyncio.create_subprocess_exec("sh", "-c", line, stdout=PIPE, stderr=PIPE, env=environment)
    out, err = await child.communicate()
    return child.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("command", ["--help", "--version", "pending --help"])
async def test_help_that_cannot_be_written(command: str) -> None:
    for redirection, text in OUTPUTS.items():
        assert await run(command, redirection) == (1, "", text), redirection


async def test_an_error_that_cannot_be_written_keeps_its_exit_code() -> None:
    for redirection in ERRORS:
        assert await run("no-such-command", redirection) == (2, "", ""), redirection
        assert await run("pending list --nameserver 127.0.0.1:1", redirection) == (1, "", ""), redirection


async def test_results_that_cannot_be_written(tmp_path: Path) -> None:
    broker = DuemqBroker(tmp_path, is_warm=True)
    await broker.start()
    async with Producer(broker.nameserver) as producer:
        for number in range(3):
            await producer.send("ready", f"message {number}")
            await producer.send("waiting", "later", delay="1h")
    for command in ("pending list", "send --in 1h waiting x", "receive ready"):
        for redirection, text in OUTPUTS.items():
            assert await run(command, redirection, broker.nameserver) == (1, "", text), (command, redirection)
    consumer = Consumer("duemq-cli-ready", nameserver=broker.nameserver)
    consumer.subscribe("ready")
    async with consumer, asyncio.timeout(60):
        found = {(await consumer.receive()).body for _ in range(3)}
        assert found == {b"message 0", b"message 1", b"message 2"}, "a message that was not printed is not consumed"
    await broker.stop()


def test_a_reader_that_goes_away() -> None:
    """Its end of the pipe is closed before the command prints."""
    for command in ("--help", "pending --help"):
        child = subprocess.Popen([DUEMQ, *command.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.close()
        assert child.stderr is not None
        assert child.stderr.read() == b""
        assert child.wait() in (0, 1)
