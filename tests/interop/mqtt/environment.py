"""The three that these tests run: Mosquitto, a duemq broker, and the bridge between them, each a process."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import aiomqtt
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from duemq import Consumer, Producer
from duemq.messages import ReceivedMessage
from tests.peers import ports, tools
from tests.peers.brokers.broker import HOST
from tests.peers.brokers.duemq import DuemqBroker
from tests.peers.brokers.process import Process

Version = Literal["5", "mqttv311"]
_numbers = itertools.count()
READY = "online: connected"


class Mosquitto:
    """Debian's Mosquitto on a port of its own. `settings`: lines of its configuration. Sessions survive restarts."""

    def __init__(self, directory: Path, settings: Sequence[str] = ()) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.port = ports.free_port()
        lines = [
            f"listener {self.port} {HOST}",
            "allow_anonymous true",
            "user root",
            "persistence true",
            f"persistence_location {directory}/",
            "max_queued_messages 0",
            *settings,
        ]
        self.config = directory / "mosquitto.conf"
        self.config.write_text("\n".join(lines) + "\n")
        program = tools.find("mosquitto")
        self.process = Process("mosquitto", [program, "-c", str(self.config)], directory / "mosquitto.log")

    async def start(self) -> None:
        await self.process.start(r"mosquitto version \S+ running", timeout=20)

    async def stop(self) -> None:
        """Stop it with SIGTERM, so that it saves its sessions."""
        await self.process.stop()

    async def kill(self) -> None:
        await self.process.kill()


