"""Whether an id was given by one of the known brokers."""

from __future__ import annotations

import pytest

from duemq._net.id_brokers import broker_of, is_of_none
from duemq.protocol.records.message_id import offset_message_id, pack_host


def made(host: str, port: int) -> str:
    return offset_message_id(pack_host(host, port), 66)


@pytest.mark.parametrize("address", ["127.0.0.1:10911", "[2001:db8::1]:10911"])
def test_the_broker_of_an_id_is_an_address(address: str) -> None:
    host, _, port = address.rpartition(":")
    assert broker_of(made(host.strip("[]"), int(port))) == address


@pytest.mark.parametrize(
    ("host", "port", "addresses", "is_none"),
    [
        ("10.0.0.1", 10911, [], True),
        ("10.0.0.1", 10911, ["10.0.0.2:10911", "10.0.0.1:10911"], False),
        ("10.0.0.1", 10911, ["10.0.0.1:10912", "10.0.0.2:10911"], True),
        ("10.0.0.1", 10911, ["broker-a:10911"], False),
        ("10.0.0.1", 10911, ["broker-a:10912"], True),
        ("2001:db8::1", 10911, ["[2001:0db8:0::1]:10911"], False),
        ("2001:db8::1", 10911, ["[2001:db8::2]:10911"], True),
        ("0.0.0.0", 0, [], False),
    ],
)
def test_whether_it_is_one_of_those_that_are_known(host: str, port: int, addresses: list[str], is_none: bool) -> None:
    """An id is checked against the addresses of the known brokers; an address with a host name matches every host with
    its port."""
    assert is_of_none(made(host, port), addresses) is is_none
