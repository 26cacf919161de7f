"""The body of a batch: encoding and decoding agree, and wrong bytes are a BodyFormatError that names the part."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.protocol.errors import BodyFormatError
from duemq.protocol.records import batch
from duemq.protocol.records.batch import BatchPart
from tests.unit.protocol.strategies import INT32, TEXT

PARTS = st.lists(st.tuples(INT32, st.binary(max_size=30), TEXT), max_size=4)


@given(PARTS)
def test_the_parts_of_a_batch_survive(parts: list[BatchPart]) -> None:
    assert batch.decode(memoryview(batch.encode(parts))) == parts


@given(PARTS.filter(bool), st.data())
def test_a_damaged_batch_is_a_body_error_or_another_batch(parts: list[BatchPart], data: st.DataObject) -> None:
    bad = bytearray(batch.encode(parts))
    for _ in range(data.draw(st.integers(1, 3))):
        bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(BodyFormatError):
        batch.decode(bytes(bad))


@given(st.binary(max_size=80))
def test_any_bytes_are_a_batch_or_a_body_error(body: bytes) -> None:
    with contextlib.suppress(BodyFormatError):
        batch.decode(body)


@given(PARTS.filter(bool), st.data())
def test_a_batch_cut_short_is_a_body_error(parts: list[BatchPart], data: st.DataObject) -> None:
    body = batch.encode(parts)
    ends = {len(batch.encode(parts[:count])) for count in range(len(parts))}
    size = data.draw(st.integers(0, len(body) - 1).filter(lambda size: size not in ends))
    with pytest.raises(BodyFormatError):
        batch.decode(body[:size])


@pytest.mark.parametrize("size", [-(2**31), -1, 0, 21, 23, 2**31 - 1])
def test_a_wrong_size_names_its_part(size: int) -> None:
    good = batch.encode([(0, b"", "")])
    with pytest.raises(BodyFormatError, match="part 1 "):
        batch.decode(good + struct.pack(">i", size) + good[4:])


def test_properties_that_are_no_text_name_their_part() -> None:
    body = batch.encode([(0, b"", "A\x01a"), (0, b"", "A\x01b")])
    with pytest.raises(BodyFormatError, match=r"part 1 .*UTF-8"):
        batch.decode(body.replace(b"\x01b", b"\x01\xff"))
