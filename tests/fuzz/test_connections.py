"""Many clients, and clients that do not finish, do not read or do not leave: the broker's memory is bounded, and it
goes on serving others."""

from __future__ import annotations

import random
import resource
import select
import socket
import struct
from collections import Counter
from collections.abc import Iterator

import pytest

from duemq.protocol.codes import FLAG_ONEWAY, RequestCode, ResponseCode
from duemq.protocol.frames import codec
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.fastjson import dumps
from duemq.protocol.frames.frame import BINARY, JSON, MAX_FRAME_BYTES, join_frame
from duemq.protocol.records import batch, record
from duemq.protocol.requests import bodies
from duemq.protocol.requests.bodies import ConsumerData, HeartbeatData
from duemq.protocol.requests.headers import QueueOfTopic, RelayToConsumer
from tests.fuzz.client import RawClient
from tests.fuzz.live import Line, LiveBroker
from tests.fuzz.test_bytes import port_of, valid
from tests.fuzz.witness import Witness
from tests.support.wire import pull, request, send

pytestmark = pytest.mark.fuzz

MIB = 1024 * 1024
IDLE_CONNECTIONS = 10_000


@pytest.fixture
def many_files() -> Iterator[None]:
    """Raise the limit of open files; the broker started in this test inherits it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < IDLE_CONNECTIONS + 500:
        pytest.skip(f"this process may open only {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def max_offset(topic: str = "T") -> Command:
    return request(RequestCode.GET_MAX_OFFSET, QueueOfTopic(topic, 0))


def close_all(clients: list[RawClient]) -> None:
    for client in clients:
        client.close()


def test_ten_thousand_idle_connections(many_files: None, broker: LiveBroker, witness: Witness) -> None:
    """Idle connections cost little memory, each is served when it sends a request, and the broker still serves new
    clients after they close."""
    clients = [RawClient(broker.port) for _ in range(IDLE_CONNECTIONS)]
    for client in clients[::97]:
        assert client.ask(max_offset(), BINARY).code == ResponseCode.SUCCESS
    witness.wait_rounds(2)
    assert witness.growth_bytes < IDLE_CONNECTIONS * 12 * 1024
    close_all(clients)
    with RawClient(broker.port) as client:
        assert client.ask(max_offset()).code == ResponseCode.SUCCESS


def test_connections_that_come_and_go(broker: LiveBroker, witness: Witness, rng: random.Random) -> None:
    """The broker logs at most one line for a connection that is closed or reset: before any byte, within a frame, or
    before its answer."""
    ports: Counter[int] = Counter()  # the kernel may reuse a port
    for _ in range(1500):
        client = RawClient(rng.choice((broker.port, broker.port - 2, broker.nameserver_port)))
        data = b"".join(valid(rng) for _ in range(rng.randrange(3)))
        client.send(data[: rng.randrange(len(data) + 1)] if rng.random() < 0.5 else data)
        ports[client.local_port] += 1
        client.close() if rng.random() < 0.5 else client.reset()
    with RawClient(broker.port) as client:
        client.ask(max_offset())
    lines = [line for line in broker.lines if "peer" in line]
    assert {line["event"] for line in lines} <= {"connection_broken"}
    assert Counter(port_of(line) for line in lines) <= ports
    assert witness.growth_bytes < 64 * MIB


def test_half_open_connections(broker: LiveBroker, witness: Witness, rng: random.Random) -> None:
    """Hundreds of clients that stop within a frame and stay connected cost little memory; the broker closes half-closed
    connections."""
    stuck = []
    for _ in range(500):
        client = RawClient(broker.port)
        data = valid(rng)
        client.send(data[: rng.randrange(1, len(data))])
        stuck.append(client)
    for _ in range(50):
        with RawClient(broker.port) as client:
            client.send(codec.encode(max_offset()))
            client.socket.shutdown(socket.SHUT_WR)
            client.wait_closed()
    witness.wait_rounds(2)
    assert witness.growth_bytes < 64 * MIB
    close_all(stuck)


def test_a_trickle_of_single_bytes(broker: LiveBroker, witness: Witness, rng: random.Random) -> None:
    """The broker answers a hundred clients that take turns sending their requests byte by byte."""
    commands = [max_offset() for _ in range(100)]
    clients = [RawClient(broker.port) for _ in commands]
    frames = [codec.encode(command, rng.choice((JSON, BINARY))) for command in commands]
    for at in range(max(map(len, frames))):
        for client, data in zip(clients, frames, strict=True):
            if at < len(data):
                assert client.send(data[at : at + 1])
    for client, command in zip(clients, commands, strict=True):
        answer = client.response()
        assert (answer.code, answer.opaque) == (ResponseCode.SUCCESS, command.opaque)
    close_all(clients)


def test_a_large_frame_in_tiny_pieces_costs_its_own_size(broker: LiveBroker, witness: Witness) -> None:
    """The broker holds a frame that arrives three bytes at a time without keeping an object for each piece."""
    data = join_frame(JSON, b'{"code":999,"flag":0,"opaque":5}', bytes(1_500_000))
    with RawClient(broker.port) as client:
        for at in range(0, len(data), 3):
            assert client.send(data[at : at + 3])
        assert client.response().opaque == 5
    assert witness.growth_bytes < 32 * MIB


def test_unfinished_frames_of_many_clients(broker: LiveBroker, witness: Witness) -> None:
    """When unfinished frames add up to a gigabyte, the broker drops the connections that hold most, with one log line
    each; others stay connected, although their messages come in pieces as well."""
    small = codec.encode(send("T", bytes(100_000)))
    patient = [RawClient(broker.port) for _ in range(50)]
    for client in patient:
        assert client.send(small[:50_000])
    head = struct.pack(">iI", MAX_FRAME_BYTES - 4, 10)
    hoarders = [RawClient(broker.port) for _ in range(64)]
    block = bytes(MIB)
    taken = [client for client in hoarders if client.send(head)]
    for _ in range(15):
        taken = [client for client in taken if client.send(block)]
    witness.wait_rounds(2)
    assert witness.growth_bytes < (256 + 64) * MIB  # the budget for unfinished frames, and little more
    for client in patient:
        assert client.send(small[50_000:])
        assert client.response().code == ResponseCode.SUCCESS

    def drops(lines: list[Line]) -> list[Line]:
        return [line for line in lines if line.get("event") == "connection_dropped"]

    broker.wait_for(lambda lines: len(drops(lines)) >= 64 - 256 // 15)  # by then it has read everything that was sent
    assert witness.growth_bytes < (256 + 64) * MIB
    dropped = drops(broker.lines)
    assert {line["peer"] for line in dropped} <= {f"127.0.0.1:{client.local_port}" for client in hoarders}
    assert len({line["peer"] for line in dropped}) == len(dropped)
    close_all(hoarders + patient)


def test_consumers_that_stop_reading_while_pulls_pour_in(broker: LiveBroker, witness: Witness) -> None:
    """The broker stops reading from a hundred consumers that ask for two gigabytes together without reading answers.
    When they read again, every answer arrives: not always in the order of the pulls, since a thread reads messages that
    have left the page cache."""
    with RawClient(broker.port) as client:
        for number in range(4):
            assert client.ask(send("Big", bytes(200_000 + number))).code == ResponseCode.SUCCESS
    clients = [RawClient(broker.port, receive_buffer=4096) for _ in range(100)]
    pulls = [pull("Big", number % 4, count=1) for number in range(100)]
    frames = b"".join(codec.encode(command) for command in pulls)
    for client in clients:
        client.socket.setblocking(False)
        try:
            client.socket.send(frames)
        except BlockingIOError:
            raise AssertionError("the broker does not even take the first pulls") from None
    witness.wait_rounds(5)
    assert witness.growth_bytes < 100 * 1 * MIB
    for client in clients[:10]:
        client.socket.setblocking(True)
        sizes = {}
        for _ in pulls:
            answer = client.response()
            assert answer.code == ResponseCode.SUCCESS
            (message,) = record.decode_all(bytes(answer.body))
            sizes[answer.opaque] = len(message.body)
        assert sizes == {command.opaque: 200_000 + number % 4 for number, command in enumerate(pulls)}
    close_all(clients)


def test_requests_whose_answers_are_not_read(broker: LiveBroker, witness: Witness) -> None:
    """Many small requests with large unread answers, on many connections at once, do not fill the broker's memory."""
    data = codec.encode(request(RequestCode.GET_BROKER_CONFIG), BINARY) * 20_000
    clients = [RawClient(broker.port, receive_buffer=4096) for _ in range(50)]
    for client in clients:
        client.socket.setblocking(False)
        sent = 0
        while sent < len(data):
            _, writable, _ = select.select([], [client.socket], [], 0.2)
            if not writable:
                break
            sent += client.socket.send(data[sent:])
    witness.wait_rounds(3)
    assert witness.growth_bytes < 50 * 2 * MIB
    close_all(clients)