class BridgeProcess:
    """`duemq mqtt-bridge` with a file of rules, which `write` makes."""

    def __init__(self, directory: Path, mosquitto: Mosquitto, nameserver: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.config = directory / "bridge.toml"
        self.log = directory / "bridge.log"
        self._mosquitto = mosquitto
        self._nameserver = nameserver
        command = [str(Path(sys.executable).with_name("duemq")), "mqtt-bridge", "--config", str(self.config)]
        self.process = Process("bridge", command, self.log, is_warm=True)

    def write(self, rules: str, mqtt: str = "") -> None:
        """Write the file: `mqtt` is further lines of its table [mqtt], `rules` the tables behind."""
        self.config.write_text(
            f'nameserver = "{self._nameserver}"\n[mqtt]\nport = {self._mosquitto.port}\n'
            f'client_id = "bridge"\nstate = "state"\n{mqtt}\n{rules}\n'
        )

    async def start(self) -> None:
        """Start it; returns when it is connected on both sides."""
        await self.process.start(READY, timeout=30)

    async def launch(self) -> None:
        """Start it; returns when the process is there."""
        await self.process.start(".", timeout=30)

    async def stop(self) -> None:
        await self.process.stop()

    async def kill(self) -> None:
        await self.process.kill()

    async def logged(self, text: str, begin: int = 0) -> None:
        """Wait until a line with this text is in the log behind `begin`, in bytes."""
        while text not in self.log.read_text()[begin:]:
            await asyncio.sleep(0.02)


class World:
    """All three, in a directory of the test's. `settings`: lines of Mosquitto's configuration; `broker`: properties of
    duemq's."""

    def __init__(
        self, directory: Path, settings: Sequence[str] = (), broker: Mapping[str, object] | None = None
    ) -> None:
        self.mosquitto = Mosquitto(directory / "mosquitto", settings)
        self.broker = DuemqBroker(directory / "duemq", broker or {}, is_warm=True)
        self.bridge = BridgeProcess(directory / "bridge", self.mosquitto, self.broker.nameserver)

    async def start(self, rules: str, mqtt: str = "") -> None:
        self.bridge.write(rules, mqtt)
        await asyncio.gather(self.mosquitto.start(), self.broker.start())
        await self.bridge.start()

    async def close(self) -> None:
        for each in (self.bridge.process, self.mosquitto.process):
            if each.running:
                await each.stop()
        if self.broker.running:
            await self.broker.stop()

    def client(self, version: Version = "5", name: str | None = None, **more: Any) -> aiomqtt.Client:
        """Return aiomqtt's client. With a name its session is persistent."""
        protocol = aiomqtt.ProtocolVersion.V5 if version == "5" else aiomqtt.ProtocolVersion.V311
        if version == "5" and name is not None:
            properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
            properties.SessionExpiryInterval = 3600
            more.update(clean_start=False, properties=properties)
        elif name is not None:
            more.update(clean_session=False)
        more.setdefault("timeout", 30)
        return aiomqtt.Client(HOST, self.mosquitto.port, protocol=protocol, identifier=name, **more)

    def producer(self) -> Producer:
        return Producer(self.broker.nameserver)

    @asynccontextmanager
    async def consumer(self, topic: str, group: str = "tests") -> AsyncIterator[Consumer]:
        consumer = Consumer(group, nameserver=self.broker.nameserver, from_="first")
        consumer.subscribe(topic)
        async with consumer:
            yield consumer

    async def received(self, topic: str, count: int) -> list[ReceivedMessage]:
        """Return the first `count` messages of a topic."""
        async with self.consumer(topic) as consumer:
            found: list[ReceivedMessage] = []
            async with asyncio.timeout(30):
                while len(found) < count:
                    message = await consumer.receive()
                    await message.ack()
                    found.append(message)
        return found

    async def all_or_more(self, topic: str, count: int) -> list[ReceivedMessage]:
        """Return the messages of a topic from its beginning until there are `count` different bodies."""
        found: list[ReceivedMessage] = []
        async with self.consumer(topic, f"readers-{next(_numbers)}") as consumer, asyncio.timeout(60):
            while len({message.body for message in found}) < count:
                message = await consumer.receive()
                await message.ack()
                found.append(message)
        return found

    async def all_messages(self, topic: str) -> list[ReceivedMessage]:
        """Return all messages of a topic. No messages must be sent to it meanwhile."""
        found: list[ReceivedMessage] = []

        async def collect(message: ReceivedMessage) -> None:
            found.append(message)

        group = f"readers-{next(_numbers)}"
        consumer = Consumer(group, collect, nameserver=self.broker.nameserver, from_="first")
        consumer.subscribe(topic)
        async with asyncio.timeout(60), consumer:
            await consumer.caught_up()
        return found

    async def publish(
        self, topic: str, payload: bytes | str, *options: str, version: Version = "5", qos: int = 1
    ) -> None:
        """Publish with mosquitto_pub."""
        data = payload if isinstance(payload, bytes) else payload.encode()
        where = ("-h", HOST, "-p", str(self.mosquitto.port), "-V", version)
        await run("mosquitto_pub", *where, "-q", str(qos), "-t", topic, "-s" if data else "-n", *options, data=data)


async def run(*command: str, data: bytes = b"") -> bytes:
    """Run a program to its end and return its output. Fails if the program fails."""
    child = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await child.communicate(data)
    assert child.returncode == 0, (command, out)
    return out


def user_property(*pairs: tuple[str, str]) -> tuple[str, ...]:
    """Options of mosquitto_pub."""
    return tuple(part for name, value in pairs for part in ("-D", "publish", "user-property", name, value))


def publish_properties(**values: Any) -> Properties:
    """Properties of a PUBLISH, by paho's names."""
    properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
    for name, value in values.items():
        setattr(properties, name, value)
    return properties


def properties_of(message: aiomqtt.Message) -> dict[str, Any]:
    """The properties of a message that was received, by paho's names."""
    return {} if message.properties is None else dict(vars(message.properties))


async def take(client: aiomqtt.Client, count: int, *, without: Iterable[str] = ("duemq/",)) -> list[aiomqtt.Message]:
    """Return the next `count` messages of a subscriber, except those to topics that begin with one of `without`."""
    found: list[aiomqtt.Message] = []
    async with asyncio.timeout(30):
        async for message in client.messages:
            if not message.topic.value.startswith(tuple(without)):
                found.append(message)
            if len(found) == count:
                break
    return found
