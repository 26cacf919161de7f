"""A bridge that the broker runs itself (`mqttBridge`): it starts and ends with the broker, and brokerStatus shows its
counters."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from duemq.protocol.codes import RequestCode
from tests.fuzz.client import RawClient
from tests.interop.mqtt.environment import World
from tests.peers.brokers.duemq import DuemqBroker
from tests.support.access import signed
from tests.support.wire import request


def counters(broker: DuemqBroker, account: tuple[str, str] | None = None) -> dict[str, int]:
    """Return the figures of bridges in the status of a broker; `account` signs the request."""
    with RawClient(int(broker.address.rpartition(":")[2])) as client:
        answer = client.ask(signed(request(RequestCode.GET_BROKER_RUNTIME_INFO), account))
    table = json.loads(bytes(answer.body))["table"]
    return {name: int(value) for name, value in table.items() if name.startswith("mqttBridge.")}


async def test_a_broker_runs_its_own_bridge(tmp_path: Path) -> None:
    rules = tmp_path / "bridge.toml"
    world = World(tmp_path, broker={"mqttBridge": str(rules)})
    rules.write_text(
        f'nameserver = "{world.broker.nameserver}"\n[mqtt]\nclient_id = "inside"\nport = {world.mosquitto.port}\n'
    )
    await asyncio.gather(world.mosquitto.start(), world.broker.start())
    try:
        async with world.client() as client, asyncio.timeout(60):
            await client.subscribe([("duemq/bridge/inside", 1), ("lamp", 1)])
            messages = client.messages
            async for message in messages:
                if message.payload == b'{"state":"online"}':
                    break
            await client.publish("$delayed/1/lamp", b"on", qos=1)
            message = await anext(messages)
            assert (str(message.topic), message.payload) == ("lamp", b"on")
            while counters(world.broker).get("mqttBridge.inside.due") != 1:
                await asyncio.sleep(0.2)
            await world.broker.stop()
            message = await anext(messages)
            assert (str(message.topic), message.payload) == ("duemq/bridge/inside", b'{"state":"offline"}')
    finally:
        await world.close()
