"""Bytes that are not a stream of frames: the broker closes each connection that sends them, with one log line, and
other clients are not affected. The expected refusals come from the reader that clients use (protocol/frames/frame.py),
which has tests of its own."""

from __future__ import annotations

import random
import struct
from collections import Counter

import pytest

from duemq.broker.net.tls import HANDSHAKE
from duemq.protocol.errors import FrameError
from duemq.protocol.frames import codec
from duemq.protocol.frames.frame import BINARY, JSON, MAX_FRAME_BYTES, MSGPACK, FrameReader, join_frame
from duemq.protocol.requests.headers import QueueOfTopic
from tests.fuzz.client import RawClient
from tests.fuzz.live import Line, LiveBroker
from tests.fuzz.witness import Witness
from tests.support.wire import pull, request, send

pytestmark = pytest.mark.fuzz

HEADERS = [
    b"",
    b"{}",
    b'{"code":',
    b'{"code":"x"}',
    b"null",
    b"[]",
    b"[" * 5000,
    b'{"code":310,"extFields":' + b"[" * 5000,
    b'{"code":310,"opaque":99999999999}',
    b'{"code":1e999}',
    b'{"code":1,"remark":"\\ud800"}',
    b"\xff\xfe",
    b"\x97",
    b"\x91" * 5000,
    b"\0\x0a\0\x01\x97",
    b"\0" * 17 + b"\x7f\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff",
]


def is_broken(data: bytes) -> bool:
    """Whether a stream that begins with these bytes has to be refused."""
    reader = FrameReader()
    try:
        for frame in reader.receive_data(data):
            codec.decode(frame)
    except FrameError:
        return True
    return reader.error is not None


def is_doubtful(data: bytes) -> bool:
    """Whether the first fault of a stream is text that is not UTF-8 in a JSON header. The broker does not look at
    fields that a request does not need, so the result depends on the bytes that follow."""
    try:
        for frame in FrameReader().receive_data(data):
            codec.decode(frame)
    except FrameError as error:
        return "not UTF-8" in str(error) and frame[0] == JSON
    return False


def valid(rng: random.Random) -> bytes:
    """Return one or a few good frames."""
    commands = [
        send("T", rng.randbytes(rng.randrange(200)), oneway=True),
        pull("T", rng.randrange(5)),
        request(30, QueueOfTopic("T", 0)),
    ]
    return b"".join(
        codec.encode(rng.choice(commands), rng.choice((JSON, BINARY, MSGPACK))) for _ in range(rng.randrange(1, 4))
    )


def random_bytes(rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice((1, 3, 4, 7, 8, 9, 100, 5000)))


def wrong_length(rng: random.Random) -> bytes:
    length = rng.choice((-(2**31), -1, 0, 3, MAX_FRAME_BYTES - 3, 2**31 - 1, rng.randrange(-(2**31), 2**31)))
    return struct.pack(">i", length) + rng.randbytes(rng.choice((0, 1, 4, 100)))


def wrong_codec(rng: random.Random) -> bytes:
    return join_frame(rng.randrange(3, 256), rng.randbytes(20), rng.randbytes(20))


def wrong_header_length(rng: random.Random) -> bytes:
    length = rng.randrange(4, 100)
    return struct.pack(">iI", length, rng.randrange(length - 3, 0x1000000)) + rng.randbytes(length)


def wrong_header(rng: random.Random) -> bytes:
    return join_frame(rng.choice((JSON, BINARY, MSGPACK)), rng.choice(HEADERS), rng.randbytes(10))


def damaged(rng: random.Random) -> bytes:
    data = bytearray(valid(rng))
    for _ in range(rng.randrange(1, 5)):
        data[rng.randrange(min(len(data), 300))] = rng.randrange(256)
    return bytes(data)


def cut_short(rng: random.Random) -> bytes:
    data = valid(rng)
    return data[: rng.randrange(1, len(data))]


def other_protocols(rng: random.Random) -> bytes:
    tls = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500)
    http = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    return rng.choice((http, tls, b"SSH-2.0-OpenSSH_9.6\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\0" * 1000))


KINDS = [
    random_bytes,
    wrong_length,
    wrong_codec,
    wrong_header_length,
    wrong_header,
    damaged,
    cut_short,
    other_protocols,
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_bytes_that_are_no_frames_cost_only_their_connection(
    broker: LiveBroker, witness: Witness, rng: random.Random, kind: object
) -> None:
    """The broker closes a connection that sends wrong bytes, also after good frames, whether they arrive in one piece,
    in two, or byte by byte."""
    assert callable(kind)
    wanted: Counter[tuple[int, str]] = Counter()  # a Counter: the kernel may reuse a port
    doubtful: set[int] = set()
    for number in range(75):
        data = (valid(rng) if rng.random() < 0.5 else b"") + kind(rng)
        reader = FrameReader()
        reader.receive_data(data)
        with RawClient(rng.choice((broker.port, broker.port - 2, broker.nameserver_port))) as client:
            style = number % 3
            pieces = [data] if style == 0 else [data[: len(data) // 2], data[len(data) // 2 :]]
            if style == 2 and len(data) < 400:
                pieces = [data[at : at + 1] for at in range(len(data))]
            for piece in pieces:
                if not client.send(piece):
                    break
            if is_doubtful(data) or data[0] == HANDSHAKE:  # TLS: tests/unit/broker/tls/test_tls.py
                client.end_of_input()
                client.wait_closed()
                doubtful.add(client.local_port)
            elif is_broken(data):
                client.wait_closed()
                wanted[client.local_port, "connection_refused"] += 1
            elif reader.buffered:
                # Not a plain close: with unread answers that is a reset, which discards bytes that the broker has not
                # read yet.
                client.end_of_input()
                client.wait_closed()
                wanted[client.local_port, "connection_broken"] += 1
    for end in [end for end in wanted if end[0] in doubtful]:
        del wanted[end]
    broker.wait_for(lambda lines: connection_lines(lines, doubtful).total() >= wanted.total())
    assert connection_lines(broker.lines, doubtful) == wanted
    assert wanted.total() > 10
    assert witness.growth_bytes < 64 * 1024 * 1024


def connection_lines(lines: list[Line], but: set[int]) -> Counter[tuple[int, str]]:
    """Count the logged ends of connections by client port and event, without the ports in `but`."""
    ends = Counter((port_of(line), line["event"]) for line in lines if line["event"].startswith("connection_"))
    return Counter({end: count for end, count in ends.items() if end[0] not in but})


def port_of(line: Line) -> int:
    """Return the port of the client that a log line is about."""
    return int(str(line.get("peer", ":0")).rpartition(":")[2])
