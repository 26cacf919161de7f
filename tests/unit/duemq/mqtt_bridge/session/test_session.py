"""The connection, against a broker that is scripted packet by packet."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import time
from pathlib import Path

import pytest

from duemq.mqtt_bridge.rules.model import MqttSubscription
from duemq.mqtt_bridge.session import packets
from duemq.mqtt_bridge.session.client import TIMEOUT, Grant, MqttConnectionError, Session
from duemq.mqtt_bridge.session.packets import Ack, Publish, encode_ack, encode_publish
from tests.unit.duemq.mqtt_bridge.fakes import CONNACK_PRESENT, peer, rules


class Received(list[Publish | Ack]):
    """The packets that a session handed over, and the number of lists in which they came."""

    def __init__(self) -> None:
        super().__init__()
        self.lists = 0
        self._changed = asyncio.Event()

    def __call__(self, items: list[Publish | Ack]) -> None:
        self.lists += 1
        self += items
        self._changed.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self) < count:
                self._changed.clear()
                await self._changed.wait()


def session(port: int, received: Received, directory: Path, limit: int = 1 << 20) -> Session:
    ids = itertools.count(100)
    connection = rules("", directory, f"port = {port}\nreceive_maximum = 33").connection
    return Session(connection, will=("s", b"gone"), limit=limit, received=received, new_id=lambda: next(ids))


def publish(packet_id: int, payload: bytes = b"x", qos: int = 2) -> bytes:
    data = encode_publish("t", payload, qos=qos, retain=False, packet_id=packet_id, properties=packets.NO_PROPERTIES)
    return bytes(data)


async def test_it_connects_as_one_who_comes_back(tmp_path: Path) -> None:
    async with peer(CONNACK_PRESENT) as broker, session(broker.port, Received(), tmp_path) as client:
        assert client.is_present
        [connect] = await broker.until(0x10)
        assert connect[:7] == b"\x00\x04MQTT\x05"
        assert connect[7] == 0b00101100  # will, retained, with QoS 1; no clean start
        assert bytes.fromhex("11ffffffff") in connect  # session expiry: never
        assert bytes.fromhex("210021") in connect  # receive maximum


async def test_the_kernel_does_not_hold_back_small_packets(tmp_path: Path) -> None:
    async with peer() as broker, session(broker.port, Received(), tmp_path) as client:
        sock = client._client.socket()
        assert sock is not None
        with socket.socket(fileno=os.dup(sock.fileno())) as same:
            assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_what_the_broker_allows_is_known(tmp_path: Path) -> None:
    connack = "20" + "0f" + "0000" + "0c" + "210014" + "2401" + "2500" + "2700100000"
    async with peer(connack) as broker, session(broker.port, Received(), tmp_path) as client:
        limits = client.limits
        assert (limits.receive_maximum, limits.maximum_qos, limits.retain, limits.packet_bytes) == (
            20,
            1,
            False,
            1 << 20,
        )


async def test_a_refused_connection_is_told(tmp_path: Path) -> None:
    async with peer("2003008700") as broker:
        with pytest.raises(MqttConnectionError, match="Not authorized"):
            async with session(broker.port, Received(), tmp_path):
                pass
    with pytest.raises(MqttConnectionError, match="refused"):
        async with session(broker.port, Received(), tmp_path):
            pass


async def test_an_answer_is_not_waited_for_when_the_connection_is_lost(tmp_path: Path) -> None:
    async with asyncio.timeout(TIMEOUT / 2):
        async with peer(ends=0x10) as broker:
            with pytest.raises(MqttConnectionError, match="lost the connection"):
                async with session(broker.port, Received(), tmp_path):
                    pass
        async with peer(ends=0x80) as broker, session(broker.port, Received(), tmp_path) as client:
            with pytest.raises(MqttConnectionError, match="lost the connection"):
                await client.subscribe_to("a/#", MqttSubscription("a/#", 2, "once"))
        async with peer(ends=0xA0) as broker, session(broker.port, Received(), tmp_path) as client:
            with pytest.raises(MqttConnectionError, match="lost the connection"):
                await client.unsubscribe_from("a/#")


async def test_an_answer_has_time_until_the_bridge_reads_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with peer() as broker, session(broker.port, Received(), tmp_path) as client:
        # Not before, since the answer to CONNECT takes longer.
        monkeypatch.setattr("duemq.mqtt_bridge.session.client.TIMEOUT", 0.001)
        client.pause()
        subscribing = asyncio.create_task(client.subscribe_to("a/#", MqttSubscription("a/#", 2, "once")))
        await broker.until(0x80)
        done, _ = await asyncio.wait((subscribing,), timeout=0.05)
        assert not done
        monkeypatch.undo()
        client.resume()
        assert await subscribing == Grant(2)


async def test_nothing_is_acknowledged_by_itself(tmp_path: Path) -> None:
    received = Received()
    async with peer() as broker, session(broker.port, received, tmp_path) as client:
        broker.send(publish(1, qos=1) + publish(2) + encode_ack(packets.PUBREL, 2) + encode_ack(packets.PUBREC, 9))
        await received.until(4)
        assert received.lists == 1
        assert [each.packet_id for each in received] == [1, 2, 2, 9]
        client.send(encode_ack(packets.PUBCOMP, 77))
        await broker.until(packets.PUBCOMP)
        # What paho would have answered by itself would have come before.
        assert [first & 0xF0 for first, _ in broker.received[1:]] == [packets.PUBCOMP]


async def test_what_comes_with_the_connack_is_not_lost(tmp_path: Path) -> None:
    received = Received()
    async with peer(CONNACK_PRESENT + publish(5).hex()) as broker, session(broker.port, received, tmp_path):
        await received.until(1)
        assert received[0].packet_id == 5


async def test_of_a_message_that_is_too_large_the_head_comes(tmp_path: Path) -> None:
    received = Received()
    async with peer() as broker, session(broker.port, received, tmp_path, limit=200_000):
        broker.send(publish(1, b"x" * 1_000_000) + publish(2))
        await received.until(2)
        first = received[0]
        assert isinstance(first, Publish)
        assert (first.topic, len(first.payload) + first.missing) == ("t", 1_000_000)
        assert first.missing > 0
        assert received[1].packet_id == 2


async def test_what_is_sent_in_one_turn_goes_in_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with peer() as broker, session(broker.port, Received(), tmp_path) as client:
        written: list[int] = []
        send = client._client._sock_send

        def counted(data: bytes) -> int:
            written.append(send(data))
            return written[-1]

        monkeypatch.setattr(client._client, "_sock_send", counted)
        for number in range(1, 1001):
            client.send(encode_ack(packets.PUBACK, number))
        await broker.until(packets.PUBACK, 1000)
        assert written == [1000 * len(encode_ack(packets.PUBACK, 1))]


async def test_a_broker_that_does_not_read_is_waited_for(tmp_path: Path) -> None:
    async with peer() as broker, session(broker.port, Received(), tmp_path) as client:
        client.send(publish(1, b"x" * 20_000_000, qos=1))
        await client.drained()
        [body] = await broker.until(packets.PUBLISH)
        assert len(body) > 1_000_000


async def test_a_paused_connection_reads_nothing(tmp_path: Path) -> None:
    received = Received()
    async with peer() as broker, session(broker.port, received, tmp_path) as client:
        client.pause()
        broker.send(publish(1))
        client.send(encode_ack(packets.PUBACK, 9))
        await broker.until(packets.PUBACK)
        await asyncio.sleep(0)
        assert received == []
        client.resume()
        await received.until(1)
        broker.send(publish(2))
        await received.until(2)


async def test_a_pause_lasts_longer_than_the_keepalive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RocketMQ may be away for hours."""
    received = Received()
    passed = 0.0
    monkeypatch.setattr("paho.mqtt.client.time_func", lambda: time.monotonic() + passed)
    monkeypatch.setattr("duemq.mqtt_bridge.session.client._MISC_EVERY", 0.001)
    async with peer() as broker, session(broker.port, received, tmp_path) as client:
        client.pause()
        broker.send(publish(1))
        for count in (1, 2, 3):
            passed += 61.0
            await broker.until(0xC0, count)
        client.resume()
        await received.until(1)
        assert not client.is_lost


