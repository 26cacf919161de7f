from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from duemq import ArgumentError, ConnectError, ConnectionLostError, PeerError, RequestTimeoutError
from duemq._net.connection import ClientConnection, Codec, check_codec, connect, split_address
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import JSON, MSGPACK
from duemq.protocol.requests.headers import ConsumerGroupName
from tests.unit.duemq.fake import FakeBroker, Request, success

ASKED = RequestCode.GET_BROKER_CONFIG
Open = Callable[..., Any]


@pytest.fixture
async def open_() -> AsyncIterator[Open]:
    """Open connections, and close them at the end."""
    connections: list[ClientConnection] = []

    async def open_one(
        broker: FakeBroker, codec: Codec = "auto", on_request: Any = lambda command: None
    ) -> ClientConnection:
        connection = await connect(broker.address, codec=codec, on_request=on_request, timeout=5)
        connections.append(connection)
        return connection

    yield open_one
    for connection in connections:
        connection.close()
        await connection.wait_closed()


async def ask(connection: ClientConnection, timeout: float = 5) -> Command:
    return await connection.request(ASKED, timeout=timeout)


async def test_answers_find_their_requests_in_any_order(broker: FakeBroker, open_: Open) -> None:
    waiting: list[Request] = []

    def answer_backwards(request: Request) -> None:
        waiting.append(request)
        if len(waiting) == 10:
            for each in reversed(waiting):
                each.connection.answer(each, success(body=each.ext["consumerGroup"].encode()))

    broker.on(ASKED, answer_backwards)
    connection = await open_(broker)
    answers = await asyncio.gather(
        *(connection.request(ASKED, ConsumerGroupName(consumer_group=f"g{n}"), timeout=5) for n in range(10))
    )
    assert [bytes(answer.body) for answer in answers] == [b"g%d" % n for n in range(10)]


async def test_auto_begins_in_json_and_stays_with_apache(broker: FakeBroker, open_: Open) -> None:
    connection = await open_(broker)
    for _ in range(3):
        await ask(connection)
    assert [request.codec for request in broker.requests] == [JSON] * 3


async def test_auto_goes_on_in_messagepack_with_duemq(open_: Open) -> None:
    async with FakeBroker(language="PYTHON") as broker:
        connection = await open_(broker)
        for _ in range(3):
            await ask(connection)
        assert [request.codec for request in broker.requests] == [JSON, MSGPACK, MSGPACK]


@pytest.mark.parametrize(("codec", "number"), [("json", JSON), ("msgpack", MSGPACK)])
async def test_a_codec_can_be_forced(codec: Codec, number: int, open_: Open) -> None:
    async with FakeBroker(language="PYTHON") as broker:
        connection = await open_(broker, codec)
        await ask(connection)
        await ask(connection)
        assert [request.codec for request in broker.requests] == [number] * 2


async def test_forced_messagepack_with_apache_says_what_is_wrong(broker: FakeBroker, open_: Open) -> None:
    connection = await open_(broker, "msgpack")
    with pytest.raises(ConnectionLostError, match="MessagePack"):
        await ask(connection)


async def test_a_request_that_is_not_answered_times_out_and_the_next_one_works(broker: FakeBroker, open_: Open) -> None:
    broker.on(ASKED, None, success())
    connection = await open_(broker)
    with pytest.raises(RequestTimeoutError, match=r"no answer from .* to GET_BROKER_CONFIG within 0\.01 s$"):
        await ask(connection, 0.01)
    assert (await ask(connection)).code == ResponseCode.SUCCESS


async def test_each_request_has_its_own_time(broker: FakeBroker, open_: Open) -> None:
    """One timer serves all requests: the first to be late is not the first that was sent, and those behind it are
    late at their own times."""
    broker.on(ASKED, None)
    connection = await open_(broker)
    late: list[float] = []

    async def wait(timeout: float) -> None:
        with pytest.raises(RequestTimeoutError, match=f"within {timeout:g} s"):
            await ask(connection, timeout)
        late.append(timeout)

    patient = asyncio.create_task(ask(connection, 60))
    await asyncio.gather(*(wait(timeout) for timeout in (0.9, 0.3, 0.6)))
    assert late == [0.3, 0.6, 0.9]
    assert not patient.done()
    patient.cancel()


