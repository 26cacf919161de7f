"""Goal: a message comes through the bridge as it is, both ways, with both versions of MQTT and each QoS.

Method: mosquitto_pub, or a client of paho's, on one side of a real Mosquitto, duemq's client on the other of a real
broker.
"""

from __future__ import annotations

import json

import pytest

from duemq import Message
from tests.interop.mqtt.environment import Version, World, properties_of, publish_properties, take, user_property

RULES = """
[[to_rocketmq]]
filter = "in/#"
topic = "In"
key = "{2}"
qos = 2
retained = "once"

[[to_mqtt]]
topic = "Out"
mqtt_topic = "out/{key}"
qos = 2
"""
VERSIONS: tuple[Version, ...] = ("5", "mqttv311")


def rules(qos: int = 2, more: str = "") -> str:
    return RULES.replace("qos = 2", f"qos = {qos}") + more


@pytest.mark.parametrize("version", VERSIONS)
async def test_from_mqtt(world: World, version: Version) -> None:
    protocol = "5" if version == "5" else "3.1.1"
    tagged = rules().replace('key = "{2}"', 'key = "{2}"\ntags = "{3}"')
    await world.start(tagged, f'protocol = "{protocol}"')
    for qos in (0, 1, 2):
        await world.publish(f"in/key{qos}/tag", f"hello {qos}", qos=qos, version=version)
    found = {message.keys[0]: message for message in await world.received("In", 3)}
    for qos in (0, 1, 2):
        message = found[f"key{qos}"]
        assert message.body == f"hello {qos}".encode()
        assert message.tags == "tag"
        assert message.properties["MQTT_TOPIC"] == f"in/key{qos}/tag"
        assert message.properties["MQTT_BRIDGE"] == "bridge"


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("version", VERSIONS)
async def test_to_mqtt(world: World, version: Version, qos: int) -> None:
    protocol = "5" if version == "5" else "3.1.1"
    await world.start(rules(qos), f'protocol = "{protocol}"')
    async with world.client(version) as client, world.producer() as producer:
        await client.subscribe("out/#", qos=2)
        await producer.send("Out", "go", keys="door", properties={"unit": "C"})
        [message] = await take(client, 1)
    assert (message.topic.value, message.payload, message.qos, message.retain) == ("out/door", b"go", qos, False)
    if version == "5":
        assert set(properties_of(message)["UserProperty"]) == {("unit", "C"), ("duemq-bridge", "bridge")}


async def test_all_that_mqtt_5_says_of_a_message_goes_through(world: World) -> None:
    back = '[[to_mqtt]]\ntopic = "In"\nmqtt_topic = "back/{key}"\nqos = 1\n'
    await world.start(rules(more=back))
    async with world.client() as client:
        await client.subscribe("back/#", qos=2)
        properties = publish_properties(
            PayloadFormatIndicator=1,
            ContentType="text/plain",
            ResponseTopic="answers",
            CorrelationData=b"\x00\x01\xff",
            MessageExpiryInterval=100,
            UserProperty=[("a", "1"), ("a", "2"), ("KEYS", "x"), ("", "empty"), ("b", "")],
        )
        await client.publish("in/k/t", "hello", qos=1, properties=properties)
        [message] = await take(client, 1)
    got = properties_of(message)
    assert (got["PayloadFormatIndicator"], got["ContentType"], got["ResponseTopic"]) == (1, "text/plain", "answers")
    assert got["CorrelationData"] == b"\x00\x01\xff"
    assert 90 <= got["MessageExpiryInterval"] <= 100
    pairs = [pair for pair in got["UserProperty"] if pair[0] != "duemq-bridge"]
    assert sorted(pairs) == sorted([("a", "1"), ("a", "2"), ("KEYS", "x"), ("", "empty"), ("b", "")])
    assert [pair for pair in pairs if pair[0] == "a"] == [("a", "1"), ("a", "2")]


