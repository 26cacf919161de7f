"""Which broker gave an offset message id: its address and port are in it."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address

from duemq._net.connection import split_address
from duemq.protocol.records.message_id import parse_offset_message_id


def broker_of(offset_message_id: str) -> str:
    """The address "host:port" of the broker that gave an id. Raises RemoteProtocolError if it is not such an id."""
    host, port, _ = parse_offset_message_id(offset_message_id)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_of_none(offset_message_id: str, addresses: Iterable[str]) -> bool:
    """Whether the broker that gave an id is none of those at some addresses, each "host:port". False where that cannot
    be told, since a broker has its port and goes by a name; and for an id that no broker gave. Raises
    RemoteProtocolError for what is no id."""
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