async def test_the_requests_of_one_turn_go_out_in_one_write(broker: FakeBroker, open_: Open) -> None:
    connection = await open_(broker)
    transport, writes = connection._transport, []
    assert transport is not None

    class Counted:
        def write(self, data: bytes) -> None:
            writes.append(data)
            transport.write(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(transport, name)

    connection._transport = Counted()
    await asyncio.gather(*(ask(connection) for _ in range(50)))
    assert len(writes) == 1
    await asyncio.gather(*(connection.request(ASKED, body=bytes(30_000), timeout=5) for _ in range(5)))
    assert [len(data) // 30_000 for data in writes[1:]] == [3, 2], "and not too much is kept for it"
    connection._transport = transport


async def test_what_was_sent_is_written_before_the_connection_closes(broker: FakeBroker, open_: Open) -> None:
    connection = await open_(broker)
    await connection.send_oneway(ASKED, timeout=5)
    connection.close()
    await broker.until_requests(ASKED)


async def test_an_answer_that_comes_too_late_is_ignored(broker: FakeBroker, open_: Open) -> None:
    broker.on(ASKED, None, success())
    connection = await open_(broker)
    with pytest.raises(RequestTimeoutError):
        await ask(connection, 0.01)
    late = broker.requests[0]
    late.connection.answer(late, success(body=b"late"))
    assert bytes((await ask(connection)).body) == b""


async def test_a_lost_connection_fails_all_requests_under_way_and_later_ones(broker: FakeBroker, open_: Open) -> None:
    broker.on(ASKED, None)
    connection = await open_(broker)
    asking = [asyncio.create_task(ask(connection)) for _ in range(3)]
    await broker.until_requests(ASKED, 3)
    broker.cut()
    errors = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(error) for error in errors] == [ConnectionLostError] * 3
    assert len({id(error) for error in errors}) == 3
    assert not connection.is_open
    with pytest.raises(ConnectionLostError):
        await ask(connection)


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\x08\0\0\0\x04null", b"\xff" * 8])
async def test_bytes_that_are_no_frames_end_the_connection(data: bytes, broker: FakeBroker, open_: Open) -> None:
    broker.on(ASKED, lambda request: request.connection.transport.write(data))
    connection = await open_(broker)
    with pytest.raises(PeerError, match="broke the protocol"):
        await ask(connection)
    assert not connection.is_open


async def test_a_frame_cut_by_the_end_of_the_stream_says_so(broker: FakeBroker, open_: Open) -> None:
    def half(request: Request) -> None:
        request.connection.transport.write(b"\0\0\0\x08\0\0")
        request.connection.transport.close()

    broker.on(ASKED, half)
    with pytest.raises(ConnectionLostError, match="closed in the middle of a frame"):
        await ask(await open_(broker))


async def test_one_way_requests_are_marked_and_not_waited_for(broker: FakeBroker, open_: Open) -> None:
    connection = await open_(broker)
    await connection.send_oneway(ASKED, timeout=5)
    (request,) = await broker.until_requests(ASKED)
    assert request.command.is_oneway


async def test_requests_of_the_broker_are_handled_and_answered_in_their_codec(open_: Open) -> None:
    seen: list[Command] = []

    def on_request(command: Command) -> Command | None:
        seen.append(command)
        if command.code == RequestCode.CONSUME_MESSAGE_DIRECTLY:
            raise RuntimeError("broken")
        return success(body=b"info") if command.code == RequestCode.GET_CONSUMER_RUNNING_INFO else None

    async with FakeBroker(language="PYTHON") as broker:
        await ask(await open_(broker, on_request=on_request))
        connection = broker.connections[0]
        broker.notify(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": "g"})
        broker.notify(RequestCode.GET_CONSUMER_RUNNING_INFO, {}, oneway=False)
        broker.notify(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, {}, oneway=False, codec=MSGPACK)
        broker.notify(RequestCode.CONSUME_MESSAGE_DIRECTLY, {}, oneway=False)
        await broker.until(lambda: len(connection.responses) == 3)
    assert len(seen) == 4
    assert [(answer.code, answer.opaque) for answer in connection.responses] == [
        (ResponseCode.SUCCESS, 9),
        (ResponseCode.REQUEST_CODE_NOT_SUPPORTED, 9),
        (ResponseCode.SYSTEM_ERROR, 9),
    ]
    assert bytes(connection.responses[0].body) == b"info"
    assert connection.responses[2].remark == "RuntimeError: broken"


async def test_writing_waits_while_the_broker_does_not_read(broker: FakeBroker, open_: Open) -> None:
    connection = await open_(broker)
    connection.pause_writing()
    asking = asyncio.create_task(ask(connection))
    with pytest.raises(RequestTimeoutError):
        await connection.send_oneway(ASKED, timeout=0.01)
    assert not broker.requests
    connection.resume_writing()
    assert (await asking).code == ResponseCode.SUCCESS


async def test_a_loss_wakes_those_who_wait_to_write(broker: FakeBroker, open_: Open) -> None:
    connection = await open_(broker)
    connection.pause_writing()
    asking = asyncio.create_task(ask(connection))
    await asyncio.sleep(0)
    connection.close()
    with pytest.raises(ConnectionLostError, match="closed by this client"):
        await asking


async def test_a_broker_that_never_reads_cannot_delay_the_close(broker: FakeBroker, open_: Open) -> None:
    connection = await open_(broker)
    await ask(connection)
    broker.connections[0].transport.pause_reading()
    for _ in range(8):
        connection.resume_writing()
        await connection.send_oneway(ASKED, body=bytes(2_000_000), timeout=5)
    connection.close()
    await connection.wait_closed(timeout=0.01)


async def test_nobody_at_the_address_is_a_connect_error(broker: FakeBroker) -> None:
    broker.server.close()
    await broker.server.wait_closed()
    with pytest.raises(ConnectError, match=f"cannot connect to {broker.address}: .*refused"):
        await connect(broker.address, codec="auto", on_request=lambda command: None, timeout=5)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("h:1", "h", 1), ("h", "h", 9876), ("[::1]:5", "::1", 5), ("[::1]", "::1", 9876), (" 10.0.0.1:9 ", "10.0.0.1", 9)],
)
def test_addresses_are_taken_apart(text: str, host: str, port: int) -> None:
    assert split_address(text) == (host, port)


@pytest.mark.parametrize("text", ["", ":1", "h:", "h:x", "h:0", "h:65536", "h:-1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError):
        split_address(text)


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(ArgumentError, match="give one of auto, json, msgpack"):
        check_codec("xml")  # type: ignore[arg-type]