async def test_payloads_of_any_size(world: World) -> None:
    most = 4 * 1024 * 1024
    await world.start(rules(more='[[to_mqtt]]\ntopic = "In"\nmqtt_topic = "back/{key}"\nqos = 1\n'))
    payloads = {"none": b"", "zero": b"\0", "one": b"x", "large": bytes(range(256)) * 4096, "limit": b"y" * most}
    async with world.client() as client:
        await client.subscribe("back/#", qos=1)
        await client.subscribe("duemq/bridge/bridge/refused")
        for name, payload in payloads.items():
            await client.publish(f"in/{name}", payload, qos=2)
        await client.publish("in/beyond", b"z" * (most + 1), qos=2)
        await client.publish("in/far-beyond", b"z" * (3 * most), qos=1)
        await client.publish("in/last", b"last", qos=1)
        got = {message.topic.value: message.payload for message in await take(client, 8, without=())}
        refused = [json.loads(str(got.pop("duemq/bridge/bridge/refused"), "utf-8"))]
    expected = {f"back/{name}": payload for name, payload in payloads.items()}
    assert got == {**expected, "back/last": b"last"}
    assert refused[0]["topic"] in ("in/beyond", "in/far-beyond")
    assert "bytes" in refused[0]["reason"]


@pytest.mark.parametrize("version", VERSIONS)
async def test_topics_with_odd_characters(world: World, version: Version) -> None:
    topics = ["in/a b", "in//", "in/ä€😀", "in/$x", "in/%41", "in/|a||b", "in/*", "in/.", "in/'\"\\"]
    more = '[[to_mqtt]]\ntopic = "In"\nmqtt_topic = "back/{levels:MQTT_TOPIC}"\nqos = 1\n'
    await world.start(rules(more=more), 'protocol = "5"' if version == "5" else 'protocol = "3.1.1"')
    async with world.client(version) as client:
        await client.subscribe("back/#", qos=1)
        for topic in topics:
            await client.publish(topic, topic, qos=1)
        got = {message.topic.value: message.payload for message in await take(client, len(topics))}
    assert got == {f"back/{topic}": topic.encode() for topic in topics}


@pytest.mark.parametrize(("retained", "count"), [("once", 2), ("never", 1)])
@pytest.mark.parametrize("version", VERSIONS)
async def test_retained_messages_are_taken_over_once_or_never(
    world: World, version: Version, retained: str, count: int
) -> None:
    text = rules().replace('retained = "once"', f'retained = "{retained}"')
    world.bridge.write(text, f'protocol = "{"5" if version == "5" else "3.1.1"}"')
    await world.mosquitto.start()
    await world.publish("in/kept", "kept", "-r")
    await world.broker.start()
    await world.bridge.start()
    await world.bridge.stop()
    await world.bridge.start()
    await world.publish("in/live", "live")
    await world.received("In", count)
    await world.bridge.stop()
    assert sorted(message.body for message in await world.all_messages("In")) == sorted([b"kept", b"live"][-count:])


async def test_what_the_bridge_published_is_not_taken_back(world: World) -> None:
    more = '[[to_rocketmq]]\nfilter = "out/#"\ntopic = "Other"\nqos = 1\n'
    await world.start(rules(more=more))
    async with world.client() as client, world.producer() as producer:
        await client.subscribe("out/#", qos=1)
        await producer.send("Out", "go", keys="door")
        await take(client, 1)
        await client.publish("out/other", "from somebody else", qos=1)
        [message] = await world.received("Other", 1)
    assert message.body == b"from somebody else"


async def test_many_messages_keep_their_order_by_sharding_key(world: World) -> None:
    text = rules().replace('key = "{2}"', 'key = "{2}"\nsharding_key = "{2}"')
    await world.start(text)
    async with world.client(max_inflight_messages=100) as client:
        for number in range(300):
            await client.publish(f"in/{number % 3}/x", str(number), qos=0)
        await client.publish("in/last", "last", qos=1)
        found = await world.received("In", 301)
    for key in "012":
        numbers = [int(message.body) for message in found if message.keys == (key,)]
        assert numbers == list(range(int(key), 300, 3))
        assert len({message.queue for message in found if message.keys == (key,)}) == 1


async def test_batches_from_rocketmq_come_in_order(world: World) -> None:
    await world.start(rules())
    async with world.client() as client, world.producer() as producer:
        await client.subscribe("out/#", qos=2)
        queue = await producer.choose_queue("Out")
        for begin in range(0, 300, 50):
            messages = [Message("Out", str(begin + number), keys="k") for number in range(50)]
            await producer.send_batch(messages, queue=queue)
        found = await take(client, 300)
    assert [int(str(message.payload, "utf-8")) for message in found] == list(range(300))


async def test_user_properties_of_mosquitto_pub(world: World) -> None:
    await world.start(rules())
    await world.publish("in/k/t", "x", *user_property(("unit", "C")))
    [message] = await world.received("In", 1)
    assert message.properties["unit"] == "C"