async def test_packet_ids_of_subscriptions_are_the_bridges(tmp_path: Path) -> None:
    async with peer() as broker, session(broker.port, Received(), tmp_path) as client:
        assert await client.subscribe_to("a/#", MqttSubscription("a/#", 2, "once")) == Grant(2)
        assert await client.subscribe_to("b/#", MqttSubscription("b/#", 1, "never")) == Grant(1)
        first, second = await broker.until(0x80, 2)
        assert (first[:2], second[:2]) == (b"\x00\x64", b"\x00\x65")
        assert (first[-1], second[-1]) == (0b00010010, 0b00101001)  # retained: if new; never, and the flag as published


@pytest.mark.parametrize("data", ["30ffffffff7f", "3602", "300700017402", "f000", "000000"])
async def test_a_broker_that_breaks_the_protocol_is_left(tmp_path: Path, data: str) -> None:
    async with peer() as broker, session(broker.port, Received(), tmp_path) as client:
        broker.send(bytes.fromhex(data) + b"\0" * 100)
        async with asyncio.timeout(10):
            assert "broke the protocol" in await client.wait_lost()
        assert client.is_lost
        client.send(b"nothing happens")


async def test_a_lost_connection_is_told(tmp_path: Path) -> None:
    async with peer() as broker, session(broker.port, Received(), tmp_path) as client:
        assert broker.writer is not None
        broker.writer.transport.abort()
        assert "lost the connection" in await client.wait_lost()


async def test_a_broker_that_says_why_is_quoted(tmp_path: Path) -> None:
    async with peer() as broker, session(broker.port, Received(), tmp_path) as client:
        broker.send(bytes.fromhex("e0028e00"))
        assert "Session taken over" in await client.wait_lost()
