"""Goal: the bridge reaches its MQTT broker by TLS, with user and password, and over WebSocket."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from duemq import Consumer, Producer
from tests.interop.mqtt.environment import World, run
from tests.peers import ports
from tests.peers.brokers.broker import HOST
from tests.support.canary import CANARY

PASSWORD = f"{CANARY}-of-mqtt"
RULES = '[[to_rocketmq]]\nfilter = "in/#"\ntopic = "In"\n'


async def certificates(directory: Path) -> None:
    """A key and a certificate for 127.0.0.1 that signs itself."""
    await run(
        "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test",
        "-addext", f"subjectAltName=IP:{HOST}",
        "-keyout", str(directory / "key.pem"), "-out", str(directory / "ca.pem"),
    )  # fmt: skip


async def goes_through(world: World) -> None:
    await world.publish("in/x", b"y" * 100_000, qos=1)
    [message] = await world.received("In", 1)
    assert message.body == b"y" * 100_000


@pytest.mark.parametrize("protocol", ["5", "3.1.1"])
async def test_websocket(tmp_path: Path, protocol: str) -> None:
    port = ports.free_port()
    world = World(tmp_path, (f"listener {port} {HOST}", "protocol websockets"))
    try:
        await start_at(world, port, f'protocol = "{protocol}"\nwebsocket_path = "/mqtt"')
        await goes_through(world)
    finally:
        await world.close()


@pytest.mark.parametrize("websocket", [False, True])
async def test_tls_with_user_and_password(tmp_path: Path, websocket: bool) -> None:
    await certificates(tmp_path)
    await run("mosquitto_passwd", "-c", "-b", str(tmp_path / "passwords"), "bridge-user", PASSWORD)
    port = ports.free_port()
    settings = [
        "per_listener_settings true",
        f"listener {port} {HOST}",
        f"certfile {tmp_path}/ca.pem",
        f"keyfile {tmp_path}/key.pem",
        f"password_file {tmp_path}/passwords",
        "allow_anonymous false",
        *(["protocol websockets"] if websocket else []),
    ]
    world = World(tmp_path, settings)
    # Settings of a listener stand behind it, and the first one is open to all.
    lines = world.mosquitto.config.read_text().splitlines()
    lines.remove("per_listener_settings true")
    world.mosquitto.config.write_text("\n".join(["per_listener_settings true", *lines]) + "\n")
    (tmp_path / "bridge" / "password").write_text(f"{PASSWORD}\n")
    try:
        more = 'user = "bridge-user"\npassword_file = "password"\n'
        more += 'websocket_path = "/mqtt"\n' if websocket else ""
        await start_at(world, port, f'{more}tls = {{ ca_file = "{tmp_path}/ca.pem" }}')
        await goes_through(world)
    finally:
        await world.close()


async def test_tls_to_rocketmq(tmp_path: Path) -> None:
    await certificates(tmp_path)
    broker = {"tls.server.mode": "enforcing", "tls.server.certPath": tmp_path / "ca.pem"}
    world = World(tmp_path, broker={**broker, "tls.server.keyPath": tmp_path / "key.pem"})
    try:
        rules = f'[tls]\nca_file = "{tmp_path}/ca.pem"\n{RULES}[[to_mqtt]]\ntopic = "Out"\nmqtt_topic = "out"\n'
        await world.start(rules)
        tls = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        tls.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        consumer = Consumer("tests", nameserver=world.broker.nameserver, from_="first", tls=tls)
        consumer.subscribe("In")
        async with world.client() as client, Producer(world.broker.nameserver, tls=tls) as producer, consumer:
            await client.subscribe("#")
            await client.publish("in/x", "to RocketMQ", qos=1)
            assert (await consumer.receive()).body == b"to RocketMQ"
            await client.publish("delayed/1ms/later", "delayed", qos=1)
            await producer.send("Out", "to MQTT")
            wanted = {("later", b"delayed"), ("out", b"to MQTT")}
            async with asyncio.timeout(30):
                async for message in client.messages:
                    wanted.discard((message.topic.value, bytes(message.payload)))
                    if not wanted:
                        break
    finally:
        await world.close()


async def start_at(world: World, port: int, mqtt: str) -> None:
    """Start all three, the bridge with another port of Mosquitto's."""
    world.bridge.write(RULES, mqtt)
    text = world.bridge.config.read_text()
    world.bridge.config.write_text(text.replace(f"port = {world.mosquitto.port}", f"port = {port}"))
    await world.mosquitto.start()
    await world.broker.start()
    await world.bridge.start()
