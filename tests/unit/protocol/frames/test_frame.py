"""Frames are cut out of a byte stream the same way however it is chopped, and nothing is kept of refused bytes."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duemq.protocol.errors import FrameError
from duemq.protocol.frames.frame import BINARY, CODECS, JSON, MAX_FRAME_BYTES, MSGPACK, FrameReader, join_frame

Cut = list[tuple[int, bytes, bytes]]

FRAMES = st.tuples(st.sampled_from(CODECS), st.binary(max_size=30), st.binary(max_size=30))
GARBAGE = st.binary(max_size=40) | st.builds(
    struct.Struct(">iI").pack, st.integers(-(2**31), 2**31 - 1), st.integers(0, 2**32 - 1)
)


def cut(pieces: list[bytes], max_frame_bytes: int = MAX_FRAME_BYTES) -> tuple[Cut, FrameReader]:
    """Give a reader the pieces one by one; return the frames found, and the reader."""
    reader, frames = FrameReader(max_frame_bytes), []
    for piece in pieces:
        frames += [(codec, header, bytes(body)) for codec, header, body in reader.receive_data(piece)]
    return frames, reader


def one_by_one(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


@given(st.lists(FRAMES, max_size=5))
def test_frames_come_out_as_they_went_in(frames: Cut) -> None:
    data = b"".join(join_frame(*frame) for frame in frames)

    assert cut([data])[0] == frames
    assert cut(one_by_one(data))[0] == frames


@given(st.lists(FRAMES, max_size=3), GARBAGE, st.lists(st.integers(0, 400), max_size=8))
def test_chopping_does_not_matter_for_any_bytes(frames: Cut, garbage: bytes, cuts: list[int]) -> None:
    """The frames, the error and the buffered bytes are the same for the whole input, for single bytes and for any
    pieces."""
    data = b"".join(join_frame(*frame) for frame in frames) + garbage
    edges = [0, *sorted(at for at in cuts if at < len(data)), len(data)]
    pieces = [data[low:high] for low, high in itertools.pairwise(edges)]

    whole, reader = cut([data])
    for chopped, other in (cut(one_by_one(data)), cut(pieces)):
        assert chopped == whole
        assert str(other.error) == str(reader.error)
        assert other.buffered == reader.buffered


@pytest.mark.parametrize(
    "length", [-(2**31), -1, 0, 3, MAX_FRAME_BYTES - 3, MAX_FRAME_BYTES, 2**31 - 1, 0x16030100, 0x47455420]
)
@pytest.mark.parametrize("chop", [lambda data: [data], one_by_one], ids=["whole", "bytes"])
def test_a_wrong_length_is_refused_on_its_four_bytes(length: int, chop: object) -> None:
    """A wrong length is refused as soon as its four bytes are there, and nothing of such a frame is kept, before or
    after; the last two lengths are the beginnings of TLS and HTTP."""
    assert callable(chop)
    good = join_frame(JSON, b"{}", b"before")

    frames, reader = cut(chop(good + struct.pack(">i", length)))

    assert frames == [(JSON, b"{}", b"before")]
    assert isinstance(reader.error, FrameError)
    assert str(length) in str(reader.error)
    assert reader.buffered == 0
    assert reader.receive_data(b"x" * 100_000) == []
    assert reader.buffered == 0


@pytest.mark.parametrize("length", [4, MAX_FRAME_BYTES - 4])
def test_the_smallest_and_the_largest_length_are_taken(length: int) -> None:
    data = struct.pack(">iI", length, 0) + bytes(length - 4)

    frames, reader = cut([data])

    assert [(codec, header, len(body)) for codec, header, body in frames] == [(JSON, b"", length - 4)]
    assert reader.error is None


def test_the_limit_counts_the_length_word() -> None:
    assert cut([join_frame(JSON, b"h", bytes(91))], 100)[1].error is None
    assert cut([join_frame(JSON, b"h", bytes(92))], 100)[1].error is not None


@pytest.mark.parametrize("codec", [3, 4, 127, 255])
def test_an_unknown_header_codec_is_refused(codec: int) -> None:
    frames, reader = cut([join_frame(BINARY, b"h", b"b") + join_frame(codec, b"h", b"b")])

    assert frames == [(BINARY, b"h", b"b")]
    assert str(codec) in str(reader.error)


@pytest.mark.parametrize(("length", "header_length"), [(4, 1), (10, 7), (10, 0xFFFFFF)])
def test_a_header_longer_than_its_frame_is_refused(length: int, header_length: int) -> None:
    frames, reader = cut([join_frame(MSGPACK, b"h") + struct.pack(">iI", length, header_length) + bytes(20)])

    assert frames == [(MSGPACK, b"h", b"")]
    assert str(header_length) in str(reader.error)


def test_a_header_may_fill_its_frame() -> None:
    assert cut([struct.pack(">iI", 10, 6) + b"header"])[0] == [(JSON, b"header", b"")]


def test_the_error_stays_and_later_input_is_ignored() -> None:
    reader = FrameReader()
    reader.receive_data(struct.pack(">i", -1))
    error = reader.error

    assert reader.receive_data(join_frame(JSON, b"{}")) == []
    assert reader.error is error


def test_a_close_within_a_frame_is_an_error_and_between_frames_is_none() -> None:
    reader = FrameReader()
    reader.receive_data(join_frame(JSON, b"{}"))
    reader.receive_eof()
    assert reader.error is None

    reader.receive_data(join_frame(JSON, b"{}", b"body")[:-1])
    reader.receive_eof()
    assert "in the middle of a frame" in str(reader.error)


def test_a_frame_in_many_small_pieces_takes_about_its_own_size() -> None:
    """The reader holds a frame that comes two bytes at a time without an object for each piece."""
    data = join_frame(JSON, b"{}", bytes(100_000))
    reader = FrameReader()
    for at in range(0, len(data) - 2, 2):
        assert reader.receive_data(data[at : at + 2]) == []

    assert reader.buffered == len(data) - 2
    assert reader.pieces < 1000
    ((_, _, body),) = reader.receive_data(data[-2:])
    assert bytes(body) == bytes(100_000)
    assert reader.pieces == reader.buffered == 0


def test_a_closed_reader_holds_nothing_and_takes_nothing() -> None:
    reader = FrameReader()
    reader.receive_data(join_frame(JSON, b"{}", b"body")[:-1])
    reader.close()

    assert reader.pieces == reader.buffered == 0
    assert reader.receive_data(b"y" + join_frame(JSON, b"{}")) == []
    assert reader.pieces == reader.buffered == 0
    assert isinstance(reader.error, FrameError)


def test_bodies_are_views_of_what_was_received() -> None:
    """The body of a frame that came in one piece is a view, without a copy."""
    data = join_frame(JSON, b"{}", b"body")
    ((_, _, body),) = FrameReader().receive_data(data)
    assert body.obj is data
