"""Goal: with access control the bridge does everything with an account that may do no more than docs/mqtt.md says; its
secret key is in no log.

Method: the account of the page, and the rules of the page.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from duemq import Consumer, Producer
from tests.interop.mqtt.environment import World, take
from tests.interop.mqtt.test_inside import counters
from tests.support.access import ADMIN, write_accounts

PAGE = (Path(__file__).parents[3] / "docs" / "mqtt.md").read_text(encoding="utf-8")
COUNTERS = "duemq/bridge/bridge-1/counters"
RULES = """
[[to_rocketmq]]
filter = "sensors/+/temp"
topic = "Sensors"
qos = 2
[[to_rocketmq]]
filter = "any/+"
topic = "any-{2}"
[[to_mqtt]]
topic = "Commands"
mqtt_topic = "commands/{key}"
qos = 2
"""


def account() -> tuple[str, str, str]:
    """Return the account of the page, as text and as keys."""
    (block,) = re.findall(r"^    - accessKey: .*\n(?:      .*\n)+", PAGE, re.MULTILINE)
    text = re.sub("^    ", "", block, flags=re.MULTILINE)
    (access,), (secret,) = re.findall("accessKey: (.+)", text), re.findall("secretKey: (.+)", text)
    return text, access, secret


@pytest.mark.parametrize("inside", [False, True])
async def test_an_account_that_may_do_no_more_than_the_page_says(tmp_path: Path, inside: bool) -> None:
    text, access, secret = account()
    home = tmp_path / "home"
    administrator = f"- accessKey: {ADMIN[0]}\n  secretKey: {ADMIN[1]}\n  admin: true\n"
    write_accounts(home, f"accounts:\n{administrator}{text}")
    rules = tmp_path / "bridge" / "bridge.toml"
    properties = {"aclEnable": "true", "rocketmqHome": home} | ({"mqttBridge": rules} if inside else {})
    world = World(tmp_path, broker=properties)
    # With a share the bridge needs the locks of queues as well. The names are the same.
    world.bridge.write(RULES, "" if inside else 'share = "bridge-1"')
    written = rules.read_text().replace('client_id = "bridge"', 'client_id = "bridge-1"')
    rules.write_text(f'account_file = "tools.yml"\n{written}')
    rules.with_name("tools.yml").write_text(f"accessKey: {access}\nsecretKey: {secret}\n")
    keys: dict[str, Any] = {"access_key": ADMIN[0], "secret_key": ADMIN[1]}
    try:
        await asyncio.gather(world.mosquitto.start(), world.broker.start())
        if not inside:
            await world.bridge.start()
        async with world.client() as client, Producer(world.broker.nameserver, **keys) as producer:
            await client.subscribe([(topic, 2) for topic in ("commands/#", "lamp", "duemq/bridge/bridge-1/#")])
            async with asyncio.timeout(30):
                async for message in client.messages:
                    if message.payload == b'{"state":"online"}':
                        break
            consumer = Consumer("readers", nameserver=world.broker.nameserver, from_="first", **keys)
            consumer.subscribe("Sensors")
            async with consumer, asyncio.timeout(30):
                await client.publish("sensors/attic/temp", "20", qos=2)
                received = await consumer.receive()
                assert received.body == b"20"
                await received.ack()
            await producer.send("Commands", "go", keys="door")
            [message] = await take(client, 1)
            assert (message.topic.value, message.payload) == ("commands/door", b"go")
            await client.publish("delayed/100;key=k/lamp", "never", qos=2)
            await client.publish("delayed/recall;key=k/lamp", "", qos=2)
            await client.publish("any/Forbidden", "x", qos=1)
            await client.publish("delayed/1/lamp", "on", qos=2)
            told = {
                message.topic.value: bytes(message.payload) for message in await take(client, 3, without=(COUNTERS,))
            }
        assert told["lamp"] == b"on"
        assert b'"cancelled":1' in told["duemq/bridge/bridge-1/recalled"]
        assert b"topic:any-Forbidden" in told["duemq/bridge/bridge-1/refused"]
        async with asyncio.timeout(30):
            while counters(world.broker, ADMIN).get("mqttBridge.bridge-1.due") != 1:
                await asyncio.sleep(0.2)
    finally:
        await world.close()
    log = (world.broker.stderr if inside else world.bridge.log).read_text()
    assert "connected to the MQTT broker" in log
    assert secret not in log
