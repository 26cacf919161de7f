from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt import _packet
from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from duemq.mqtt_bridge.session import packets
from duemq.mqtt_bridge.session.packets import Ack, Cutter, PacketError, Properties, Publish
from duemq.mqtt_bridge.session.wire import NAMES_OF_PAHO

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=300)
PROPERTIES = st.builds(
    Properties,
    is_text=st.booleans(),
    expiry=st.none() | st.integers(0, 0xFFFFFFFF),
    content_type=st.none() | TEXT,
    response_topic=st.none() | TEXT,
    correlation_data=st.none() | st.binary(max_size=300),
    user=st.lists(st.tuples(TEXT, TEXT), max_size=5).map(tuple),
)


def cut(data: bytes, limit: int = 10_000, step: int = 1_000_000) -> list[tuple[int, bytes, int]]:
    cutter = Cutter(limit)
    return [each for begin in range(0, len(data), step) for each in cutter.feed(data[begin : begin + step])]


def decode(packet: bytes, *, is_v5: bool = True) -> Publish:
    [(first, body, missing)] = cut(packet, 1 << 28)
    return packets.decode_publish(first, body, is_v5=is_v5, missing=missing)


@given(TEXT, st.binary(max_size=500), st.integers(0, 2), st.booleans(), st.none() | PROPERTIES)
def test_a_publish_is_what_was_encoded_and_what_paho_reads(
    topic: str, payload: bytes, qos: int, retain: bool, properties: Properties | None
) -> None:
    packet = packets.encode_publish(
        topic, payload, qos=qos, retain=retain, packet_id=qos and 4711, properties=properties
    )
    if qos:
        packets.set_dup(packet)
    found = decode(bytes(packet), is_v5=properties is not None)
    expected = properties or Properties()
    [(_, rest, _)] = cut(bytes(packet), 1 << 28)
    assert found == Publish(topic, payload, qos, retain, qos > 0, qos and 4711, expected, len(rest))
    protocol = MQTTProtocolVersion.MQTTv5 if properties is not None else MQTTProtocolVersion.MQTTv311
    [(first, body, _)] = cut(bytes(packet), 1 << 28)
    if topic:
        theirs: Any = _packet.decode_publish(first, bytearray(body), protocol)
        assert (theirs.topic.decode(), bytes(theirs.payload), theirs.qos) == (topic, payload, qos)
        if expected.user:
            assert theirs.properties.UserProperty == list(expected.user)


@given(st.integers(1, 70), st.lists(st.binary(max_size=400), min_size=1, max_size=8))
def test_a_stream_is_cut_wherever_it_is_split(step: int, bodies: list[bytes]) -> None:
    data = b"".join(
        bytes(packets.encode_publish("t", body, qos=0, retain=False, packet_id=0, properties=None)) for body in bodies
    )
    found = cut(data, step=step)
    assert [body[3:] for _, body, _ in found] == bodies


@pytest.mark.parametrize("step", [1000, 65_536, 10_000_000])
def test_of_a_large_packet_the_head_is_kept(step: int) -> None:
    limit = 200_000
    large = bytes(packets.encode_publish("t", b"x" * 1_000_000, qos=1, retain=False, packet_id=9, properties=None))
    small = packets.encode_ack(packets.PUBACK, 5)
    found = cut(large + small, limit, step)
    assert [missing for _, _, missing in found] == [1_000_005 - packets.HEAD_OF_LARGE, 0]
    publish = packets.decode_publish(found[0][0], found[0][1], is_v5=False, missing=found[0][2])
    assert (publish.topic, publish.packet_id) == ("t", 9)
    assert len(publish.payload) + publish.missing == 1_000_000


@pytest.mark.parametrize(
    ("kind", "packet"),
    [
        (packets.PUBACK, "40021267"),
        (packets.PUBREC, "50021267"),
        (packets.PUBREL, "62021267"),
        (packets.PUBCOMP, "70021267"),
    ],
)
def test_acknowledgements(kind: int, packet: str) -> None:
    assert packets.encode_ack(kind, 0x1267).hex() == packet
    [(first, body, _)] = cut(bytes.fromhex(packet))
    assert packets.decode_ack(first, body) == Ack(kind, 0x1267)
    with_reason = packets.encode_ack(kind, 0x1267, 0x83)
    assert with_reason.hex() == packet.replace("021267", "03126783")
    [(first, body, _)] = cut(with_reason)
    assert packets.decode_ack(first, body).is_error


def broken() -> Iterator[tuple[str, str]]:
    yield "30ffffffff7f", "a length of more than 4 bytes"
    yield "3002ffff", "ends within its topic"
    yield "3601000174", "cannot be read"
    yield "36050001740001", "QoS 3"
    yield "320600017400000000", "packet id 0"
    yield "3005000174ff7f", "longer than their packet"
    yield "300400017480", "without an end"
    yield "30070001740323000500", "topic alias"
    yield "3005000174017f", "property 0x7f"
    yield "3008000174040300ff6162", "longer than its packet"
    yield "300700017402030000", "longer than all"
    yield "300300017f", "cannot be read"


@pytest.mark.parametrize(("data", "why"), list(broken()))
def test_what_is_no_packet_is_told(data: str, why: str) -> None:
    with pytest.raises(PacketError, match=why):
        decode(bytes.fromhex(data))


@given(st.binary(max_size=60))
def test_any_bytes_are_a_packet_or_an_error(data: bytes) -> None:
    for is_v5 in (True, False):
        try:
            for first, body, missing in cut(data):
                packets.decode_publish(first, body, is_v5=is_v5, missing=missing)
                packets.decode_ack(first, body)
        except PacketError:
            pass


def test_more_than_a_packet_can_hold_is_refused() -> None:
    for topic, user in (("t" * 65_536, ()), ("t", (("n", "v" * 65_536),))):
        with pytest.raises(PacketError, match="65535"):
            packets.encode_publish(topic, b"", qos=0, retain=False, packet_id=0, properties=Properties(user=user))


def test_paho_still_has_what_is_used_of_it() -> None:
    client = Client(CallbackAPIVersion.VERSION2)
    assert [name for name in NAMES_OF_PAHO if not hasattr(client, name)] == []
    assert set(client._in_packet) == {
        "command", "have_remaining", "remaining_count", "remaining_mult", "remaining_length", "packet", "to_process",
        "pos",
    }  # fmt: skip
