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
from tests.support.access import USER, signature
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
async def bridge(
    broker: FakeBroker, directory: Path, mqtt: str, text: str = RULES, head: str = ""
) -> AsyncIterator[Peer]:
    """Run a bridge, and yield the MQTT broker's side of it. `head`: lines in front of the tables of its file of rules;
    `mqtt`: lines of [mqtt]; `text`: the other tables."""
    table = [BrokerData({0: broker.address}, broker.name, "c")]
    broker.on(RequestCode.GET_BROKER_CLUSTER_INFO, success(body=bodies.cluster_info(table, {"c": [broker.name]})))
    broker.on(RequestCode.REPORT_BRIDGE, success())
    async with peer() as mqtt_broker:
        head = f'nameserver = "{broker.address}"\n{head}\n[mqtt]\nclient_id = "b"\nport = {mqtt_broker.port}\n'
        found = parse(f"{head}{mqtt}\n{text}", directory / "bridge.toml", {})
        made = Bridge(found, intervals=INTERVALS)
        running = asyncio.create_task(made.run())
        try:
            yield mqtt_broker
        finally:
            running.cancel()
            await asyncio.wait((running,))


async def test_every_request_is_signed(broker: FakeBroker, tmp_path: Path) -> None:
    (tmp_path / "tools.yml").write_text(f"accessKey: {USER[0]}\nsecretKey: {USER[1]}\n")
    text = f'{RULES}[[to_rocketmq]]\nfilter = "in"\ntopic = "In"\nqos = 2\n'
    await broker.store("demo", b"x")
    async with bridge(broker, tmp_path, "", text, 'account_file = "tools.yml"') as mqtt_broker:
        await mqtt_broker.until(packets.PUBLISH, TOLD + 1)
        message = packets.encode_publish("in", b"x", qos=2, retain=False, packet_id=1, properties=packets.NO_PROPERTIES)
        mqtt_broker.send(bytes(message))
        await mqtt_broker.until(packets.PUBREC)
    codes = {each.code for each in broker.requests}
    assert {RequestCode.PULL_MESSAGE, RequestCode.GET_MAX_OFFSET} <= codes
    assert [
        each.code
        for each in broker.requests
        if each.ext.get("AccessKey") != USER[0] or each.ext.get("Signature") != signature(each.ext, each.body, USER[1])
    ] == []


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
