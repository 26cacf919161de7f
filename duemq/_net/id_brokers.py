"""Finds the broker that gave an offset message id, which contains its address and port."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address
from typing import Final

from duemq._net.connection import split_address
from duemq.protocol.records.message_id import parse_offset_message_id

_MOST_PORT: Final = 65535


def has_broker(offset_message_id: str) -> bool:
    """Whether an id may be that of a broker: the port in it is possible. The id that a sender gives (UNIQ_KEY) has as
    many digits, and its process id and half of a random number in place of the port. Raises RemoteProtocolError if the
    text is not an id."""
    return 0 < parse_offset_message_id(offset_message_id)[1] <= _MOST_PORT


def broker_of(offset_message_id: str) -> str:
    """Return the address "host:port" of the broker that gave an id. Raises RemoteProtocolError if the text is not such
    an id."""
    host, port, _ = parse_offset_message_id(offset_message_id)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_of_none(offset_message_id: str, addresses: Iterable[str]) -> bool:
    """Whether the broker that gave an id is certainly at none of some addresses, each "host:port". False if this is not
    known, since one of them has the broker's port and a host name; and for an id that no broker gave. Raises
    RemoteProtocolError if the text is not an id."""
    host, port, _ = parse_offset_message_id(offset_message_id)
    if port <= 0:
        return False
    for address in addresses:
        known_host, known_port = split_address(address)
        if known_port == port and _may_be(known_host, host):
            return False
    return True


def _may_be(known: str, host: str) -> bool:
    try:
        return ip_address(known) == ip_address(host)
    except ValueError:
        return True
