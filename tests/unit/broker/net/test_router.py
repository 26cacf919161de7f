"""From frames to answers: each run of sends is written once, each request gets its own answer in its own codec, and no
request harms another."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest

from duemq.broker.access.permission import ACCOUNT
from duemq.broker.errors import Refused
from duemq.broker.net.router import Handler
from duemq.protocol.codes import FLAG_ONEWAY, FLAG_RESPONSE, RequestCode, ResponseCode
from duemq.protocol.frames import codec
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import BINARY, CODECS, JSON, MSGPACK, join_frame
from duemq.protocol.requests.headers import NoFields, QueueOfTopic, Request, SendMessageResponse, TopicName, decode_ext
from duemq.storage.errors import StoreBroken, StoreError, StoreFull
from tests.support.broker import Peer, UnboundBroker, running
from tests.support.loop import turns
from tests.support.wire import pull, request, send

MAX_OFFSET = RequestCode.GET_MAX_OFFSET
UNKNOWN = 999


class Writes:
    """Counts the appender's writes, and may make them fail."""

    def __init__(self, broker: UnboundBroker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.error: OSError | StoreError | None = None
        self._write = broker.store.log.write
        monkeypatch.setattr(broker.store.log, "write", self.write)

    def write(self, position: int, data: bytes) -> None:
        if self.error is not None:
            raise self.error
        self.sizes.append(len(data))
        self._write(position, data)


@pytest.fixture
async def topic(broker: UnboundBroker, peer: Peer) -> str:
    """A topic of four queues that accepts messages."""
    assert (await peer.ask(send("T"))).code == ResponseCode.SUCCESS
    return "T"


@pytest.fixture
def writes(broker: UnboundBroker, monkeypatch: pytest.MonkeyPatch) -> Writes:
    return Writes(broker, monkeypatch)


def offset_of(answer: Command) -> int:
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return decode_ext(SendMessageResponse, answer.ext).queue_offset


# --- runs of sends


async def test_the_sends_of_one_read_are_written_once(peer: Peer, topic: str, writes: Writes) -> None:
    answers = await peer.ask_all([send(topic) for _ in range(10)])
    assert [offset_of(answer) for answer in answers] == list(range(1, 11))
    assert len(writes.sizes) == 1


async def test_another_request_between_sends_sees_those_before_it(peer: Peer, topic: str, writes: Writes) -> None:
    """A request between sends sees the sends before it: it splits the run, and those are written first."""
    middle = request(MAX_OFFSET, QueueOfTopic(topic, 0))
    answers = await peer.ask_all([send(topic), send(topic), middle, send(topic), pull(topic, 3)])
    assert answers[2].ext["offset"] == "3"
    assert answers[4].body
    assert [offset_of(answer) for answer in (answers[0], answers[1], answers[3])] == [1, 2, 3]
    assert len(writes.sizes) == 2
    assert [answer.opaque for answer in peer.responses[-5:]] == [answer.opaque for answer in answers]


async def test_a_refused_send_does_not_hinder_the_others_of_its_run(peer: Peer, topic: str, writes: Writes) -> None:
    bad = send(topic, queue_id=99)
    answers = await peer.ask_all([send(topic), bad, send(topic)])
    assert [answer.code for answer in answers] == [0, ResponseCode.SYSTEM_ERROR, 0]
    assert [offset_of(answers[0]), offset_of(answers[2])] == [1, 2]
    assert len(writes.sizes) == 1


@pytest.mark.parametrize("error", [StoreFull("no room"), StoreBroken("gone"), OSError(5, "io")])
async def test_a_failing_append_turns_exactly_its_sends_into_errors(
    peer: Peer, topic: str, writes: Writes, error: OSError | StoreError
) -> None:
    """A failing append turns exactly its sends into errors: a send refused for another reason keeps its own error, and
    other requests are answered as usual."""
    ask = request(MAX_OFFSET, QueueOfTopic(topic, 0))
    writes.error = error
    answers = await peer.ask_all([ask, send(topic), send(topic, queue_id=99), send(topic), pull(topic, 0)])
    assert [answer.code for answer in answers] == [
        ResponseCode.SUCCESS,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.SYSTEM_ERROR,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.SUCCESS,
    ]
    assert "queueId[99]" in (answers[2].remark or "")
    assert not answers[1].ext.get("msgId")
    assert (await peer.ask(request(MAX_OFFSET, QueueOfTopic(topic, 0)))).ext["offset"] == "1"


async def test_after_a_full_disk_sends_are_taken_again(peer: Peer, topic: str, writes: Writes) -> None:
    writes.error = OSError(28, "No space left on device")
    assert (await peer.ask(send(topic))).code == ResponseCode.SERVICE_NOT_AVAILABLE
    writes.error = None
    assert offset_of(await peer.ask(send(topic))) == 1


async def test_a_send_that_waits_for_its_topic_is_answered_once_when_its_run_fails(
    peer: Peer, topic: str, writes: Writes
) -> None:
    """A send that waits for its topic is answered once when the run it came in fails: it is not part of that run, and
    has its own outcome later."""
    new = send("New")
    writes.error = OSError(28, "No space left on device")
    answers = await peer.ask_all([send(topic), new, send(topic)])
    assert [answer.code for answer in answers] == [ResponseCode.SERVICE_NOT_AVAILABLE] * 3
    await turns(20)
    assert [answer.opaque for answer in peer.responses].count(new.opaque) == 1


async def test_one_way_sends_are_stored_and_never_answered(peer: Peer, topic: str, writes: Writes) -> None:
    peer.forget()
    peer.post(send(topic, oneway=True), send(topic, oneway=True, queue_id=99))
    assert (await peer.ask(request(MAX_OFFSET, QueueOfTopic(topic, 0)))).ext["offset"] == "2"
    assert len(peer.frames) == 1
    writes.error = OSError(28, "full")
    peer.post(send(topic, oneway=True))
    await turns()
    assert len(peer.frames) == 1


# --- sync flush


async def test_sync_flush_holds_answers_until_the_disk_has_the_messages(tmp_path: Path) -> None:
    async with running(tmp_path, "flushDiskType=SYNC_FLUSH") as broker:
        peer, other = broker.connect(), broker.connect()
        assert (await peer.ask(send("T"))).code == 0
        flushed = broker.store.log.flushed
        commands = [send("T") for _ in range(3)]
        peer.post(*commands)
        assert [peer.answer_of(command) for command in commands] == [None] * 3
        assert broker.store.log.flushed == flushed
        assert (await other.ask(request(MAX_OFFSET, QueueOfTopic("T", 0)))).ext["offset"] == "4"
        assert [offset_of(answer) for answer in await peer.ask_all([send("T"), send("T")])] == [4, 5]
        assert broker.store.log.flushed == broker.store.log.end
        assert [offset_of(answer) for answer in map(peer.answer_of, commands) if answer] == [1, 2, 3]


async def test_a_flush_that_takes_too_long_turns_only_stored_messages_into_timeouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush that takes too long gives FLUSH_DISK_TIMEOUT, which means "stored", to stored messages only, and not to
    refused ones. Java's client needs the message id in it."""
    async with running(tmp_path, "flushDiskType=SYNC_FLUSH", "syncFlushTimeout=1000") as broker:
        loop = asyncio.get_running_loop()
        peer = broker.connect()
        assert (await peer.ask(send("T"))).code == 0
        stuck: asyncio.Future[None] = loop.create_future()
        monkeypatch.setattr(loop, "run_in_executor", lambda *_: stuck)
        commands = [send("T"), send("T", queue_id=99), send("T"), send("T", oneway=True)]
        for frame_codec in CODECS:
            peer.forget()
            peer.post(*commands, frame_codec=frame_codec)
            await turns()
            loop.advance(1.1)  # type: ignore[attr-defined]
            await turns()
            assert [(frame[0], frame[1].code) for frame in peer.frames] == [
                (frame_codec, ResponseCode.FLUSH_DISK_TIMEOUT),
                (frame_codec, ResponseCode.SYSTEM_ERROR),
                (frame_codec, ResponseCode.FLUSH_DISK_TIMEOUT),
            ]
            answer = peer.responses[0]
            assert "disk" in (answer.remark or "")
            assert decode_ext(SendMessageResponse, answer.ext).queue_id == 0
        stuck.set_result(None)
        monkeypatch.undo()


async def test_a_send_that_made_its_topic_waits_for_the_disk_as_well(tmp_path: Path) -> None:
    async with running(tmp_path, "flushDiskType=SYNC_FLUSH") as broker:
        peer = broker.connect()
        offset_of(await peer.ask(send("Fresh")))
        assert broker.store.log.flushed == broker.store.log.end


# --- wrong requests


@pytest.mark.parametrize("frame_codec", CODECS)
async def test_an_unknown_code_is_answered_so(peer: Peer, frame_codec: int, logged: list[Any]) -> None:
    answer = await peer.ask(request(UNKNOWN), frame_codec)
    assert (answer.code, answer.remark) == (ResponseCode.REQUEST_CODE_NOT_SUPPORTED, " request type 999 not supported")
    (line,) = logged
    assert (line["event"], line["code"], line["peer"]) == ("request_refused", 999, "127.0.0.1:40000")


@pytest.mark.parametrize("frame_codec", CODECS)
async def test_a_missing_field_is_named(peer: Peer, frame_codec: int, logged: list[Any]) -> None:
    command = request(MAX_OFFSET, QueueOfTopic("T", 0))
    del command.ext["queueId"]
    answer = await peer.ask(command, frame_codec)
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert answer.remark == "the header field queueId: is missing"
    assert [line["event"] for line in logged] == ["request_refused"]


async def test_a_wrong_field_is_named(peer: Peer) -> None:
    command = request(MAX_OFFSET, QueueOfTopic("T", 0))
    command.ext["queueId"] = "many"
    answer = await peer.ask(command)
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "queueId" in (answer.remark or "")


async def test_a_body_that_does_not_parse_is_answered_and_logged_once(peer: Peer, logged: list[Any]) -> None:
    answer = await peer.ask(request(RequestCode.HEART_BEAT, body=b"{"))
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "HeartbeatData" in (answer.remark or "")
    (line,) = logged
    assert line["event"] == "request_refused"
    assert "exc_info" not in line


@pytest.mark.parametrize("frame_codec", CODECS)
async def test_no_one_way_request_is_answered(peer: Peer, topic: str, frame_codec: int) -> None:
    """No one-way request is answered, not even with an error."""
    peer.forget()
    broken = request(MAX_OFFSET, oneway=True)
    peer.post(
        request(UNKNOWN, oneway=True),
        broken,
        request(MAX_OFFSET, QueueOfTopic(topic, 0), oneway=True),
        request(RequestCode.HEART_BEAT, body=b"x", oneway=True),
        request(RequestCode.GET_TOPIC_CONFIG, TopicName("missing"), oneway=True),
        request(RequestCode.DELETE_TOPIC_IN_BROKER, TopicName("missing"), oneway=True),
        pull(topic),
        frame_codec=frame_codec,
    )
    await turns(20)
    assert [frame[0] for frame in peer.frames] == [frame_codec]
    assert peer.responses[0].ext["nextBeginOffset"] == "1"


@pytest.mark.parametrize("frame_codec", CODECS)
async def test_answers_are_in_the_codec_of_their_request(peer: Peer, topic: str, frame_codec: int) -> None:
    """Answers are in the codec of their request: sends, pulls, and requests handled in a task."""
    peer.forget()
    commands = [
        send(topic),
        send(topic, v1=True),
        pull(topic),
        request(MAX_OFFSET, QueueOfTopic(topic, 0)),
        send(topic, queue_id=99),
        send("Other"),
        request(RequestCode.DELETE_TOPIC_IN_BROKER, TopicName("missing")),
    ]
    await peer.ask_all(commands, frame_codec)
    assert [frame[0] for frame in peer.frames] == [frame_codec] * len(commands)
    for _, answer in peer.frames:
        assert answer.flag == FLAG_RESPONSE
        assert (answer.language, answer.version) == ("PYTHON", 407)


async def test_codecs_may_change_within_a_connection(peer: Peer, topic: str) -> None:
    peer.forget()
    mixed = [
        (BINARY, send(topic)),
        (JSON, send(topic)),
        (MSGPACK, send(topic)),
        (JSON, pull(topic)),
        (BINARY, pull(topic)),
    ]
    peer.feed(b"".join(codec.encode(command, frame_codec) for frame_codec, command in mixed))
    assert [frame[0] for frame in peer.frames] == [frame_codec for frame_codec, _ in mixed]
    assert [frame[1].opaque for frame in peer.frames] == [command.opaque for _, command in mixed]


async def test_a_json_header_in_any_order_is_taken(peer: Peer, topic: str) -> None:
    """A JSON header in any order is accepted, although the quick way depends on how the header begins."""
    for head in (
        b'{"opaque":77,"code":30,"extFields":{"queueId":"0","topic":"T"}}',
        b'{ "code" : 30 , "extFields":{"queueId":0,"topic":"T"}, "opaque":77 }',
        b'{"code":30,"opaque":77,"extFields":{"queueId":"+0","topic":"T","x":null}}',
        b'{"code":30,"code":30,"opaque":77,"extFields":{"queueId":"00","topic":"T"}}',
    ):
        peer.forget()
        peer.feed(join_frame(JSON, head))
        assert [(answer.opaque, answer.ext) for answer in peer.responses] == [(77, {"offset": "1"})]


# --- finding the handler

CODES = [*range(30_106, 30_110), 3000, 300_001, 1234, 12_340, 123_400, 9, 99, 998, 2_000_000_000, -7, -30_106]
"""Many of them begin with the same digits as others."""


@pytest.mark.parametrize("frame_codec", CODECS)
async def test_each_code_has_a_handler_of_its_own(broker: UnboundBroker, peer: Peer, frame_codec: int) -> None:
    def handler(code: int) -> Handler:
        return lambda _, __: Command(code=0, ext={"handler": str(code)})

    own = {RequestCode.MOVE_CLOCK, RequestCode.CANCEL_MESSAGE, RequestCode.LIST_PENDING, RequestCode.DUE_CURVE}
    for code in CODES:
        broker.router.add(code, NoFields, ACCOUNT, handler(code))
    codes = CODES if frame_codec != BINARY else [code for code in CODES if abs(code) < 1 << 15]
    answers = await peer.ask_all([request(code) for code in codes], frame_codec)
    assert [answer.ext.get("handler") for answer in answers] == [str(code) for code in codes]
    answers = await peer.ask_all([request(code) for code in sorted(own)], frame_codec)
    assert not any("handler" in answer.ext for answer in answers)


async def test_the_usual_json_header_of_any_code_is_decoded_once(
    broker: UnboundBroker, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The usual JSON header of any code is decoded once, by the quick way. The slow way makes a command first; codes of
    one digit would take it, but none exist."""
    codes = [code for code in CODES if code != 9]
    handled: list[int] = []
    for code in codes:
        broker.router.add(code, NoFields, ACCOUNT, lambda _, request: handled.append(request.code))
    data = b"".join(codec.encode(request(code, oneway=True)) for code in codes)
    monkeypatch.setattr(codec, "decode", lambda frame: pytest.fail(f"{frame!r} went the slow way"))
    peer.feed(data)
    assert handled == codes


# --- failing handlers


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_handlers_exception_is_answered_logged_and_harms_nobody(
    broker: UnboundBroker, peer: Peer, topic: str, is_async: bool, logged: list[Any]
) -> None:
    def fail(_: object, request: Request[NoFields]) -> None:
        raise ZeroDivisionError("by zero")

    async def fail_later(_: object, request: Request[NoFields]) -> None:
        await asyncio.sleep(0)
        raise ZeroDivisionError("by zero")

    broker.router.add(UNKNOWN, NoFields, ACCOUNT, fail_later if is_async else fail)
    answers = await peer.ask_all([send(topic), request(UNKNOWN), send(topic)])
    assert [answer.code for answer in answers] == [0, ResponseCode.SYSTEM_ERROR, 0]
    assert answers[1].remark == "ZeroDivisionError: by zero"
    assert [line["event"] for line in logged] == ["request_failed"]
    assert not peer.transport.is_closing()


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.ENOSPC, ResponseCode.SERVICE_NOT_AVAILABLE), (errno.EIO, ResponseCode.SYSTEM_ERROR)],
)
async def test_a_file_that_cannot_be_read_or_written_is_told_without_a_traceback(
    broker: UnboundBroker, peer: Peer, number: int, code: int, logged: list[Any]
) -> None:
    """A file that cannot be read or written is logged without a traceback, as otherwise each refused send would log
    one."""

    def fail(_: object, request: Request[NoFields]) -> None:
        raise OSError(number, "no", "/s/timerlog")

    broker.router.add(UNKNOWN, NoFields, ACCOUNT, fail)
    answers = [await peer.ask(request(UNKNOWN)) for _ in range(100)]
    assert {answer.code for answer in answers} == {code}
    assert all("/s/timerlog" in (answer.remark or "") for answer in answers)
    told = [line for line in logged if line["event"] == "file_not_read_or_written"]
    assert 0 < len(told) < 100
    assert all("exc_info" not in line for line in logged)


async def test_connections_for_which_there_is_no_room_are_refused_and_harm_nobody(
    broker: UnboundBroker, peer: Peer, topic: str, monkeypatch: pytest.MonkeyPatch, logged: list[Any]
) -> None:
    monkeypatch.setattr(broker.running.net.limits, "descriptors", 3)
    others = [broker.connect() for _ in range(200)]
    assert [other.transport.is_closing() for other in others] == [False] * 2 + [True] * 198
    assert offset_of(await peer.ask(send(topic))) == 1
    told = [line for line in logged if line["event"] == "connection_refused"]
    assert told
    assert "there are 3 connections" in told[0]["reason"]
    others[0].connection.connection_lost(None)
    assert offset_of(await broker.connect().ask(send(topic))) == 2


@pytest.mark.parametrize("is_async", [False, True])
async def test_an_answer_that_cannot_be_encoded_becomes_an_error(
    broker: UnboundBroker, peer: Peer, is_async: bool, logged: list[Any]
) -> None:
    """An answer that cannot be encoded becomes an error with one line in the log and no traceback: a code beyond 16
    bits for a binary client, or a body beyond the largest frame."""
    wrong = [Command(code=70_000), Command(code=0, body=bytes(17_000_000))]

    def answer(_: object, request: Request[NoFields]) -> Command:
        return wrong.pop()

    async def answer_later(_: object, request: Request[NoFields]) -> Command:
        await asyncio.sleep(0)
        return wrong.pop()

    broker.router.add(UNKNOWN, NoFields, ACCOUNT, answer_later if is_async else answer)
    for number in (1, 2):
        answered = await peer.ask(request(UNKNOWN), BINARY)
        assert answered.code == ResponseCode.SYSTEM_ERROR
        assert len(logged) == number
    assert all("exc_info" not in line for line in logged)


async def test_a_refusal_is_answered_and_not_logged(broker: UnboundBroker, peer: Peer, logged: list[Any]) -> None:
    def refuse(_: object, request: Request[NoFields]) -> None:
        raise Refused(ResponseCode.NO_PERMISSION, "not you")

    broker.router.add(UNKNOWN, NoFields, ACCOUNT, refuse)
    answer = await peer.ask(request(UNKNOWN))
    assert (answer.code, answer.remark) == (ResponseCode.NO_PERMISSION, "not you")
    assert logged == []


# --- broken headers


@pytest.mark.parametrize(
    ("frame_codec", "header"),
    [
        (JSON, b"{"), (JSON, b'{"code":"x"}'), (JSON, b'{"code":310,"extFields":{"a":"\xff"}}'), (BINARY, b"\0\1"),
        (JSON, b'{"code":310,"extFields":' + b"[" * 100_000), (MSGPACK, b"\xc1"), (JSON, b'{"code":310,"opaque":1e9}'),
        (JSON, b'{"code":310,"extFields":{},"opaque":' + b"9" * 40 + b"}"),
    ],
)  # fmt: skip
async def test_a_broken_header_closes_the_connection_after_what_came_before_it(
    broker: UnboundBroker, peer: Peer, topic: str, frame_codec: int, header: bytes, logged: list[Any]
) -> None:
    """A broken header closes the connection after the requests before it are answered. Later bytes are ignored, as they
    may be misread."""
    peer.forget()
    before, after = send(topic), send(topic)
    peer.feed(codec.encode(before) + join_frame(frame_codec, header) + codec.encode(after))
    await turns()
    assert [answer.opaque for answer in peer.responses] == [before.opaque]
    assert peer.transport.is_closing()
    assert [line["event"] for line in logged] == ["connection_refused"]
    other = broker.connect()
    assert (await other.ask(request(MAX_OFFSET, QueueOfTopic(topic, 0)))).ext["offset"] == "2"


async def test_responses_that_nobody_waits_for_are_passed_over(peer: Peer, topic: str, logged: list[Any]) -> None:
    peer.forget()
    for code in (0, UNKNOWN, RequestCode.GET_BROKER_CONFIG, RequestCode.UNLOCK_BATCH_MQ):
        peer.post(*(Command(code=code, flag=flag, opaque=5) for flag in (FLAG_RESPONSE, FLAG_RESPONSE | FLAG_ONEWAY)))
    assert peer.frames == []
    assert offset_of(await peer.ask(send(topic))) == 1
    assert logged == []


async def test_a_flood_of_wrong_requests_is_not_logged_line_by_line(peer: Peer, logged: list[Any]) -> None:
    await peer.ask_all([request(UNKNOWN) for _ in range(500)])
    assert len(logged) <= 101


async def test_a_flood_of_broken_connections_is_not_logged_line_by_line(
    broker: UnboundBroker, logged: list[Any]
) -> None:
    """A flood of broken connections is not logged line by line. Other errors still get their own line, and the next
    second logs the number of lines left out."""
    for _ in range(1200):
        broker.connect().feed(b"GET / HTTP/1.1\r\n")
    assert [line["event"] for line in logged] == ["connection_refused"] * 1000
    await broker.connect().ask(request(UNKNOWN))
    assert logged[-1]["event"] == "request_refused"
    broker.clock.advance(1000)
    broker.connect().feed(b"GET / HTTP/1.1\r\n")
    assert [(line["event"], line.get("not_logged")) for line in logged[-2:]] == [
        ("connection_refused_often", 200),
        ("connection_refused", None),
    ]
