"""Goal: new rules under load lose nothing, and with QoS 2 nothing comes twice; a message on which Mosquitto closes the
connection holds up no other.

Method: numbered messages go both ways while the file of rules changes again and again; then both ends are counted.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter

from tests.interop.mqtt.environment import World, take

RULES = """
[[to_rocketmq]]
filter = "in/#"
topic = "In"
qos = 2

[[to_mqtt]]
topic = "Out"
mqtt_topic = "out/{levels:where}"
qos = 2
"""
CHANGES = 4


async def test_rules_change_under_load(world: World) -> None:
    await world.start(RULES)
    over = asyncio.Event()
    found: Counter[int] = Counter()
    ended = asyncio.Event()

    async def publish() -> int:
        number = 0
        async with world.client(max_inflight_messages=15) as client:
            client.pending_calls_threshold = 1000
            while not over.is_set():
                await asyncio.gather(*(client.publish("in/x", str(each), qos=2) for each in range(number, number + 15)))
                number += 15
                await asyncio.sleep(0.02)
        return number

    async def send() -> int:
        number = 0
        async with world.producer() as producer:
            while not over.is_set():
                for each in range(number, number + 10):
                    await producer.send("Out", str(each), properties={"where": "x"})
                number += 10
                await asyncio.sleep(0.02)
            await producer.send("Out", "-1", properties={"where": "x"})
        return number

    async def listen(subscribed: asyncio.Event) -> None:
        async with world.client(name="listener") as client:
            await client.subscribe("out/#", qos=2)
            subscribed.set()
            async for message in client.messages:
                if message.topic.value == "out/end":
                    ended.set()
                    return
                found[int(str(message.payload, "utf-8"))] += 1

    subscribed = asyncio.Event()
    listening = asyncio.create_task(listen(subscribed))
    await subscribed.wait()
    publishing, sending = asyncio.create_task(publish()), asyncio.create_task(send())
    for number in range(CHANGES):
        begin = world.bridge.log.stat().st_size
        world.bridge.write(f"{RULES}[[to_rocketmq]]\nfilter = 'other{number}'\ntopic = 'Other'\n")
        await world.bridge.logged("connected to the MQTT broker", begin)
        await asyncio.sleep(0.2)  # of load with these rules
    over.set()
    published, sent = await publishing, await sending
    await world.publish("in/last", "-1", qos=2)
    async with asyncio.timeout(60):
        while set(range(-1, sent)) - found.keys():
            await asyncio.sleep(0.02)
        stored = await world.all_or_more("In", published + 1)
        await world.bridge.stop()
        await world.publish("out/end", "", qos=2)
        await ended.wait()
    await listening
    assert {number: times for number, times in found.items() if times > 1} == {}
    assert Counter(int(message.body) for message in stored) == Counter(range(-1, published))


async def test_a_message_on_which_mosquitto_closes_the_connection(world: World) -> None:
    """Mosquitto takes no topics with more than 200 levels."""
    await world.start(RULES)
    async with world.client() as client, world.producer() as producer:
        await client.subscribe([("out/#", 2), ("duemq/bridge/bridge/refused", 1)])
        await producer.send("Out", "wrong", properties={"where": "/".join("x" * 300)})
        for number in range(5):
            await producer.send("Out", str(number), properties={"where": "x"})
        found = await take(client, 6, without=())
    told = [json.loads(bytes(each.payload)) for each in found if each.topic.value.endswith("/refused")]
    assert ["it closed the connection" in each["reason"] for each in told] == [True]
    others = [bytes(each.payload) for each in found if each.topic.value == "out/x"]
    assert sorted(others) == [b"0", b"1", b"2", b"3", b"4"]


async def test_new_rules_do_not_leave_delayed_messages_behind(world: World) -> None:
    await world.start("")
    async with world.client() as client:
        await client.subscribe("home/#", qos=1)
        await client.publish("delayed/2500ms/home/door", "open", qos=2)
        await client.publish("delayed/1ms/home/first", "first", qos=2)
        await take(client, 1)  # so both are with duemq
        for rules, mqtt in (
            ("", 'share = "s"'),
            ('[delayed]\ntopic = "Other"', ""),
            ('[delayed]\ngroup = "other"', ""),
        ):
            begin = world.bridge.log.stat().st_size
            world.bridge.write(rules, mqtt)
            await world.bridge.logged("the old rules stay", begin)
        [message] = await take(client, 1)
        assert message.payload == b"open"
        # Nothing waits any more as soon as the bridge has Mosquitto's acknowledgement.
        begin = world.bridge.log.stat().st_size
        for number in itertools.count():
            tried = world.bridge.log.stat().st_size
            world.bridge.write("", f'share = "s"  # try {number}')
            await world.bridge.logged("rules", tried)  # stay, or have changed
            if "the old rules stay" not in world.bridge.log.read_text()[tried:]:
                break
        await world.bridge.logged("online: connected", begin)
        await client.publish("delayed/1ms/home/door", "shut", qos=2)
        [message] = await take(client, 1)
        assert message.payload == b"shut"
