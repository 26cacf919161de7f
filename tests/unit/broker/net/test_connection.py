"""The memory held for a connection is bounded, and a client that does not read, or does not finish its frames, harms
only itself."""

from __future__ import annotations

import asyncio
import gc
import sys
from pathlib import Path
from typing import Any

import pytest

from duemq.broker.net.connection import LARGE_RESPONSE_BYTES, MAX_REQUESTS, WRITE_HIGH_BYTES, Connection
from duemq.broker.net.limits.input_budget import READ_BYTES, READERS, SHORT_READ_BYTES, InputBudget, Reader
from duemq.broker.net.limits.output_budget import OutputBudget
from duemq.broker.net.request_turns import IsOver, RequestTurns
from duemq.protocol.codes import FLAG_ONEWAY, FLAG_RESPONSE, RequestCode, ResponseCode
from duemq.protocol.frames import codec
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import BINARY, JSON, Frame, join_frame
from duemq.protocol.records.message_id import pack_host
from duemq.protocol.requests.headers import QueueOfTopic
from tests.support.broker import Peer, UnboundBroker, running
from tests.support.loop import SteppedLoop, request_turns, turns
from tests.support.wire import pull, request, send

ONE_READ = 256 * 1024
"""The most bytes that uvloop reads at once."""


class Frames:
    """Takes the frames of a connection, and may answer each."""

    def __init__(self, answer: bytes = b"") -> None:
        self.frames: list[Frame] = []
        self.lost: list[Connection] = []
        self.complaints: list[tuple[str, str, str]] = []
        self.answer = answer

    def handle(self, connection: Connection, frames: list[Frame], position: int, is_over: IsOver) -> int:
        for number in range(position, len(frames)):
            if not connection.takes_answers:
                return number
            self.frames.append(frames[number])
            if self.answer:
                connection.write(self.answer)
            if is_over():
                return number + 1
        return len(frames)

    def connection_made(self, connection: Connection) -> None:
        pass

    def connection_lost(self, connection: Connection) -> None:
        self.lost.append(connection)

    def complain(self, event: str, connection: Connection, reason: str) -> None:
        self.complaints.append((event, connection.peer, reason))


@pytest.fixture
def frames() -> Frames:
    return Frames()


def connect(
    frames: Frames,
    budget: InputBudget | None = None,
    output: OutputBudget | None = None,
    port: int = 40000,
    turns: RequestTurns | None = None,
) -> Peer:
    loop = asyncio.get_running_loop()
    turns = turns or request_turns(loop)
    connection = Connection(
        frames, loop, budget or InputBudget(asyncio.get_running_loop()), output or OutputBudget(loop), turns
    )
    return Peer(connection, ("127.0.0.1", port))


def numbered(count: int) -> bytes:
    return b"".join(join_frame(JSON, b"%d" % number) for number in range(count))


# --- a client that does not read


async def test_a_client_that_does_not_read_is_not_read_from(loop: SteppedLoop) -> None:
    """The broker does not read from a client that does not read: its requests wait in order, and once it reads again
    they are handled, and then its socket is read again."""
    answer = join_frame(JSON, b'{"code":0,"flag":1}', bytes(50_000))
    frames = Frames(answer)
    peer = connect(frames)
    peer.transport.block()
    peer.feed(numbered(100))
    taken = len(frames.frames)
    assert taken == WRITE_HIGH_BYTES // len(answer) + 1
    assert not peer.transport.takes_data
    assert peer.transport.most_held <= WRITE_HIGH_BYTES + len(answer)

    peer.connection.data_received(numbered(3))
    assert len(frames.frames) == taken, "what uvloop had read already waits as well"

    peer.transport.unblock()
    assert len(frames.frames) == taken, "not before its turn"
    await turns()
    assert [bytes(frame[1]) for frame in frames.frames] == [b"%d" % n for n in (*range(100), *range(3))]
    assert peer.transport.takes_data


async def test_reading_little_by_little_holds_little_at_any_time(loop: SteppedLoop) -> None:
    answer = join_frame(JSON, b'{"code":0,"flag":1}', bytes(50_000))
    frames = Frames(answer)
    peer = connect(frames)
    peer.transport.block()
    peer.feed(numbered(50))
    while len(peer.responses) < 50:
        peer.transport.unblock()
        peer.transport.block()
        await turns()
    assert peer.transport.most_held <= WRITE_HIGH_BYTES + len(answer)
    assert len(frames.frames) == 50


