"""Deliveries of records that end with a checksum of the whole record, as RocketMQ 5 writes them too, or of records
without one."""

from __future__ import annotations

import zlib

import pytest

from duemq.protocol.records import properties
from tests.unit.scheduler.world import World


@pytest.mark.parametrize("is_alike", [False, True])
@pytest.mark.parametrize("then", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_a_delivery_has_the_checksum_of_its_own_record_or_none(first: bool, then: bool, is_alike: bool) -> None:
    world = World(with_checksums=first)
    bodies = [b"%d" % number if is_alike else b"%d" % number * (number + 1) for number in range(9)]
    for body in bodies:
        world.schedule(1, body)
    world.with_checksums = then
    world.open()
    world.clock.advance(1000)
    world.run()
    delivered = world.delivered()
    assert [message.body for message in delivered] == bodies
    for message in delivered:
        data = world.store.log.read(message.physical_offset, message.size)
        assert data is not None
        value = f"{zlib.crc32(data[:-20]) & 0x7FFFFFFF:010}"[::-1]
        assert properties.get(message.properties_text, "__CRC32#") == (value if then else None)
        assert (bytes(data[-20:-11]) == b"__CRC32#\x01") == then
        assert properties.get(message.properties_text, "TAGS") == "t"
