"""Makes the archives of one version: its programs run once, and do what most tests have them do."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from tests.peers import install, tools
from tests.peers.brokers.apache import SHORT_LIVED, ApacheBroker, ApacheNameServer
from tests.peers.cache import Artefact, key_of
from tests.peers.class_archives.options import PROGRAMS, archive, name_of, writing
from tests.peers.clients import JavaClient, java_client
from tests.peers.errors import BuildError, CallError
from tests.peers.messages import Outgoing
from tests.peers.mqadmin.tool import MqAdmin

_TOPIC, _GROUP = "topic", "group"


def class_archives(version: str) -> Artefact:
    """The archives of one version of RocketMQ: `namesrv.jsa`, `broker.jsa`, `client.jsa` and `mqadmin.jsa`."""

    def build(target: Path) -> None:
        with tempfile.TemporaryDirectory() as directory, writing(target):
            asyncio.run(_run(version, Path(directory)))
        missing: list[str] = [program for program in PROGRAMS if not archive(target, program).exists()]
        if missing:
            raise BuildError(f"the archives of classes of {version}", missing, "Java did not write them")

    java = tools.run("the version of Java", [tools.find("java"), "-version"])
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return Artefact(name_of(version), key_of(install.java_program(version).key, java, files=sources), build)


async def _run(version: str, directory: Path) -> None:
    nameserver = ApacheNameServer(version, directory / "namesrv")
    await nameserver.start()
    broker = ApacheBroker(version, directory / "broker", nameserver=nameserver.address, java_options=SHORT_LIVED)
    await broker.start()
    client = java_client(version, directory / "client")
    await client.start()
    await client.admin(broker.nameserver).create_topic(broker.address, _TOPIC, 1)
    async with asyncio.timeout(60):
        while not await _has_route(client, broker):
            await asyncio.sleep(0.2)  # 5.3.3 registers a new topic somewhat later
    async with await client.producer(broker.nameserver) as producer:
        await producer.send(_TOPIC, [Outgoing(b"body")])
    async with await client.consumer(broker.nameserver, _GROUP, _TOPIC) as consumer:
        await consumer.receive(1)
    await client.stop()
    commands = [["clusterList"], ["topicStatus", "-t", _TOPIC]]
    tool = MqAdmin(version, directory / "mqadmin")
    await tool.each(commands, nameserver=broker.nameserver)
    await tool.stop()
    await broker.stop()
    await nameserver.stop()


async def _has_route(client: JavaClient, broker: ApacheBroker) -> bool:
    try:
        return bool(await client.queues(broker.nameserver, _TOPIC))
    except CallError:
        return False
