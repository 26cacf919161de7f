"""A whole bridge, between a broker of RocketMQ's and an MQTT broker that are both scripted."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from duemq.consumer import Consumer
from duemq.errors import ArgumentError
from duemq.messages import MessageQueue
from duemq.mqtt_bridge.bridge import Bridge
from duemq.mqtt_bridge.carried import Carried
from duemq.mqtt_bridge.rules.file import parse
from duemq.mqtt_bridge.rules.model import Rules, RulesError
from duemq.mqtt_bridge.session import packets
from duemq.mqtt_bridge.session.journal import MessagePosition, Published, State, open_journal
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.requests import bodies
from duemq.protocol.requests.bodies import BrokerData
from tests.peers.ports import free_port
from tests.support.access import USER, signature
from tests.unit.duemq.conftest import INTERVALS
from tests.unit.duemq.fake import FakeBroker, FakeConnection, failure, success
from tests.unit.duemq.mqtt_bridge.fakes import CONNACK, CONNACK_311, CONNACK_PRESENT, Peer, peer
from tests.unit.duemq.test_admin import page

RULES = """
[delayed]
enabled = false
[[to_mqtt]]
topic = "demo"
mqtt_topic = "out"
"""


class Running(NamedTuple):
    """A bridge that runs, and the MQTT broker's side of it."""

    made: Bridge
    task: asyncio.Task[None]
    mqtt_broker: Peer


@asynccontextmanager
async def bridge(
    broker: FakeBroker, directory: Path, mqtt: str, text: str = RULES, head: str = ""
) -> AsyncIterator[Peer]:
    """Run a bridge, and yield the MQTT broker's side of it. `head`: lines in front of the tables of its file of rules;
    `mqtt`: lines of [mqtt]; `text`: the other tables."""
    async with peer() as mqtt_broker, bridge_with(mqtt_broker, broker, directory, mqtt, text, head):
        yield mqtt_broker


@asynccontextmanager
async def bridge_with(
    mqtt_broker: Peer,
    broker: FakeBroker,
    directory: Path,
    mqtt: str,
    text: str = RULES,
    head: str = "",
    address: str | None = None,
    carried: Carried | None = None,
) -> AsyncIterator[Running]:
    """Run a bridge. `address`: that of the name server, by default the broker's."""
    table = [BrokerData({0: broker.address}, broker.name, "c")]
    broker.on(RequestCode.GET_BROKER_CLUSTER_INFO, success(body=bodies.cluster_info(table, {"c": [broker.name]})))
    broker.on(RequestCode.REPORT_BRIDGE, success())
    head = f'nameserver = "{address or broker.address}"\n{head}\n[mqtt]\nclient_id = "b"\nport = {mqtt_broker.port}\n'
    found = parse(f"{head}{mqtt}\n{text}", directory / "bridge.toml", {})
    made = Bridge(found, carried=carried, intervals=INTERVALS)
    task = asyncio.create_task(made.run())
    try:
        yield Running(made, task, mqtt_broker)
    finally:
        task.cancel()
        await asyncio.wait((task,))


class Away:
    """A name server that is away, at `address`, until it comes."""

    def __init__(self, broker: FakeBroker) -> None:
        self._broker = broker
        self._port = free_port()
        self._server: asyncio.Server | None = None
        self.address = f"127.0.0.1:{self._port}"

    async def come(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: FakeConnection(self._broker), "127.0.0.1", self._port)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


async def test_every_request_is_signed(broker: FakeBroker, tmp_path: Path) -> None:
    (tmp_path / "tools.yml").write_text(f"accessKey: {USER[0]}\nsecretKey: {USER[1]}\n")
    text = f'{RULES}[[to_rocketmq]]\nfilter = "in"\ntopic = "In"\nqos = 2\n'
    await broker.store("demo", b"x")
    async with bridge(broker, tmp_path, "", text, 'account_file = "tools.yml"') as mqtt_broker:
        await mqtt_broker.until_carried(1)
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
        sent = await mqtt_broker.until_carried(32)
        acks = [packets.encode_ack(packets.PUBACK, int.from_bytes(body[5:7], "big")) for body in sent]
        pulls = len(broker.requests_of(RequestCode.PULL_MESSAGE))
        mqtt_broker.send(b"".join(acks[:30]))
        await broker.until(lambda: broker.offsets.get(("mqtt-bridge-b-demo", "demo", 0)) == 30)
        assert len(broker.requests_of(RequestCode.PULL_MESSAGE)) == pulls
        mqtt_broker.send(acks[30])
        await mqtt_broker.until_carried(64)