def test_questions_to_a_consumer_that_does_not_read(broker: LiveBroker, witness: Witness) -> None:
    """The broker refuses an admin's questions to a consumer that does not read, instead of keeping them for it."""
    with RawClient(broker.port, receive_buffer=4096) as consumer, RawClient(broker.port) as admin:
        data = HeartbeatData("c1", None, [ConsumerData("g")])
        assert consumer.ask(request(RequestCode.HEART_BEAT, body=dumps(data))).code == ResponseCode.SUCCESS
        codes = []
        for _ in range(200):
            question = request(RequestCode.GET_CONSUMER_RUNNING_INFO, RelayToConsumer("g", "c1"), bytes(MIB))
            assert admin.send(codec.encode(question))
        witness.wait_rounds(2)
        assert witness.growth_bytes < 128 * MIB
        for _ in range(190):
            codes.append(admin.response().code)
        assert set(codes) == {ResponseCode.CONSUME_MSG_TIMEOUT}


def test_heartbeats_of_many_groups(broker: LiveBroker, witness: Witness) -> None:
    """Heartbeats with invalid group names leave no groups behind."""
    with RawClient(broker.port) as client:
        for number in range(200):
            names = [f"bad name {number} {n}" for n in range(50)]
            data = HeartbeatData(f"c{number}", None, [ConsumerData(name) for name in names])
            assert client.ask(request(RequestCode.HEART_BEAT, body=dumps(data))).code == ResponseCode.SYSTEM_ERROR
        answer = client.ask(request(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG))
        assert b"bad name" not in bytes(answer.body)


