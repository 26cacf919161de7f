"""Goal: a delayed message arrives at its time, once, and can be recalled; a wrong delay is reported.

Method: as EMQX's documentation has it, and by MQTT 5's user properties. No test asserts how late a message is: each
looks at the deliver time that RocketMQ's broker kept, and that nothing comes before it.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import aiomqtt
import pytest

from duemq import Admin
from tests.interop.mqtt.environment import Version, World, properties_of, publish_properties, take, user_property

RULES = """
[[to_rocketmq]]
filter = "home/#"
topic = "Home"
qos = 2

[delayed]
longest = "1h"
"""
REFUSED = "duemq/bridge/bridge/refused"


def told(message: aiomqtt.Message) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bytes(message.payload))
    return found


@pytest.mark.parametrize("version", ["5", "mqttv311"])
@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_the_message_comes_to_the_plain_topic_at_its_time(world: World, version: Version, qos: int) -> None:
    await world.start(RULES, f'protocol = "{"5" if version == "5" else "3.1.1"}"')
    async with world.client(version) as client:
        await client.subscribe("home/#", qos=2)
        begun = time.time_ns() // 1_000_000
        await world.publish("$delayed/1/home/door", "emqx", qos=qos, version=version)
        await world.publish("delayed/300ms/home/lamp", "ms", qos=qos, version=version)
        await world.publish(f"delayed/@{begun + 600}/home/at", "epoch", qos=qos, version=version)
        found = await take(client, 3)
        ended = time.time_ns() // 1_000_000
    assert {message.topic.value: (message.payload, message.qos) for message in found} == {
        "home/door": (b"emqx", qos),
        "home/lamp": (b"ms", qos),
        "home/at": (b"epoch", qos),
    }
    assert ended - begun >= 1000
    # By the rules that would take a message to the plain topic, RocketMQ's consumers get it, too.
    consumed = await world.received("Home", 3)
    assert {message.properties["MQTT_TOPIC"] for message in consumed} == {"home/door", "home/lamp", "home/at"}


EMQX = {"$delayed/15/x/y": 15, "$delayed/60/a/b": 60, "$delayed/3600/$SYS/topic": 3600}
"""The examples of "Delayed Publish" in EMQX's documentation, with their delays in seconds."""


async def test_the_examples_of_emqxs_documentation(world: World) -> None:
    """Nobody waits for an hour: duemq tells when each is due, and delivers them before. Mosquitto lets no client
    publish to $SYS, and may close the connection, so the bridge's report may be lost, but it is in the log."""
    await world.start(RULES)
    async with world.client() as client, Admin(world.broker.nameserver) as admin:
        for plain in ("x/y", "a/b"):
            await client.subscribe(plain, qos=1)
        begun = time.time_ns() // 1_000_000
        for topic in EMQX:
            await world.publish(topic, topic)
        while len(waiting := [each async for each in admin.pending("MQTT_DELAYED_bridge")]) < len(EMQX):
            await asyncio.sleep(0.02)
        ended = time.time_ns() // 1_000_000
        for due, delay in zip(sorted(each.due_time_ms for each in waiting), EMQX.values(), strict=True):
            assert begun + delay * 1000 <= due <= ended + delay * 1000
        await admin.deliver_now(topic="MQTT_DELAYED_bridge", end=time.time() + 7200)
        found = {message.topic.value: message.payload for message in await take(client, 2)}
        await world.bridge.logged("reason code 0x87")
    assert found == {"x/y": b"$delayed/15/x/y", "a/b": b"$delayed/60/a/b"}


async def test_by_user_properties(world: World) -> None:
    await world.start(RULES)
    async with world.client() as client:
        await client.subscribe("lamp", qos=1)
        properties = publish_properties(UserProperty=[("delay", "200ms"), ("mine", "1")], ContentType="text/plain")
        # To a topic that the bridge subscribes to: a plain topic needs a rule that takes it.
        await client.subscribe("home/#", qos=1)
        await client.publish("home/lamp", "on", qos=1, properties=properties)
        direct, delayed = await take(client, 2)
    assert ("delay", "200ms") in properties_of(direct)["UserProperty"]
    got = properties_of(delayed)
    assert (got["UserProperty"], got["ContentType"]) == ([("mine", "1")], "text/plain")


