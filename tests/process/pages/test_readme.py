"""What README.md tells a stranger to type is typed here, in its order, against a broker: commands, and the snippets in
Python. The Spark commands and `make` are run by tests/spark and by the continuous integration."""

from __future__ import annotations

import ast
import asyncio
import re
import shlex
import shutil
import subprocess
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from pathlib import Path

from duemq import ChangeResult, Consumer, Producer, SendResult
from duemq.testing import TestClock
from tests.peers.brokers.duemq import DuemqBroker

TEXT = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
DUEMQ = str(Path(sys.executable).with_name("duemq"))


def chapter(title: str) -> str:
    """Return a chapter of the page without its title."""
    (found,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## )", TEXT, re.MULTILINE | re.DOTALL)
    return str(found)


def commands(text: str) -> list[list[str]]:
    """Return the arguments of the command lines of duemq in a chapter."""
    lines = re.findall(r"^    (?:\$ )?(?:\.venv/bin/)?duemq (.*)", text, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


def snippets(text: str) -> list[str]:
    """Return the Python of a chapter."""
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def shape(line: str) -> str:
    """A line that a send prints, without its ids, queue and times."""
    return re.sub(r"[0-9A-F]{32}|\d{4}-\d\d-\d\d \S+|\S+:\d+", "#", line).strip()


async def start(nameserver: str, arguments: list[str], errors: int = STDOUT) -> asyncio.subprocess.Process:
    """Start a command of duemq with another name server than the one that the README takes for granted."""
    command = [DUEMQ, *arguments, "--nameserver", nameserver]
    return await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=errors)


async def run(nameserver: str, arguments: list[str]) -> str:
    """Run a command of duemq, and return what it printed."""
    child = await start(nameserver, arguments)
    out, _ = await child.communicate()
    assert child.returncode == 0, (arguments, out.decode())
    return out.decode()


async def test_the_first_minute(tmp_path: Path) -> None:
    text = chapter("Send a delayed message")
    broker = DuemqBroker(tmp_path / "broker", is_warm=True)
    await broker.start()
    receive, send = commands(text)
    # It says on standard error that the topic does not exist yet.
    receiving = await start(broker.nameserver, receive, DEVNULL)
    try:
        told = await run(broker.nameserver, send)
        assert shape(told) == shape(re.findall(r"^    sent .*", text, re.MULTILINE)[0])
        assert receiving.stdout is not None
        async with asyncio.timeout(30):
            line = (await receiving.stdout.readline()).decode()
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}  \+\d+ms  hello from the past\n", line)
    finally:
        receiving.terminate()
        await receiving.wait()
    # The same in Python, right behind it: the message of a minute ago is not shown again.
    snippet, without_async = snippets(text)
    for call, arguments in (("Producer(", ""), ('Consumer("readers", on_message', ", nameserver=NAMESERVER")):
        assert call in snippet
        snippet = snippet.replace(call, call + (arguments or "NAMESERVER"))
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", f"NAMESERVER = {broker.nameserver!r}\n{snippet}", stdout=PIPE, stderr=STDOUT
    )
    out, _ = await child.communicate()
    found = re.fullmatch(r"b'hello from the past' (\d+) ms late\n", out.decode())
    assert found is not None, out.decode()
    program = without_async.replace("sync.Producer(", f"sync.Producer({broker.nameserver!r}")
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=PIPE, stderr=STDOUT)
    out, _ = await child.communicate()
    assert (child.returncode, out) == (0, b""), out.decode()
    consumer = Consumer("scripts", nameserver=broker.nameserver, from_="first")
    consumer.subscribe("greetings")
    async with consumer, asyncio.timeout(30):
        while (await consumer.receive()).body != b"hello from a script":
            pass
    await broker.stop()


async def test_list_reschedule_and_cancel(tmp_path: Path) -> None:
    broker = DuemqBroker(tmp_path / "broker", is_warm=True)
    await broker.start()
    text = chapter("List, cancel and reschedule waiting messages")
    show, reschedule, cancel = commands(text)
    (snippet,) = snippets(text)
    async with Producer(broker.nameserver) as producer:
        names: dict[str, object] = {"producer": producer}
        await eval(compile(snippet, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
        kept = names["result"]
        assert isinstance(kept, SendResult)
        assert (await producer.cancel(kept.handle)).result is ChangeResult.CANCELLED
    for delay in (["--in", "30m"], ["--level", "16"]):
        told = await run(broker.nameserver, ["send", "reminders", "call back", *delay])
        (sent,) = re.findall(r"^sent (\S+) to ", told)
        assert sent in await run(broker.nameserver, show)
        filled = [[each.replace("MESSAGE-ID", sent) for each in arguments] for arguments in (reschedule, cancel)]
        assert "has a new time" in await run(broker.nameserver, filled[0])
        assert sent not in await run(broker.nameserver, show), "it is due in two hours now"
        assert "cancelled" in await run(broker.nameserver, filled[1])
    await broker.stop()


async def test_messages_that_recur(tmp_path: Path) -> None:
    broker = DuemqBroker(tmp_path / "broker", is_warm=True)
    await broker.start()
    add, show = commands(chapter("Messages that recur"))
    assert "sent " in await run(broker.nameserver, add)
    assert "reports  nightly  cron '0 3 * * *' Europe/Paris\n" in await run(broker.nameserver, show)
    await broker.stop()


async def test_repair_a_store(tmp_path: Path) -> None:
    broker = DuemqBroker(tmp_path / "broker", store=tmp_path / "data", is_warm=True)
    await broker.start()
    async with Producer(broker.nameserver) as producer:
        await producer.send("reminders", b"call back", delay="30m")
    await broker.stop()
    (repair,) = commands(chapter("Repair a store"))
    child = await asyncio.create_subprocess_exec(DUEMQ, *repair, cwd=tmp_path, stdout=PIPE, stderr=STDOUT)
    out, _ = await child.communicate()
    assert child.returncode == 0, out.decode()
    shutil.rmtree(tmp_path / "data" / "consumequeue")
    child = await asyncio.create_subprocess_exec(DUEMQ, *repair, cwd=tmp_path, stdout=PIPE, stderr=STDOUT)
    out, _ = await child.communicate()
    assert (child.returncode, "consumequeue" in out.decode()) == (1, True), out.decode()


def test_the_test(tmp_path: Path) -> None:
    snippet, _ = snippets(chapter("Move the clock in tests"))
    (tmp_path / "test_reminders.py").write_text(snippet)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout, done.stdout


async def test_the_clock(tmp_path: Path) -> None:
    text = chapter("Move the clock in tests")
    (serve,) = commands(text)
    assert serve[-2:] == ["--set", "testClock=true"]
    broker = DuemqBroker(tmp_path / "broker", options=("--set", "testClock=true"), is_warm=True)
    await broker.start()
    consumer = Consumer("readers", nameserver=broker.nameserver)
    consumer.subscribe("reminders")
    _, snippet = snippets(text)
    body = "\n    ".join(snippet.replace("127.0.0.1:9876", broker.nameserver).splitlines())
    names: dict[str, object] = {}
    exec(f"async def check(producer, consumer):\n    {body}\n    return message\n", names)
    async with Producer(broker.nameserver) as producer, consumer, asyncio.timeout(30):
        message = await names["check"](producer, consumer)  # type: ignore[operator]
    assert message.body == b"call back"
    (command,) = re.findall(r"`duemq (clock advance 2h)`", text)
    before = await TestClock(broker.nameserver).now()
    await run(broker.nameserver, command.split())
    assert (await TestClock(broker.nameserver).now() - before).total_seconds() >= 7200
    await broker.stop()