def test_json_that_takes_long_to_read_keeps_nobody_waiting(broker: LiveBroker, witness: Witness) -> None:
    """The broker goes on serving others while it gets megabytes of nearly valid JSON, and small bodies that would
    expand without end."""
    evil = [
        b"{0:[" + b"1," * 4_000_000 + b"1]}",
        b"{" * 60 + b'"a":1' + b"}:1" * 59 + b"}",
        b"[" * 5_000_000,
        b'{"clientID":"' + b"\\u0001" * 1_000_000 + b'"}',
        b'{"clientID":"x","other":' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}",
    ]
    before = witness.rounds
    with RawClient(broker.port) as client:
        for body in evil:
            for code in (RequestCode.HEART_BEAT, RequestCode.LOCK_BATCH_MQ, RequestCode.QUERY_DATA_VERSION):
                command = request(code, body=body)
                command.ext = {"brokerName": "b", "brokerAddr": "a", "clusterName": "c", "brokerId": "0"}
                client.ask(command)
    assert bodies.LOOSE_LIMIT <= MIB
    witness.wait_rounds(2)
    assert witness.rounds > before
    assert witness.growth_bytes < 256 * MIB


def test_batches_of_very_many_messages(broker: LiveBroker, witness: Witness) -> None:
    """The broker refuses a batch with as many messages as fit into a frame, and stores every message of one that is as
    large as a message may be."""
    part = batch.encode([(0, b"", "")])
    with RawClient(broker.port) as client:
        too_large = send("Batch", part * 700_000, batch=True)
        assert client.ask(too_large).code == ResponseCode.MESSAGE_ILLEGAL
        large = send("Batch", part * 20_000, batch=True)
        assert client.ask(large).code == ResponseCode.SUCCESS
        assert client.ask(max_offset("Batch")).ext["offset"] == "20000"


def test_a_storm_of_everything(broker: LiveBroker, witness: Witness, rng: random.Random) -> None:
    """The broker goes on serving well-behaved clients while clients of all kinds act at once, for some thousand
    steps."""
    clients: list[RawClient] = []
    for _ in range(3000):
        if len(clients) < 200 and rng.random() < 0.3:
            clients.append(RawClient(rng.choice((broker.port, broker.nameserver_port)), receive_buffer=4096))
        if not clients:
            continue
        client = rng.choice(clients)
        client.socket.setblocking(False)
        data = rng.choice((valid, lambda r: r.randbytes(50), lambda r: struct.pack(">i", r.randrange(-(2**31), 2**31)),
                           lambda r: codec.encode(send("T", r.randbytes(1000), oneway=True)),
                           lambda r: codec.encode(pull("T", r.randrange(100), suspend_ms=r.randrange(20_000))),
                           lambda r: join_frame(JSON, b"{}", bytes(100_000))[: r.randrange(100_000)],
                           lambda r: codec.encode(Command(code=999, flag=FLAG_ONEWAY)) * 50))(rng)  # fmt: skip
        try:
            client.socket.send(data)
        except OSError:
            clients.remove(client)
            client.close()
        if rng.random() < 0.1 and client in clients:
            clients.remove(client)
            client.close() if rng.random() < 0.5 else client.reset()
    with RawClient(broker.port) as well:
        assert well.ask(max_offset()).code == ResponseCode.SUCCESS
    assert witness.growth_bytes < 192 * MIB
    close_all(clients)