IN = '[delayed]\nenabled = false\n[[to_rocketmq]]\nfilter = "in/#"\ntopic = "In"\nqos = 2\n'


def states(sent: list[bytes]) -> list[bytes]:
    """The states among messages of the bridge, in their order."""
    return [word for body in sent for word in (b"offline", b"online") if b'{"state":"' + word + b'"}' in body]


@pytest.mark.parametrize(
    ("mqtt", "connack", "topic"),
    [
        ("", CONNACK, b"in/#"),
        ('share = "s"', CONNACK, b"$share/s/in/#"),
        ('protocol = "3.1.1"', CONNACK_311, b"in/#"),
    ],
)
@pytest.mark.parametrize(("qos", "kind"), [(1, packets.PUBACK), (2, packets.PUBREC)])
async def test_the_subscriptions_do_not_wait_for_rocketmq(
    broker: FakeBroker, tmp_path: Path, mqtt: str, connack: str, topic: bytes, qos: int, kind: int
) -> None:
    """An MQTT broker that acknowledges messages before the bridge is subscribed loses them."""
    away = Away(broker)
    properties = None if connack == CONNACK_311 else packets.NO_PROPERTIES
    async with (
        peer(connack) as mqtt_broker,
        bridge_with(mqtt_broker, broker, tmp_path, mqtt, IN, address=away.address) as running,
    ):
        [subscribe] = await mqtt_broker.until(0x80)
        assert topic in subscribe
        message = packets.encode_publish("in/a", b"x", qos=qos, retain=False, packet_id=1, properties=properties)
        mqtt_broker.send(bytes(message))
        await mqtt_broker.until(packets.PUBLISH, TOLD)
        assert (broker.requests, running.made.is_ready.is_set()) == ([], False)
        assert not [first for first, _ in mqtt_broker.received if first & 0xF0 == kind]
        await away.come()
        await mqtt_broker.until(kind)
        async with asyncio.timeout(10):
            await running.made.is_ready.wait()
        assert [message.body for (name, _), queue in broker.queues.items() if name == "In" for message in queue] == [
            b"x"
        ]
        assert states(await mqtt_broker.until(packets.PUBLISH, TOLD + 1)) == [b"offline", b"online"]
    away.close()