async def test_recall_and_replace(world: World) -> None:
    await world.start(RULES)
    async with world.client() as client:
        for topic in ("home/#", "duemq/bridge/bridge/recalled"):
            await client.subscribe(topic, qos=2)
        await client.publish("delayed/2;key=a/home/a", "never", qos=2)
        await client.publish("delayed/recall;key=a/home/a", "", qos=2)
        [recalled] = await take(client, 1, without=())
        assert (told(recalled)["topic"], told(recalled)["cancelled"]) == ("home/a", 1)
        for payload, delay in (("old", "2"), ("older", "100"), ("new", "500ms")):
            await client.publish(f"delayed/{delay};key=b;replace/home/b", payload, qos=2)
        await client.publish("delayed/3/home/last", "last", qos=2)
        found = await take(client, 2)
    assert [message.payload for message in found] == [b"new", b"last"]


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_a_wrong_delay_is_reported_and_never_sent(world: World, qos: int) -> None:
    await world.start(RULES)
    async with world.client() as client:
        await client.subscribe(REFUSED, qos=1)
        await client.subscribe("home/#", qos=1)
        for wrong in ("delayed/abc/home/x", "delayed/2h/home/x", "$delayed/-1/home/x", "delayed/10"):
            await client.publish(wrong, "wrong", qos=qos)
            [message] = await take(client, 1, without=())
            assert message.topic.value == REFUSED
            assert told(message)["topic"] == wrong
        await client.publish("delayed/10ms/home/right", "right", qos=qos)
        [message] = await take(client, 1, without=())
    assert message.topic.value == "home/right"


async def test_a_wrong_delay_gets_a_reason_code(world: World) -> None:
    """Mosquitto logs the reason code of the bridge's PUBACK, and keeps the connection."""
    world.mosquitto = type(world.mosquitto)(world.bridge.config.parent.parent / "mosquitto", ("log_type all",))
    world.bridge = type(world.bridge)(world.bridge.config.parent, world.mosquitto, world.broker.nameserver)
    await world.start(RULES)
    async with world.client() as client:
        await client.subscribe("home/#", qos=1)
        await client.publish("delayed/abc/home/x", "wrong", qos=1)
        await client.publish("delayed/abc/home/x", "wrong", qos=2)
        await client.publish("delayed/1ms/home/x", "right", qos=1)
        await take(client, 1)
    log = world.mosquitto.process.output.read_text()
    assert "Received PUBACK from bridge (Mid: 1, RC:131)" in log
    assert "Received PUBREC from bridge (Mid: 2)" in log


async def test_a_message_that_expires_before_is_dropped(world: World) -> None:
    await world.start(RULES)
    async with world.client() as client:
        await client.subscribe("home/#", qos=1)
        short, long = publish_properties(MessageExpiryInterval=1), publish_properties(MessageExpiryInterval=100)
        await client.publish("delayed/1500ms/home/short", "x", qos=1, properties=short)
        await client.publish("delayed/1600ms/home/long", "x", qos=1, properties=long)
        [message] = await take(client, 1)
    assert message.topic.value == "home/long"
    assert properties_of(message)["MessageExpiryInterval"] <= 99


async def test_a_delayed_message_may_be_retained(world: World) -> None:
    await world.start(RULES)
    await world.publish("delayed/10ms/home/door", "open", "-r")
    async with world.client() as first:
        await first.subscribe("home/#", qos=1)
        await take(first, 1)
    async with world.client() as second:
        await second.subscribe("home/#", qos=1)
        [message] = await take(second, 1)
    assert (message.topic.value, message.payload, message.retain) == ("home/door", b"open", True)


async def test_waiting_messages_survive_kills_of_all_three(world: World) -> None:
    await world.start(RULES)
    async with world.client(name="listener") as client:
        await client.subscribe("home/#", qos=2)
        await world.publish("delayed/3/home/door", "later", *user_property(("unit", "C")), qos=2)
        await world.publish("delayed/abc/home/door", "wrong", qos=2)
        await world.bridge.logged("refused a message")  # so that the one before is with RocketMQ
        await asyncio.gather(world.bridge.kill(), world.broker.kill())
        await world.broker.start()
        await world.bridge.start()
        [message] = await take(client, 1)
    assert (message.topic.value, message.payload) == ("home/door", b"later")
