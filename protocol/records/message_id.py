"""Ids of messages, and hosts as records have them.

    offset message id, hex digits, upper case:   | address 4 or 16 bytes | port int32 | physical offset int64 |
    host in a record:                            | address 4 or 16 bytes | port int32 |

The broker's id (offsetMsgId) says where a message lies. The client's own id (property UNIQ_KEY, made by
`duemq._producing.unique_keys`) is the id that users see. Mirrors apache/rocketmq common/message/MessageDecoder.java
(4.9.7).
"""

from __future__ import annotations

from ipaddress import ip_address

from duemq.protocol.errors import RemoteProtocolError


def pack_host(address: str, port: int) -> bytes:
    """Return an address and port as a record has them: 8 bytes for IPv4, 20 for IPv6. An IPv4 address mapped into IPv6
    counts as IPv4; a zone id is dropped. Raises ValueError if `address` is not an IP address, or `port` does not fit
    into 32 bits."""
    ip = ip_address(address.partition("%")[0])
    if ip.version == 6 and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    try:
        return ip.packed + port.to_bytes(4, "big", signed=True)
    except OverflowError:
        raise ValueError(f"port {port} does not fit into 32 bits") from None


def unpack_host(host: bytes) -> tuple[str, int]:
    """Return the address and port in a record's host. Raises ValueError unless it has 8 or 20 bytes."""
    return str(ip_address(bytes(host[:-4]))), int.from_bytes(host[-4:], "big", signed=True)


def offset_message_id(store_host: bytes, physical_offset: int) -> str:
    """Return the broker's id of the message at a physical offset: 32 hex digits, or 56 for an IPv6 store host."""
    return f"{store_host.hex().upper()}{physical_offset:016X}"


def parse_offset_message_id(message_id: str) -> tuple[str, int, int]:
    """Return address, port and physical offset in a broker's message id. Raises RemoteProtocolError."""
    try:
        raw = bytes.fromhex(message_id) if message_id.isalnum() else b""  # fromhex ignores blanks
    except ValueError:
        raw = b""
    if len(raw) not in (16, 28):
        raise RemoteProtocolError(f"the message id {message_id!r} is not 32 or 56 hex digits")
    address, port = unpack_host(raw[:-8])
    return address, port, int.from_bytes(raw[-8:], "big")
