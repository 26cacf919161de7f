"""Ids of messages, and hosts as the record keeps them.

    offset message id, hex digits, upper case:   | address 4 or 16 bytes | port int32 | physical offset int64 |
    host in a record:                            | address 4 or 16 bytes | port int32 |

The broker's id (offsetMsgId) says where a message lies; the client's own id (property UNIQ_KEY) is what users see.
Mirrors apache/rocketmq common/message/{MessageDecoder,MessageClientIDSetter}.java (4.9.7).
"""

from __future__ import annotations

import itertools
import os
import random
import socket
import struct
import time
from ipaddress import ip_address
from typing import Final

from protocol.errors import RemoteProtocolError

_PORT: Final = struct.Struct(">i")


def pack_host(address: str, port: int) -> bytes:
    """An address and port as a record keeps them: 8 bytes for IPv4, 20 for IPv6. An IPv4 address mapped into IPv6
    counts as IPv4; a zone id is dropped. Raises ValueError where `address` is no IP address."""
    ip = ip_address(address.partition("%")[0])
    if ip.version == 6 and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return ip.packed + _PORT.pack(port)


def unpack_host(host: bytes) -> tuple[str, int]:
    """The address and port in a record's host."""
    return str(ip_address(bytes(host[:-4]))), _PORT.unpack(host[-4:])[0]


def offset_message_id(store_host: bytes, physical_offset: int) -> str:
    """The broker's id of the message at a physical offset: 32 hex digits, or 56 for an IPv6 store host."""
    return f"{store_host.hex().upper()}{physical_offset:016X}"


def parse_offset_message_id(message_id: str) -> tuple[str, int, int]:
    """Address, port and physical offset in a broker's message id. Raises RemoteProtocolError."""
    try:
        raw = bytes.fromhex(message_id)
    except ValueError:
        raw = b""
    if len(raw) not in (16, 28):
        raise RemoteProtocolError(f"the message id {message_id!r} is not 32 or 56 hex digits")
    address, port = unpack_host(raw[:-8])
    return address, port, int.from_bytes(raw[-8:], "big")


class UniqueKeys:
    """Makes client message ids (UNIQ_KEY): | ip 4 | process id 2 | random 4 | ms since the month began 4 | counter 2 |.

    RocketMQ's third part is the hash of the class loader, whose purpose is to tell apart clients of one process; a
    random number does that as well.
    """

    def __init__(self) -> None:
        try:
            address = socket.inet_aton(socket.gethostbyname(socket.gethostname()))
        except OSError:
            address = socket.inet_aton("127.0.0.1")
        self._prefix = (
            address + struct.pack(">H", os.getpid() & 0xFFFF) + struct.pack(">I", random.getrandbits(32))
        ).hex()
        self._counter = itertools.count(random.getrandbits(15))
        self._month_start_ms = self._next_month_ms = 0

    def make(self) -> str:
        """A new id of 32 hex digits, upper case."""
        now_ms = int(time.time() * 1000)
        if now_ms >= self._next_month_ms:
            today = time.localtime(now_ms / 1000)
            self._month_start_ms = int(time.mktime((today.tm_year, today.tm_mon, 1, 0, 0, 0, 0, 0, -1)) * 1000)
            following = (today.tm_year, today.tm_mon + 1, 1) if today.tm_mon < 12 else (today.tm_year + 1, 1, 1)
            self._next_month_ms = int(time.mktime((*following, 0, 0, 0, 0, 0, -1)) * 1000)
        elapsed = (now_ms - self._month_start_ms) & 0xFFFFFFFF
        return f"{self._prefix}{elapsed:08x}{next(self._counter) & 0xFFFF:04x}".upper()
