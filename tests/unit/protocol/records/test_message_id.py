"""Message ids and hosts."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.protocol.errors import RemoteProtocolError
from duemq.protocol.records.message_id import offset_message_id, pack_host, parse_offset_message_id, unpack_host
from tests.unit.protocol.strategies import INT32

ADDRESSES = st.ip_addresses(v=4).map(str) | st.ip_addresses(v=6).map(str).filter(lambda ip: "ffff:" not in ip)


@given(ADDRESSES, INT32, st.integers(0, 2**63 - 1))
def test_a_host_and_an_offset_survive_in_a_message_id(address: str, port: int, offset: int) -> None:
    host = pack_host(address, port)
    assert unpack_host(host) == (address, port)
    message_id = offset_message_id(host, offset)
    assert len(message_id) == (32 if "." in address else 56)
    assert parse_offset_message_id(message_id) == (address, port, offset)
    assert parse_offset_message_id(message_id.lower()) == (address, port, offset)


def test_an_id_as_rocketmq_prints_it() -> None:
    assert offset_message_id(pack_host("127.0.0.2", 29911), 1186) == "7F000002000074D700000000000004A2"


def test_ipv4_in_ipv6_counts_as_ipv4_and_zones_are_dropped() -> None:
    assert pack_host("::ffff:10.1.2.3", 1) == pack_host("10.1.2.3", 1)
    assert pack_host("fe80::1%eth0", 1) == pack_host("fe80::1", 1)
    with pytest.raises(ValueError, match="broker"):
        pack_host("broker", 1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "7F",
        "7F000002000074D700000000000004A",
        "Z" * 32,
        "é" * 32,
        "0" * 57,
        "0" * 56000,
        " 7F000002000074D700000000000004A2",
        "7F000002 000074D700000000000004A2",
        "7F000002000074D700000000000004A2\n",
    ],
)
def test_a_text_that_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_offset_message_id(text)


@given(st.text(max_size=60))
def test_any_text_is_an_id_or_refused(text: str) -> None:
    with contextlib.suppress(RemoteProtocolError):
        parse_offset_message_id(text)