async def test_a_consumer_that_stops_reading_gets_no_more_than_fits(broker: UnboundBroker, peer: Peer) -> None:
    """A consumer that stops reading while pulls of 100 KB each pour in gets no more than fits; another client is served
    meanwhile, and the consumer once it reads again."""
    consumer = broker.connect()
    await peer.ask_all([send("T", bytes(100_000)) for _ in range(3)])
    consumer.transport.block()
    pulls = [pull("T", 1, count=1) for _ in range(200)]
    consumer.post(*pulls)
    assert not consumer.transport.takes_data
    assert consumer.transport.most_held < WRITE_HIGH_BYTES + 200_000
    for _ in range(10):
        assert (await peer.ask(send("T"))).code == 0
    consumer.transport.unblock()
    await turns()
    assert [answer.opaque for answer in consumer.responses] == [command.opaque for command in pulls]
    assert {len(answer.body) > 100_000 for answer in consumer.responses} == {True}
    assert consumer.transport.takes_data


async def test_answers_of_some_size_to_one_read_do_not_pile_up(broker: UnboundBroker) -> None:
    """Answers to the requests of one read do not pile up: 40-byte requests with answers of kilobytes would give
    megabytes."""
    peer = broker.connect()
    data = b"".join(codec.encode(request(RequestCode.GET_BROKER_CONFIG), BINARY) for _ in range(ONE_READ // 29))
    peer.transport.block()
    peer.feed(data[:ONE_READ])
    assert peer.transport.most_held < WRITE_HIGH_BYTES + 64 * 1024
    assert not peer.transport.takes_data


async def test_small_answers_to_one_read_do_not_pile_up(broker: UnboundBroker) -> None:
    """Small answers to one read, which are sent together, do not pile up beyond the size of a read."""
    peer = broker.connect()
    ask = codec.encode(request(RequestCode.GET_MAX_OFFSET, QueueOfTopic("T", 0)), BINARY)
    peer.transport.block()
    while peer.transport.takes_data:
        peer.feed(ask * (ONE_READ // len(ask)))
    assert peer.transport.most_held < 2 * 1024 * 1024


async def test_what_clients_do_not_read_counts_until_they_read_or_leave(loop: SteppedLoop) -> None:
    output = OutputBudget(loop)
    frames = Frames(join_frame(JSON, b'{"code":0,"flag":1}', bytes(300_000)))
    first, second = connect(frames, output=output), connect(frames, output=output)
    for peer in (first, second):
        peer.transport.block()
        peer.feed(numbered(1))
    assert output.used == sum(peer.transport.get_write_buffer_size() for peer in (first, second)) > 600_000
    first.transport.unblock()
    assert output.used == second.transport.get_write_buffer_size()
    second.transport.abort()
    await turns()
    assert output.used == 0


async def test_a_large_response_counts_until_the_last_byte_is_sent(loop: SteppedLoop) -> None:
    """A large response counts until its last byte is sent, since all of it is in memory, also when less of it is left
    than a client may leave of small ones."""
    output = OutputBudget(loop)
    frames = Frames(join_frame(JSON, b'{"code":0,"flag":1}', bytes(LARGE_RESPONSE_BYTES)))
    peer = connect(frames, output=output)
    peer.transport.block()
    peer.feed(numbered(3))
    assert (len(frames.frames), output.used) == (1, peer.transport.get_write_buffer_size())
    peer.transport.unblock()
    assert output.used == 0
    await turns()
    assert len(frames.frames) == 3
    peer.transport.block()
    frames.answer = join_frame(JSON, b'{"code":0,"flag":1}', bytes(50_000))
    peer.feed(numbered(3))
    assert (len(frames.frames), output.used) == (6, 0), "small ones may pile up as ever"


async def test_who_holds_most_that_is_not_read_is_closed(loop: SteppedLoop) -> None:
    """The connection that holds the most unread responses is closed at once, so that the total is never above the
    limit; the answers of a client that reads are delivered."""
    output = OutputBudget(loop, limit=2_000_000)
    frames = Frames(join_frame(JSON, b'{"code":0,"flag":1}', bytes(300_000)))
    strangers = [connect(frames, output=output, port=port) for port in range(1, 11)]
    for peer in strangers:
        peer.transport.block()
        peer.feed(numbered(5))
        assert output.used <= output.limit
        loop.advance(3)
    assert [peer.transport.is_aborted for peer in strangers] == [True] * 4 + [False] * 6
    assert [(event, peer) for event, peer, _ in frames.complaints] == [
        ("connection_dropped", f"127.0.0.1:{port}") for port in range(1, 5)
    ]
    assert "it has not read 300027 bytes of responses for 18 s" in frames.complaints[0][2]
    reads = connect(Frames(join_frame(JSON, b'{"code":0,"flag":1}', bytes(1_500_000))), output=output)
    reads.transport.block()
    reads.feed(numbered(1))
    assert not reads.transport.is_aborted, "it had no time yet to read what is more than any of the others holds"
    reads.transport.unblock()
    assert len(reads.responses) == 1
    await turns()
    assert output.used == sum(peer.transport.get_write_buffer_size() for peer in strangers)
    assert len(frames.lost) == sum(peer.transport.is_aborted for peer in strangers)


async def test_a_consumer_gets_its_messages_whatever_strangers_leave_unread(tmp_path: Path) -> None:
    async with running(tmp_path, "maxUnreadResponseBytes=33554432") as broker:
        peer = broker.connect()
        await peer.ask_all([send("T", bytes(500_000)) for _ in range(4)])
        strangers = [broker.connect() for _ in range(100)]
        for stranger in strangers:
            stranger.transport.block()
            stranger.post(*(pull("T") for _ in range(3)))
        assert any(stranger.transport.is_aborted for stranger in strangers)
        assert broker.running.net.output.used <= broker.running.net.output.limit
        assert (await peer.ask(pull("T"))).code == 0


# --- unfinished frames


async def test_unfinished_frames_count_until_they_are_whole(frames: Frames) -> None:
    budget = InputBudget(asyncio.get_running_loop())
    peer = connect(frames, budget)
    data = join_frame(JSON, b"{}", bytes(1000))
    peer.feed(data[:300])
    peer.feed(data[300:700])
    assert budget.used == 700
    peer.feed(data[700:] + data[:10])
    assert budget.used == 10
    peer.transport.abort()
    await turns()
    assert budget.used == 0
    assert frames.lost == [peer.connection]


async def test_the_largest_of_too_many_unfinished_frames_pays(frames: Frames) -> None:
    """With too many unfinished frames the connection with the largest is closed, not the last one to send: a client
    with a usual message must not be refused for the frames of others."""
    budget = InputBudget(asyncio.get_running_loop(), 10_000_000)
    large = join_frame(JSON, b"{}", bytes(8_000_000))
    usual = join_frame(JSON, b"{}", bytes(200_000))
    hoarders = [connect(frames, budget, port=port) for port in (1, 2, 3)]
    hoarders[0].feed(large[:4_000_000])
    hoarders[1].feed(large[:5_900_000])
    innocents = [connect(frames, budget) for _ in range(20)]
    for peer in innocents:
        peer.feed(usual[:100_000])
    assert [peer.transport.is_aborted for peer in hoarders] == [False, True, False]
    await turns()
    assert budget.used == 6_000_000
    hoarders[2].feed(large[:6_000_000])
    assert [peer.transport.is_aborted for peer in hoarders] == [False, True, True]
    await turns()
    for peer in innocents:
        peer.feed(usual[100_000:])
    assert len(frames.frames) == 20
    assert budget.used == 4_000_000
    assert [peer for _, peer, _ in frames.complaints] == ["127.0.0.1:2", "127.0.0.1:3"]


@pytest.mark.parametrize("drop", [True, False], ids=["dropped", "lost"])
async def test_the_unfinished_frame_goes_with_its_connection(frames: Frames, drop: bool) -> None:
    """An unfinished frame is freed with its connection, and not with the next run of the garbage collector, which would
    leave everything that a flood brings until then."""
    piece = join_frame(JSON, b"{}", bytes(1000))[:900]
    before = sys.getrefcount(piece)
    peer = connect(frames)
    peer.connection.data_received(piece)
    assert sys.getrefcount(piece) > before
    gc.disable()
    try:
        if drop:
            peer.connection.drop("too large")
        else:
            peer.transport.abort()
            await turns()
        assert sys.getrefcount(piece) == before
    finally:
        gc.enable()


async def test_many_small_unfinished_frames_are_bounded_too(frames: Frames) -> None:
    budget = InputBudget(asyncio.get_running_loop(), 100_000)
    peers = [connect(frames, budget) for _ in range(300)]
    for peer in peers:
        peer.feed(join_frame(JSON, b"{}", bytes(1000))[:1000])
        await turns()
        assert budget.used <= 100_000
    assert sum(peer.transport.is_aborted for peer in peers) == 200


async def test_who_pays_is_found_without_looking_at_all_who_do_not(frames: Frames) -> None:
    """With thousands of large frames, each further read closes one of their connections, which is found without looking
    at all others."""
    budget = InputBudget(asyncio.get_running_loop(), 3000 * 100_000)
    whole = join_frame(JSON, b"{}", bytes(1_000_000))
    first, more = whole[:100_000], whole[100_000:200_000]
    peers = [connect(frames, budget) for _ in range(3000)]
    for peer in peers:
        peer.connection.data_received(first)
    looks = 0

    class Steps(dict[Reader, None]):
        def __iter__(self) -> Any:
            nonlocal looks
            for each in super().__iter__():
                looks += 1
                yield each

    budget._by_size[:] = map(Steps, budget._by_size)
    for peer in peers[:1000]:
        peer.connection.data_received(more)
    assert sum(peer.transport.is_aborted for peer in peers) >= 500
    assert budget.used <= budget.limit
    assert looks <= 2000


async def test_of_many_who_send_large_frames_each_reads_a_little_in_turn(frames: Frames) -> None:
    budget = InputBudget(asyncio.get_running_loop())
    data = join_frame(JSON, b"{}", bytes(1_000_000))
    peers = [connect(frames, budget) for _ in range(100)]
    assert len(budget.buffer()) == READ_BYTES
    for peer in peers:
        peer.feed(data[: len(budget.buffer())])
    assert len(budget.buffer()) == SHORT_READ_BYTES
    assert sum(peer.transport.takes_data for peer in peers) == READERS, "those that came when there were few"
    had: dict[Peer, int] = dict.fromkeys(peers, 0)
    for _ in range(100):
        readers = [peer for peer in peers if peer.transport.takes_data]
        assert len(readers) <= 2 * READERS
        for peer in readers:
            had[peer] += 1
            peer.feed(data[:SHORT_READ_BYTES])
        await turns(1)
    assert max(had.values()) - min(had.values()) <= 2
    usual = connect(frames, budget)
    usual.feed(numbered(3))
    assert len(frames.frames) == 3
    assert usual.transport.takes_data, "whoever sends nothing large does not wait"


async def test_when_few_send_large_frames_nobody_waits(frames: Frames) -> None:
    budget = InputBudget(asyncio.get_running_loop())
    data = join_frame(JSON, b"{}", bytes(1_000_000))
    peers = [connect(frames, budget) for _ in range(READERS + 5)]
    for peer in peers[READERS:]:
        peer.feed(data[:100_000])
    for peer in peers[:READERS]:
        peer.feed(data[:100_000])
        peer.transport.abort()
        await turns()
    for start in range(100_000, len(data), 100_000):
        for peer in peers[READERS:]:
            peer.feed(data[start : start + 100_000])
    assert len(frames.frames) == 5
    assert len(budget.buffer()) == READ_BYTES
    assert budget.used == 0


async def test_a_close_within_a_frame_is_logged(frames: Frames) -> None:
    peer = connect(frames)
    peer.feed(join_frame(JSON, b"{}")[:-1])
    assert not peer.connection.eof_received()
    ((event, name, _),) = frames.complaints
    assert (event, name) == ("connection_broken", "127.0.0.1:40000")
    quiet = connect(frames)
    quiet.feed(join_frame(JSON, b"{}"))
    quiet.connection.eof_received()
    assert len(frames.complaints) == 1


async def test_a_broken_stream_is_closed_and_logged_once_after_its_good_frames(frames: Frames) -> None:
    peer = connect(frames)
    peer.feed(numbered(2) + b"GET / HTTP/1.1\r\n")
    peer.connection.data_received(b"Host: x\r\n\r\n")
    assert len(frames.frames) == 2
    assert peer.transport.is_closing()
    ((event, _, reason),) = frames.complaints
    assert event == "connection_refused"
    assert "1195725856" in reason


# --- connecting and leaving


async def test_a_client_is_known_by_address_and_port(frames: Frames) -> None:
    loop = asyncio.get_running_loop()
    own, mapped = (
        Peer(
            Connection(frames, loop, InputBudget(asyncio.get_running_loop()), OutputBudget(loop), request_turns(loop)),
            (host, 5),
        )
        for host in ("::1", "::ffff:10.0.0.1")
    )
    assert (own.connection.peer, own.connection.born_host) == ("[::1]:5", pack_host("::1", 5))
    assert mapped.connection.born_host == pack_host("10.0.0.1", 5)


async def test_a_client_that_left_before_it_was_accepted_is_dropped(broker: UnboundBroker) -> None:
    """A client that left before it was accepted is dropped: its socket has no peer any more."""
    peer = Peer(broker.running.net.accept(), None)
    assert peer.transport.is_aborted
    await turns()
    assert peer.connection not in broker.router.connections


async def test_a_silent_connection_is_closed_after_its_time(tmp_path: Path, loop: SteppedLoop) -> None:
    async with running(tmp_path) as broker:
        silent, talking = broker.connect(), broker.connect()
        shorter = request(RequestCode.UPDATE_BROKER_CONFIG, body=b"serverChannelMaxIdleTimeSeconds=60")
        assert (await talking.ask(shorter)).code == ResponseCode.SUCCESS
        for _ in range(10):
            assert not silent.transport.is_aborted
            loop.advance(9)
            await talking.ask(request(RequestCode.GET_MAX_OFFSET, QueueOfTopic("T", 0)))
            await turns()
            if silent.transport.is_aborted:
                break
        assert silent.transport.is_aborted
        assert not talking.transport.is_aborted


async def test_the_broker_closes_its_connections_when_it_stops(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        peers = [broker.connect() for _ in range(3)]
    assert all(peer.transport.is_closing() for peer in peers)


async def test_who_connects_while_the_broker_stops_is_not_read_from(tmp_path: Path) -> None:
    """The broker does not read from a client that connects during the stop: offsets are saved already, and earlier a
    commit answered then was lost."""
    async with running(tmp_path) as broker:
        broker.router.stop_taking()  # the stop begins with this
        late = broker.connect()
        assert not late.transport.takes_data
        assert late.transport.is_closing()


# --- requests of the broker


async def test_a_response_of_the_client_finds_its_request(frames: Frames) -> None:
    peer = connect(frames)
    answers: list[Command | None] = []
    peer.connection.request(Command(code=307), 5.0, answers.append)
    (asked,) = peer.requests
    peer.connection.take_response(Command(code=0, flag=FLAG_RESPONSE, opaque=asked.opaque + 1))
    assert answers == []
    response = Command(code=0, flag=FLAG_RESPONSE, opaque=asked.opaque)
    peer.connection.take_response(response)
    peer.connection.take_response(response)
    assert answers == [response]


async def test_a_request_without_a_response_ends_in_time(frames: Frames, loop: SteppedLoop) -> None:
    peer = connect(frames)
    answers: list[Command | None] = []
    peer.connection.request(Command(code=307), 5.0, answers.append)
    loop.advance(4.9)
    await turns()
    assert answers == []
    loop.advance(0.2)
    await turns()
    assert answers == [None]


async def test_a_request_ends_with_its_connection(frames: Frames) -> None:
    peer = connect(frames)
    answers: list[Command | None] = []
    peer.connection.request(Command(code=307), 5.0, answers.append)
    peer.transport.abort()
    await turns()
    peer.connection.request(Command(code=307), 5.0, answers.append)
    assert answers == [None, None]


async def test_a_client_that_does_not_read_is_asked_and_told_nothing(loop: SteppedLoop) -> None:
    """A client that does not read gets no requests and no notices from the broker: those must not fill its memory."""
    peer = connect(Frames(join_frame(JSON, b'{"code":0,"flag":1}', bytes(300_000))))
    peer.transport.block()
    peer.feed(numbered(1))
    held = peer.transport.get_write_buffer_size()
    answers: list[Command | None] = []
    for _ in range(10):
        peer.connection.request(Command(code=307, body=bytes(100_000)), 5.0, answers.append)
        peer.connection.notify(Command(code=40))
    assert answers == [None] * 10
    assert peer.transport.get_write_buffer_size() == held


async def test_a_client_that_never_responds_is_asked_so_many_times_at_once(frames: Frames) -> None:
    peer = connect(frames)
    answers: list[Command | None] = []
    for _ in range(MAX_REQUESTS + 5):
        peer.connection.request(Command(code=307), 5.0, answers.append)
    assert answers == [None] * 5
    assert len(peer.requests) == MAX_REQUESTS


async def test_notices_are_one_way_and_in_the_codec_of_the_client(frames: Frames) -> None:
    peer = connect(frames)
    peer.connection.notify(Command(code=40, ext={"consumerGroup": "g"}))
    peer.connection.last_codec = BINARY
    peer.connection.notify(Command(code=40, ext={"consumerGroup": "g"}))
    assert [frame[0] for frame in peer.frames] == [JSON, BINARY]
    assert {command.flag for command in peer.requests} == {FLAG_ONEWAY}
    assert len({command.opaque for command in peer.requests}) == 2
