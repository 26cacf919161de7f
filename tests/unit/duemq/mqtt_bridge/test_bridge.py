"""A whole bridge, between a broker of RocketMQ's and an MQTT broker that are both scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from duemq.mqtt_bridge.bridge import Bridge
from duemq.mqtt_bridge.rules.file import parse
from duemq.mqtt_bridge.session import packets
from duemq.protocol.codes import RequestCode
from duemq.protocol.requests import bodies
from duemq.protocol.requests.bodies import BrokerData
from tests.unit.duemq.conftest import INTERVALS
from tests.unit.duemq.fake import FakeBroker, success
from tests.unit.duemq.mqtt_bridge.fakes import Peer, peer

RULES = """
[delayed]
enabled = false
[[to_mqtt]]
topic = "demo"
mqtt_topic = "out"
"""


@asynccontextmanager
async def bridge(broker: FakeBroker, directory: Path, mqtt: str, text: str = RULES) -> AsyncIterator[Peer]:
    """Run a bridge; the MQTT broker's side of it."""
    table = [BrokerData({0: broker.address}, broker.name, "c")]
    broker.on(RequestCode.GET_BROKER_CLUSTER_INFO, success(body=bodies.cluster_info(table, {"c": [broker.name]})))
    broker.on(RequestCode.REPORT_BRIDGE, success())
    async with peer() as mqtt_broker:
        head = f'nameserver = "{broker.address}"\n[mqtt]\nclient_id = "b"\nport = {mqtt_broker.port}\n{mqtt}\n'
        found = parse(head + text, directory / "bridge.toml", {})
        made = Bridge(found, intervals=INTERVALS)
        running = asyncio.create_task(made.run())
        try:
            yield mqtt_broker
        finally:
            running.cancel()
            await asyncio.wait((running,))


TOLD = 2
"""Messages in which the bridge tells its state and counters, when it has connected."""


async def test_no_more_bytes_are_taken_from_rocketmq_than_mqtt_acknowledges(broker: FakeBroker, tmp_path: Path) -> None:
    await broker.store("demo", *[b"x" * 40_000] * 100)
    async with bridge(broker, tmp_path, "max_in_flight_bytes = 65536") as mqtt_broker:
        # The scripted broker gives 32 messages at once.
        sent = (await mqtt_broker.until(packets.PUBLISH, TOLD + 32))[TOLD:]
        acks = [packets.encode_ack(packets.PUBACK, int.from_bytes(body[5:7], "big")) for body in sent]
        pulls = len(broker.requests_of(RequestCode.PULL_MESSAGE))
        mqtt_broker.send(b"".join(acks[:30]))
        await broker.until(lambda: broker.offsets.get(("mqtt-bridge-b-demo", "demo", 0)) == 30)
        assert len(broker.requests_of(RequestCode.PULL_MESSAGE)) == pulls
        mqtt_broker.send(acks[30])
        await mqtt_broker.until(packets.PUBLISH, TOLD + 64)