async def test_it_is_online_when_the_brokers_have_accepted_the_account(
    broker: FakeBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    refused = "org.apache.rocketmq.acl.common.AclException: Check signature failed"
    broker.on(RequestCode.HEART_BEAT, failure(ResponseCode.SYSTEM_ERROR, refused))
    async with peer() as mqtt_broker, bridge_with(mqtt_broker, broker, tmp_path, "") as running:
        await mqtt_broker.until(packets.PUBLISH, TOLD)
        await broker.until(lambda: len(broker.requests_of(RequestCode.HEART_BEAT)) > 5)
        assert not running.made.is_ready.is_set()
        assert "online" not in caplog.text
        assert caplog.text.count("Check signature failed") == 1
        broker.on(RequestCode.HEART_BEAT, success())
        async with asyncio.timeout(10):
            await running.made.is_ready.wait()
        assert states(await mqtt_broker.until(packets.PUBLISH, TOLD + 1)) == [b"offline", b"online"]


@pytest.mark.parametrize(("mqtt", "connack", "code"), [("", CONNACK, 0x87), ('protocol = "3.1.1"', CONNACK_311, 0x80)])
async def test_a_refused_subscription_is_told_and_tried_again(
    broker: FakeBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture, mqtt: str, connack: str, code: int
) -> None:
    caplog.set_level(logging.INFO)
    text = f'{IN}[[to_mqtt]]\ntopic = "demo"\nmqtt_topic = "out"\nqos = 0\n'
    await broker.store("demo", b"goes all the same")
    async with peer(connack) as mqtt_broker:
        mqtt_broker.suback = code
        async with bridge_with(mqtt_broker, broker, tmp_path, mqtt, text) as running:
            await mqtt_broker.until(0x80, 5)
            await mqtt_broker.until_carried(1)
            found = await mqtt_broker.until(packets.PUBLISH)
            assert not running.made.is_ready.is_set()
            assert [body for body in found if b'{"state":"offline","refused_filters":["in/#"]}' in body]
            assert states(found) == []
            assert running.made.status.counters.refused_subscriptions == 1
            assert caplog.text.count("the subscription to 'in/#': the MQTT broker refused it") == 1
            assert "online" not in caplog.text
            # It is still refused over the next connection.
            assert mqtt_broker.writer is not None
            mqtt_broker.writer.close()
            await mqtt_broker.until(0x10, 2)
            tries = len(await mqtt_broker.until(0x80))
            await mqtt_broker.until(0x80, tries + 3)
            assert caplog.text.count("the subscription to 'in/#': the MQTT broker refused it") == 1
            mqtt_broker.suback = None
            async with asyncio.timeout(10):
                await running.made.is_ready.wait()
            assert "the subscription to 'in/#': resolved" in caplog.text
            assert running.made.status.counters.refused_subscriptions == 0
            async with asyncio.timeout(10):
                while states([body for first, body in mqtt_broker.received if first & 0xF0 == packets.PUBLISH]) == []:
                    await asyncio.sleep(0)


@pytest.mark.parametrize(("mqtt", "connack"), [("", CONNACK), ('protocol = "3.1.1"', CONNACK_311)])
async def test_a_lower_qos_than_the_rules_is_told(
    broker: FakeBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture, mqtt: str, connack: str
) -> None:
    told = b'{"state":"online","lowered_filters":{"in/#":1}}'
    async with peer(connack) as mqtt_broker:
        mqtt_broker.suback = 1
        async with bridge_with(mqtt_broker, broker, tmp_path, mqtt, IN) as running:
            async with asyncio.timeout(10):
                await running.made.is_ready.wait()
                while not any(told in body for _, body in mqtt_broker.received):
                    await asyncio.sleep(0)
            assert "'in/#': the MQTT broker grants only QoS 1, and the rule asks for 2" in caplog.text
            # The next connection has all of it.
            mqtt_broker.suback, before = None, len(mqtt_broker.received)
            assert mqtt_broker.writer is not None
            mqtt_broker.writer.close()
            async with asyncio.timeout(10):
                while states([body for _, body in mqtt_broker.received[before:]])[-1:] != [b"online"]:
                    await asyncio.sleep(0)
    assert caplog.text.count("grants only QoS") == 1


async def test_an_old_state_is_overwritten_before_rocketmq_has_been_reached(broker: FakeBroker, tmp_path: Path) -> None:
    """After a kill the MQTT broker may have the old one as a retained message."""
    async with (
        silent() as address,
        peer() as mqtt_broker,
        bridge_with(mqtt_broker, broker, tmp_path, "", IN, address=address),
    ):
        assert states((await mqtt_broker.until(packets.PUBLISH, TOLD))[:1]) == [b"offline"]


@asynccontextmanager
async def silent() -> AsyncIterator[str]:
    """A name server that hangs."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


async def test_subscriptions_are_made_though_what_arrives_first_fills_the_bridge(
    broker: FakeBroker, tmp_path: Path
) -> None:
    """Nothing more is read then, so no SUBACK either."""
    away = Away(broker)
    waiting = [
        packets.encode_publish(
            "in/a", b"x" * 70_000, qos=1, retain=False, packet_id=number, properties=packets.NO_PROPERTIES
        )
        for number in (1, 2, 3)
    ]
    text = f'{IN}[[to_rocketmq]]\nfilter = "new"\ntopic = "New"\n'
    mqtt = "receive_maximum_bytes = 65536"
    connack = CONNACK_PRESENT + b"".join(waiting).hex()
    async with (
        peer(connack) as mqtt_broker,
        bridge_with(mqtt_broker, broker, tmp_path, mqtt, text, address=away.address),
    ):
        await mqtt_broker.until(0x80, 2)
        await away.come()
        await mqtt_broker.until(packets.PUBACK, 3)
        await mqtt_broker.until(packets.PUBLISH, TOLD)
        assert len(await mqtt_broker.until(0x10)) == 1
    away.close()


async def test_it_stops_while_rocketmq_is_away(broker: FakeBroker, tmp_path: Path) -> None:
    away = Away(broker)
    async with (
        peer() as mqtt_broker,
        bridge_with(mqtt_broker, broker, tmp_path, "", IN, address=away.address) as running,
    ):
        await mqtt_broker.until(packets.PUBLISH, TOLD)
        running.made.stop()
        async with asyncio.timeout(10):
            await running.task
        await mqtt_broker.until(0xE0)


@pytest.mark.parametrize("share", ["", 'share = "sh"'])
async def test_it_stops_when_what_is_on_its_way_has_arrived_also_before_it_is_online(
    broker: FakeBroker, tmp_path: Path, share: str
) -> None:
    """Otherwise another bridge that gets the queue would publish it as well."""
    broker.topics["demo"] = 1
    await broker.store("demo", b"x")
    async with peer() as mqtt_broker:
        mqtt_broker.answers_subscribe = False
        text = f'{RULES}[[to_rocketmq]]\nfilter = "in"\ntopic = "In"\n'
        async with bridge_with(mqtt_broker, broker, tmp_path, share, text) as running:
            await mqtt_broker.until(0x80)
            [published] = await mqtt_broker.until_carried(1)
            running.made.stop()
            for _ in range(100):
                await asyncio.sleep(0)
            assert not running.task.done()
            locked = {owner for (_, topic, _), owner in broker.locks.items() if topic == "demo"}
            assert locked == ({"mqtt-bridge@b"} if share else set())
            found = packets.decode_publish(packets.PUBLISH | 2, published, is_v5=True)
            mqtt_broker.send(packets.encode_ack(packets.PUBACK, found.packet_id))
            async with asyncio.timeout(10):
                await running.task
        group = "mqtt-bridge-sh-demo" if share else "mqtt-bridge-b-demo"
        assert (broker.offsets[group, "demo", 0], broker.locks) == (1, {})


async def test_rules_that_rocketmqs_clients_refuse_end_it(
    broker: FakeBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(_: Consumer) -> None:
        raise ArgumentError("never")

    monkeypatch.setattr(Consumer, "start", start)
    async with peer() as mqtt_broker, bridge_with(mqtt_broker, broker, tmp_path, "") as running:
        with pytest.raises(ArgumentError, match="never"):
            async with asyncio.timeout(10):
                await running.task


async def test_what_waits_in_the_bridge_outlives_the_session(broker: FakeBroker, tmp_path: Path) -> None:
    away = Away(broker)
    async with peer() as mqtt_broker, bridge_with(mqtt_broker, broker, tmp_path, "", IN, address=away.address):
        await mqtt_broker.until(0x80)
        message = packets.encode_publish(
            "in/a", b"x", qos=1, retain=False, packet_id=1, properties=packets.NO_PROPERTIES
        )
        mqtt_broker.send(bytes(message))
        await mqtt_broker.until(packets.PUBLISH, TOLD)
        assert mqtt_broker.writer is not None
        mqtt_broker.writer.close()
        await mqtt_broker.until(0x80, 2)
        await away.come()
        await broker.until(lambda: any(name == "In" and queue for (name, _), queue in broker.queues.items()))
        await mqtt_broker.until(packets.PUBLISH, 2 * TOLD + 1)
        assert not [first for first, _ in mqtt_broker.received if first & 0xF0 == packets.PUBACK]
    away.close()


@pytest.mark.parametrize("when", ["before the change", "at the change", "never"])
@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_what_waits_in_the_bridge_outlives_new_rules(
    broker: FakeBroker, tmp_path: Path, qos: int, when: str
) -> None:
    """Whenever the MQTT broker loses its session: then it sends nothing again. It does if it keeps the session."""
    away, carried = Away(broker), Carried()
    message = packets.encode_publish("in/a", b"x", qos=qos, retain=False, packet_id=1, properties=packets.NO_PROPERTIES)
    async with (
        peer() as mqtt_broker,
        bridge_with(mqtt_broker, broker, tmp_path, "", IN, address=away.address, carried=carried) as running,
    ):
        await mqtt_broker.until(0x80)
        mqtt_broker.send(bytes(message))
        await mqtt_broker.until(packets.PUBLISH, TOLD)
        if when == "before the change":
            assert mqtt_broker.writer is not None
            mqtt_broker.writer.close()
            await mqtt_broker.until(packets.PUBLISH, 2 * TOLD)
        running.made.stop()
        async with asyncio.timeout(10):
            await running.task
    connack = CONNACK
    if when == "never":
        connack = CONNACK_PRESENT
        if qos:
            packets.set_dup(message)
            connack += message.hex()
    async with (
        peer(connack) as mqtt_broker,
        bridge_with(mqtt_broker, broker, tmp_path, "", IN, address=away.address, carried=carried) as running,
    ):
        await mqtt_broker.until(0x80)
        await away.come()
        async with asyncio.timeout(10):
            await running.made.is_ready.wait()
        last = packets.encode_publish(
            "in/last", b"last", qos=1, retain=False, packet_id=9, properties=packets.NO_PROPERTIES
        )
        mqtt_broker.send(bytes(last))
        await mqtt_broker.until(packets.PUBACK, 2 if qos == 1 and when == "never" else 1)
        stored = [message.body for (name, _), queue in broker.queues.items() if name == "In" for message in queue]
        assert sorted(stored) == [b"last", b"x"]
    away.close()


@pytest.mark.parametrize(
    ("group", "topic", "is_served"),
    [
        ("mqtt-bridge-b-demo", "demo", True),
        ("mqtt-bridge-b-demo", "%RETRY%mqtt-bridge-b-demo", True),
        ("mqtt-bridge-b-demo", "before", False),
        ("mqtt-bridge-b-low", "low", False),
        ("mqtt-bridge-b-gone", "gone", False),
    ],
)
async def test_messages_of_rules_that_are_gone_are_released(
    broker: FakeBroker, tmp_path: Path, group: str, topic: str, is_served: bool
) -> None:
    text = f'{RULES}qos = 2\n[[to_mqtt]]\ntopic = "low"\nmqtt_topic = "low"\nqos = 1\n'
    journal = await open_journal(tmp_path / "b.state")
    journal.set_published(
        [(MessagePosition(group, MessageQueue(topic, "broker-a", 0), 5, 1), Published(71, State.PUBLISHED))]
    )
    await journal.close()
    async with peer(CONNACK_PRESENT) as mqtt_broker, bridge_with(mqtt_broker, broker, tmp_path, "", text):
        await mqtt_broker.until(packets.PUBLISH, TOLD)
        released = [body for first, body in mqtt_broker.received if first & 0xF0 == packets.PUBREL]
        assert released == ([] if is_served else [b"\0\x47"])


DELAYED = '[delayed]\ntopic = "{}"\ngroup = "{}"\n'


async def check_while_running(bridge: Bridge, rules: Rules, why: str | None) -> None:
    """Run a bridge, and see that it refuses new rules for a reason, or takes them if that is None."""
    task = asyncio.create_task(bridge.run())
    async with asyncio.timeout(10):
        await bridge.is_ready.wait()
    if why is None:
        await bridge.check_change(rules)
    else:
        with pytest.raises(RulesError, match=f"bridge.toml:{why}"):
            await bridge.check_change(rules)
    bridge.stop()
    await task


async def delayed_bridge(broker: FakeBroker, directory: Path, mqtt_broker: Peer, text: str) -> tuple[Bridge, Rules]:
    """A bridge whose delayed messages wait in T for the group G, and rules with this text."""
    head = f'nameserver = "{broker.address}"\n[mqtt]\nport = {mqtt_broker.port}\nclient_id = "b"\n'
    made = parse(head + DELAYED.format("T", "G"), directory / "bridge.toml", {})
    return Bridge(made, intervals=INTERVALS), parse(head + text, directory / "bridge.toml", {})


@pytest.mark.parametrize(
    ("text", "waiting", "why"),
    [
        (DELAYED.format("T", "G"), True, None),
        ('share = "s"\n', False, None),
        ('share = "s"\n', True, "5: messages wait in T"),
        ("", True, "4: messages wait in T"),
        (DELAYED.format("U", "G"), True, "6: messages wait in T"),
        (DELAYED.format("U", "H"), False, None),
        (DELAYED.format("T", "H"), False, "7: the delayed messages in T belong to the group G"),
        ("[delayed]\nenabled = false\n", True, "6: messages wait in T"),
    ],
)
async def test_new_rules_leave_no_delayed_message_behind(
    broker: FakeBroker, tmp_path: Path, text: str, waiting: bool, why: str | None
) -> None:
    table = [BrokerData({0: broker.address}, broker.name, "c")]
    broker.on(RequestCode.GET_BROKER_CLUSTER_INFO, success(body=bodies.cluster_info(table, {"c": [broker.name]})))
    broker.on(RequestCode.LIST_PENDING, page("1") if waiting else page())
    async with peer() as mqtt_broker:
        bridge, rules = await delayed_bridge(broker, tmp_path, mqtt_broker, text)
        await check_while_running(bridge, rules, why)


@pytest.mark.parametrize(
    ("nameserver", "waiting", "why"),
    [
        ("192.0.2.1:9876", True, r"1: messages wait in T, and .* nameserver = \"{old}\"; .*{old};192.0.2.1:9876"),
        ("192.0.2.1:9876", False, None),
        ("192.0.2.1:9876;{old}", True, None),
    ],
)
async def test_new_rules_leave_none_at_other_brokers(
    broker: FakeBroker, tmp_path: Path, nameserver: str, waiting: bool, why: str | None
) -> None:
    broker.on(RequestCode.LIST_PENDING, page("1") if waiting else page())
    table = [BrokerData({0: broker.address}, broker.name, "c")]
    broker.on(RequestCode.GET_BROKER_CLUSTER_INFO, success(body=bodies.cluster_info(table, {"c": [broker.name]})))
    text = DELAYED.format("T", "G")
    async with peer() as mqtt_broker:
        bridge, _ = await delayed_bridge(broker, tmp_path, mqtt_broker, text)
        head = f'nameserver = "{nameserver.format(old=broker.address)}"\n[mqtt]\nclient_id = "b"\n'
        rules = parse(head + text, tmp_path / "bridge.toml", {})
        await check_while_running(bridge, rules, why.format(old=broker.address) if why is not None else None)


async def test_new_rules_are_not_used_either_while_nobody_knows(broker: FakeBroker, tmp_path: Path) -> None:
    async with peer() as mqtt_broker:
        bridge, rules = await delayed_bridge(broker, tmp_path, mqtt_broker, DELAYED.format("U", "G"))
        with pytest.raises(RulesError, match=r"bridge.toml:6: RocketMQ does not report whether messages wait in T"):
            await bridge.check_change(rules)
        bridge, rules = await delayed_bridge(broker, tmp_path, mqtt_broker, DELAYED.format("T", "G"))
        await bridge.check_change(rules)


async def test_delayed_messages_that_are_due_wait_too(broker: FakeBroker, tmp_path: Path) -> None:
    table = [BrokerData({0: broker.address}, broker.name, "c")]
    broker.on(RequestCode.GET_BROKER_CLUSTER_INFO, success(body=bodies.cluster_info(table, {"c": [broker.name]})))
    broker.on(RequestCode.LIST_PENDING, page())
    await broker.store("T", b"due", text="MQTT_BRIDGE\x01b\x02MQTT_TOPIC\x01t\x02MQTT_QOS\x011\x02")
    broker.offsets["G", "T", 0] = 0
    async with peer() as mqtt_broker:
        bridge, rules = await delayed_bridge(broker, tmp_path, mqtt_broker, DELAYED.format("U", "G"))
        task = asyncio.create_task(bridge.run())
        [body] = await mqtt_broker.until_carried(1)
        with pytest.raises(RulesError, match="6: messages wait in T"):
            await bridge.check_change(rules)
        mqtt_broker.send(packets.encode_ack(packets.PUBACK, int.from_bytes(body[3:5], "big")))
        await broker.until(lambda: broker.offsets["G", "T", 0] == 1)
        await bridge.check_change(rules)
        bridge.stop()
        await task


async def test_after_a_start_the_log_tells_what_earlier_rules_have_left(
    broker: FakeBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = await open_journal(tmp_path / "b.state")
    journal.set_delayed("Old", "G")
    await journal.close()
    for waiting, told in ((page("1"), 1), (page(), 0)):
        caplog.clear()
        broker.on(RequestCode.LIST_PENDING, waiting)
        async with (
            peer() as mqtt_broker,
            bridge_with(mqtt_broker, broker, tmp_path, "", DELAYED.format("T", "G")) as running,
        ):
            async with asyncio.timeout(10):
                await running.made.is_ready.wait()
            _, back = await delayed_bridge(broker, tmp_path, mqtt_broker, DELAYED.format("Old", "H"))
            with pytest.raises(RulesError, match=r'bridge.toml:7: .* keep the old group with \[delayed\] group = "G"'):
                await running.made.check_change(back)
        assert caplog.text.count("messages wait in Old, and") == told
        assert caplog.text.count('[delayed] topic = "Old", group = "G"') == told
    async with (
        peer() as mqtt_broker,
        bridge_with(mqtt_broker, broker, tmp_path, "", DELAYED.format("T", "H")) as running,
    ):
        with pytest.raises(RulesError, match=r'bridge.toml:9: .* keep the old group with \[delayed\] group = "G"'):
            async with asyncio.timeout(10):
                await running.task
