"""Each command of both versions of mqadmin, run against duemq's broker and Apache's of that version in the same state:
the outputs are the same but for times, sizes, ids and addresses, unless the table says otherwise."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from duemq import Consumer, Message, Producer, ReceivedMessage
from tests.interop.admin.mqadmin_commands import BOTH, COMMANDS, Command
from tests.interop.environment import MqAdmins, SharedBroker, make_broker
from tests.interop.support import eventually
from tests.peers.brokers.broker import Broker
from tests.peers.mqadmin.tool import MqAdmin

TOPIC, GROUP = "Topic", "Group"
RUN = [
    (version, command) for version in BOTH for command in COMMANDS if version in command.versions and not command.test
]
MESSAGES = 6

Outputs = dict[str, dict[str, str]]
"""The outputs of commands, by broker and by the line in the table."""


async def prepare(broker: Broker, tool: MqAdmin, folder: Path) -> dict[str, str]:
    """Bring a new broker into the state that the commands meet; return the values for their arguments."""
    start = [["updateTopic", "-b", broker.address, "-t", TOPIC, "-r", "2", "-w", "2"]]
    start += [["updateSubGroup", "-b", broker.address, "-g", GROUP]]
    await tool.each(start, nameserver=broker.nameserver)
    route = partial(tool.run, "topicRoute", "-t", TOPIC, nameserver=broker.nameserver)
    await eventually(route, lambda shown: '"readQueueNums":2' in "".join(shown.split()))
    # A broker of Apache's has no figures in the first second, and answers with a NoSuchElementException.
    status = partial(tool.run, "brokerStatus", "-b", broker.address, nameserver=broker.nameserver)
    await eventually(status, lambda shown: "putTps" in shown)
    async with Producer(broker.nameserver) as producer:
        sent = await producer.send_many(
            Message(TOPIC, f"body{n}", keys=f"key{n}", tags="ab"[n % 2], sharding_key=str(n % 2))
            for n in range(MESSAGES)
        )
    received = 0
    done = asyncio.Event()

    async def count(_: ReceivedMessage) -> None:
        nonlocal received
        received += 1
        if received == MESSAGES:
            done.set()

    consumer = Consumer(GROUP, count, nameserver=broker.nameserver, from_="first")
    consumer.subscribe(TOPIC)
    async with consumer, asyncio.timeout(60):
        await done.wait()
        await consumer.caught_up()
        await consumer.commit()  # with an answer; the commit of the close has none
    topics, groups = folder / "topics.json", folder / "groups.json"
    topics.write_text(json.dumps([{"topicName": "Listed", "readQueueNums": 2, "writeQueueNums": 2, "perm": 6}]))
    groups.write_text(json.dumps([{"groupName": "ListedGroup"}]))
    return {
        "broker": broker.address,
        "topic": TOPIC,
        "group": GROUP,
        "folder": str(folder),
        "topics_file": str(topics),
        "groups_file": str(groups),
        "offset_id": sent[0].offset_message_id,
        "id": sent[0].message_id,
        "queue": str(sent[0].queue.queue_id),
        "topic_if_new": f"-t {TOPIC}" if tool.version == "5.3.3" else "",
    }


async def run_all(kind: str, tool: MqAdmin, directory: Path) -> dict[str, str]:
    """Return the output of each command, by its line in the table."""
    broker = make_broker(kind, directory / "broker", {})
    await broker.start()
    try:
        values = await prepare(broker, tool, directory)
        commands = [command for with_version, command in RUN if with_version == tool.version]
        lines = [command.line.format(**values).split() for command in commands]
        outputs = await tool.each(lines, nameserver=broker.nameserver)
    finally:
        await broker.kill()
    return dict(zip((command.line for command in commands), outputs, strict=True))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def outputs(
    shared_broker: SharedBroker, mqadmins: MqAdmins, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Callable[[str], Awaitable[Outputs]]]:
    """Returns the outputs by broker, for a version; the commands run when they are first asked for."""
    if shared_broker.target != "duemq":
        pytest.skip("it compares duemq with Apache's brokers")
    found: dict[str, Outputs] = {}

    async def of_version(version: str) -> Outputs:
        if version not in found:
            found[version] = {
                kind.partition("-")[0]: await run_all(kind, mqadmins[version], tmp_path_factory.mktemp("commands"))
                for kind in ("duemq", f"apache-{version}")
            }
        return found[version]

    yield of_version


def normal(output: str) -> list[str]:
    """An output without what differs between any two runs, line by line; tables may come in any order."""
    output = re.sub(r"\b[0-9A-F]{24,}\b", "ID", output)
    output = re.sub(r"/\S+/", "PATH/", output)
    output = re.sub(r"\d[\d.,:-]*", "N", output)
    lines = [" ".join(line.split()) for line in output.splitlines()]
    return sorted(line for line in lines if line and not line.startswith(("at ", "... ")))


@pytest.mark.parametrize(
    ("version", "command"),
    # A command of 5.3.3 waits three seconds for a thread of its own to end, so all of them take minutes.
    [
        pytest.param(*each, marks=[pytest.mark.soak] if each[0] == "5.3.3" else [], id=f"{each[0]}-{n}-{each[1].name}")
        for n, each in enumerate(RUN)
    ],
)
async def test_a_command(outputs: Callable[[str], Awaitable[Outputs]], version: str, command: Command) -> None:
    found = await outputs(version)
    ours, theirs = found["duemq"][command.line], found["apache"][command.line]
    if command.refused is not None:
        assert command.refused in ours
    elif command.differs is not None:
        assert normal(ours) != normal(theirs), "it does not differ any more"
        assert "Exception" not in ours
    else:
        assert normal(ours) == normal(theirs)
