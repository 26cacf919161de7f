"""Sends of every kind: the stored records, the answers, the refusals."""

from __future__ import annotations

import asyncio
import zlib
from pathlib import Path
from typing import Any

import pytest

from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import CODECS
from duemq.protocol.records import batch, record
from duemq.protocol.records.message_id import pack_host, parse_offset_message_id
from duemq.protocol.records.properties import MAX_BYTES, java_hash
from duemq.protocol.records.record import FLAG_BORN_IPV6, FLAG_COMPRESSED, FLAG_STORE_IPV6, StoredMessage
from duemq.protocol.records.recurrence import FLAG_RECURS
from duemq.protocol.requests.headers import SendMessageResponse, decode_ext
from duemq.protocol.topics import SCHEDULE_TOPIC
from duemq.storage.clock import ManualClock
from tests.support import wire
from tests.support.broker import Peer, UnboundBroker, running
from tests.support.wire import ADDED, ADDED_TEXT, BORN_MS, pull, request, send
from tests.unit.protocol.frames.test_golden import golden

NOW_MS = 1_700_000_000_000


def header_of(answer: Command) -> SendMessageResponse:
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return decode_ext(SendMessageResponse, answer.ext)


def stored(broker: UnboundBroker, answer: Command) -> list[StoredMessage]:
    """Return the records of the message ids in an answer."""
    found = []
    for message_id in header_of(answer).msg_id.split(","):
        message = broker.store.message_at(parse_offset_message_id(message_id)[2])
        assert message is not None
        assert message.offset_message_id == message_id
        found.append(message)
    return found


async def sent(broker: UnboundBroker, peer: Peer, command: Command) -> StoredMessage:
    (message,) = stored(broker, await peer.ask(command))
    return message


async def refused(peer: Peer, command: Command, code: int) -> str:
    """Check that a command is refused with this code, on a new topic and on a known one; return the remark."""
    answers = [await peer.ask(command)]
    answers.append(await peer.ask(Command(code=command.code, opaque=2**31 - 1, ext=command.ext, body=command.body)))
    assert [answer.code for answer in answers] == [code, code]
    assert answers[0].remark
    return answers[0].remark


# --- stored records


@pytest.mark.parametrize("frame_codec", CODECS)
@pytest.mark.parametrize("v1", [True, False])
async def test_a_message_is_stored_as_it_came(broker: UnboundBroker, peer: Peer, v1: bool, frame_codec: int) -> None:
    text = "TAGS\x01tagA\x02KEYS\x01k\x02color\x01grün"
    for queue_offset in (0, 1):
        command = send(
            "T", b"body", queue_id=2, properties=text, v1=v1, flag=7, sys_flag=FLAG_COMPRESSED, reconsume_times=3
        )
        answer = await peer.ask(command, frame_codec)
        header = header_of(answer)
        assert (header.queue_id, header.queue_offset) == (2, queue_offset)
        assert answer.ext["MSG_REGION"] == "DefaultRegion"
        assert answer.ext["TRACE_ON"] == "true"
        (message,) = stored(broker, answer)
        assert (message.topic, message.queue_id, message.queue_offset) == ("T", 2, queue_offset)
        assert (message.body, message.flag, message.sys_flag) == (b"body", 7, FLAG_COMPRESSED)
        assert (message.born_timestamp, message.store_timestamp, message.reconsume_times) == (BORN_MS, NOW_MS, 3)
        assert message.born_host == pack_host("127.0.0.1", 40000)
        assert message.store_host == pack_host("127.0.0.1", 10911)
        assert message.properties == {"TAGS": "tagA", "KEYS": "k", "color": "grün", **ADDED}
        queue = broker.store.queue("T", 2)
        assert queue is not None
        assert queue.unit(queue_offset) == (message.physical_offset, message.size, java_hash("tagA"))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (None, {}),
        ("", {}),
        ("WAIT\x01true", {"WAIT": "true"}),
        ("A\x01a\x02WAIT\x01true\x02B\x01b", {"A": "a", "WAIT": "true", "B": "b"}),
        ("CLUSTER\x01theirs\x02A\x01a\x02", {"A": "a"}),
        ("MSG_REGION\x01theirs\x02CLUSTER\x01theirs\x02A\x01a\x02TRACE_ON\x01false", {"A": "a"}),
        ("MSG_REGION\x01theirs\x02A\x01a\x02TRACE_ON\x01false", {"A": "a"}),
        ("A\x01a\x02A\x01b", {"A": "b"}),
        ("A\x01WAIT", {"A": "WAIT"}),
    ],
)
async def test_properties_are_stored_with_those_of_the_broker(
    broker: UnboundBroker, peer: Peer, text: str | None, wanted: dict[str, str]
) -> None:
    for _ in range(2):
        message = await sent(broker, peer, send("T", properties=text))
        assert message.properties == {**wanted, **ADDED}


async def test_a_message_from_ipv6_keeps_its_host(broker: UnboundBroker) -> None:
    peer = broker.connect(("2001:db8::1", 5))
    for _ in range(2):
        message = await sent(broker, peer, send("T"))
        assert (message.born_host, message.sys_flag) == (pack_host("2001:db8::1", 5), FLAG_BORN_IPV6)


@pytest.mark.parametrize("wish", ["", "DELAY\x013\x02", f"TIMER_DELIVER_MS\x01{NOW_MS + 60_000}\x02"])
async def test_records_end_with_their_checksums_where_that_is_set(tmp_path: Path, wish: str) -> None:
    async with running(tmp_path, "enabledAppendPropCRC=true") as broker:
        peer = broker.connect()
        texts = [f"{wish}A\x01a", f"{wish}__CRC32#\x011234567890\x02"]
        messages = [await sent(broker, peer, send("T", b"body", properties=text)) for text in [*texts, *texts]]
        if not wish:
            parts = batch.encode([(0, b"one", texts[0]), (0, b"two", texts[1])])
            messages += stored(broker, await peer.ask(send("T", parts, batch=True)))
        size = MAX_BYTES
        while (answer := await peer.ask(send("T", properties=f"{wish}A\x01{'x' * size}"))).code:
            assert answer.code == ResponseCode.MESSAGE_ILLEGAL
            size -= 1
        assert MAX_BYTES - 300 < size < MAX_BYTES - 21
        for message in [*messages, *stored(broker, answer)]:
            data = broker.store.log.read(message.physical_offset, message.size)
            assert data is not None
            value = f"{zlib.crc32(data[:-20]) & 0x7FFFFFFF:010}"[::-1]
            assert bytes(data[-20:]) == f"__CRC32#\x01{value}\x02".encode()
            assert message.properties_text.count("__CRC32#") == 1


@pytest.mark.parametrize(
    "sys_flag", [FLAG_BORN_IPV6, FLAG_STORE_IPV6, FLAG_BORN_IPV6 | FLAG_STORE_IPV6 | FLAG_COMPRESSED, -1 & ~0b1100]
)
async def test_a_client_does_not_say_what_kind_of_host_it_has(
    broker: UnboundBroker, peer: Peer, sys_flag: int, tmp_path: Path
) -> None:
    """A client cannot set the host flags: they give the lengths of the hosts in a record, and a wrong one would make
    the record, and so the rest of the log, unreadable."""
    parts = batch.encode([(0, b"one", ""), (0, b"two", "")])
    commands = [
        send("T", sys_flag=sys_flag),
        send("T", sys_flag=sys_flag),
        send("T", sys_flag=sys_flag, properties="DELAY\x011"),
        send("T", parts, sys_flag=sys_flag, code=RequestCode.SEND_BATCH_MESSAGE),
    ]
    for command in commands:
        for message in stored(broker, await peer.ask(command)):
            assert message.sys_flag == sys_flag & ~(FLAG_BORN_IPV6 | FLAG_STORE_IPV6 | FLAG_RECURS)
    data = broker.store.log.read(0, broker.store.log.end)
    assert len(record.decode_all(data or b"")) == 5


@pytest.mark.parametrize("region", ["50%", '"quoted"', "%d%s", "größe", "a\\b"])
async def test_any_region_is_told(tmp_path: Path, region: str) -> None:
    async with running(tmp_path, f"regionId={region}", "traceOn=false") as broker:
        peer = broker.connect()
        for frame_codec in CODECS:
            answer = await peer.ask(send("T"), frame_codec)
            assert (answer.ext["MSG_REGION"], answer.ext["TRACE_ON"]) == (region, "false")


async def test_a_negative_queue_lets_the_broker_choose(peer: Peer) -> None:
    chosen = {header_of(await peer.ask(send("T", queue_id=-1))).queue_id for _ in range(60)}
    assert chosen == {0, 1, 2, 3}


async def test_our_record_of_a_captured_send_is_rocketmqs(tmp_path: Path) -> None:
    """duemq's record of a captured send by a client of 4.9.7, at the same place and time, differs from that of Apache's
    broker only in the order of the properties, which is that of a hash map there."""
    theirs = record.decode(golden("commitlog.bin"))
    clock = ManualClock(theirs.store_timestamp)
    async with running(tmp_path, "listenPort=29911", "brokerIP1=127.0.0.2", clock=clock) as broker:
        peer = broker.connect(("127.0.0.1", 32982))
        command = next(command for _, command in wire.decode_all(golden("json-producer.requests.bin")))
        ours = await sent(broker, peer, command)
    assert ours.properties == {**theirs.properties, **ADDED, "WAIT": "true"}, "as 5.3.3 adds, and keeps WAIT"
    theirs.size += len(ours.properties_text.encode()) - len(theirs.properties_text.encode())
    theirs.properties_text = ours.properties_text
    assert ours == theirs


# --- refusals


async def test_a_queue_that_is_not_there_is_refused(peer: Peer) -> None:
    for queue_id in (4, 2**31 - 1):
        assert str(queue_id) in await refused(peer, send("T", queue_id=queue_id), ResponseCode.SYSTEM_ERROR)


@pytest.mark.parametrize("oversize", ["body", "properties", "delayed body", "batch", "part"])
async def test_what_is_too_large_is_refused(tmp_path: Path, oversize: str) -> None:
    async with running(tmp_path, "maxMessageSize=1000") as broker:
        peer = broker.connect()
        largest = send("T", bytes(1000), properties="A\x01" + "x" * (MAX_BYTES - 3 - len(ADDED_TEXT)))
        assert header_of(await peer.ask(largest)).queue_offset == 0
        assert header_of(await peer.ask(largest)).queue_offset == 1 if (largest := send("T", bytes(1000))) else None
        big = {
            "body": send("T", bytes(1001)),
            "properties": send("T", properties="A\x01" + "x" * (MAX_BYTES - 10)),
            "delayed body": send("T", bytes(1001), properties="DELAY\x011"),
            "batch": send("T", batch.encode([(0, bytes(400), "")] * 3), batch=True),
            "part": send("T", batch.encode([(0, b"", "A\x01" + "x" * (MAX_BYTES - 10))]), batch=True),
        }[oversize]
        end = broker.store.log.end
        assert "illegal" in await refused(peer, big, ResponseCode.MESSAGE_ILLEGAL)
        assert broker.store.log.end == end


@pytest.mark.parametrize(
    ("properties", "sys_flag"),
    [
        ("TRAN_MSG\x01true", 0),
        ("TRAN_MSG\x01TRUE\x02A\x01b", 0),
        (None, 4),
        (None, 8),
        (None, 12),
        ("TRAN_MSG\x01true", 4),
    ],
)
async def test_transactional_messages_are_refused(peer: Peer, properties: str | None, sys_flag: int) -> None:
    remark = await refused(peer, send("T", properties=properties, sys_flag=sys_flag), ResponseCode.NO_PERMISSION)
    assert "transaction" in remark


async def test_a_property_that_only_looks_transactional_is_taken(peer: Peer) -> None:
    for text in ("TRAN_MSG\x01false", "A\x01TRAN_MSG"):
        assert (await peer.ask(send("T", properties=text))).code == 0


@pytest.mark.parametrize(
    "text",
    [
        *["DELAY\x01x", "DELAY\x011.5", "DELAY\x01" + "9" * 5000, "DELAY\x01--1", "A\x01b\x02DELAY\x01 "],
        *["DELAY\x01", "DELAY\x01\x02", "A\x01b\x02DELAY\x01\x02B\x01c", "A\x01b\x02DELAY\x01"],
        *["TIMER_DELIVER_MS\x01", "A\x01b\x02TIMER_DELAY_MS\x01\x02B\x01c", "TIMER_DELAY_SEC\x01\x02"],
        "TIMER_DELAY_SEC\x01\x02TIMER_DELAY_MS\x01",
    ],
)
async def test_a_delay_that_is_no_number_is_refused(peer: Peer, text: str) -> None:
    """A delay that is not a number is refused, also an empty one, which RocketMQ ignores: a message that was to wait
    must not be delivered at once."""
    await refused(peer, send("T", properties=text), ResponseCode.MESSAGE_ILLEGAL)


@pytest.mark.parametrize(
    "text",
    ["DELAY\x01\x02DELAY\x010", "XDELAY\x01", "A\x01DELAY\x01", "TIMER_DELAY_MS\x01\x02TIMER_DELIVER_MS\x011", "DELAY"],
)
async def test_a_property_that_only_looks_like_an_empty_delay_is_taken(peer: Peer, text: str) -> None:
    assert (await peer.ask(send("T", properties=text))).code == 0


async def test_a_full_store_takes_nothing_and_says_so(broker: UnboundBroker, peer: Peer) -> None:
    await peer.ask(send("T"))
    broker.store.health.fill("the disk is 95% full")
    answers = await peer.ask_all([send("T"), send("T", properties="DELAY\x011"), send("T", b"", batch=True), pull("T")])
    assert [answer.code for answer in answers[:2]] == [ResponseCode.SERVICE_NOT_AVAILABLE] * 2
    assert "95% full" in (answers[0].remark or "")
    assert answers[3].code == 0
    broker.store.health.has_room()
    assert header_of(await peer.ask(send("T"))).queue_offset == 1


@pytest.mark.parametrize("text", ["A\x01\0", "\0\x01a", "A\x01b\x02DELAY\x011\x02B\x01\0"])
async def test_zero_bytes_in_properties_are_refused(broker: UnboundBroker, peer: Peer, text: str) -> None:
    """Zero bytes in properties are refused: recovery takes a sector of zeros for one that was not written."""
    end = broker.store.log.end
    await refused(peer, send("T", properties=text), ResponseCode.MESSAGE_ILLEGAL)
    assert broker.store.log.end == end


# --- delayed messages


@pytest.mark.parametrize(
    ("level", "delay_ms", "capped"),
    [(1, 1000, 1), (3, 10_000, 3), (18, 7_200_000, 18), (19, 7_200_000, 18), (10**12, 7_200_000, 18)],
)
async def test_a_delayed_message_waits_in_the_queue_of_its_level(
    broker: UnboundBroker, peer: Peer, level: int, delay_ms: int, capped: int
) -> None:
    for queue_offset in (0, 1):
        text = f"TAGS\x01tagA\x02DELAY\x01{level}\x02KEYS\x01k"
        answer = await peer.ask(send("T", queue_id=2, properties=text))
        assert header_of(answer).queue_id == 2
        (message,) = stored(broker, answer)
        assert (message.topic, message.queue_id, message.queue_offset) == (SCHEDULE_TOPIC, capped - 1, queue_offset)
        wanted = {"TAGS": "tagA", "KEYS": "k", "DELAY": str(capped), "REAL_TOPIC": "T", "REAL_QID": "2"}
        assert message.properties == {**wanted, **ADDED}
        queue = broker.store.queue(SCHEDULE_TOPIC, capped - 1)
        assert queue is not None
        unit = queue.unit(queue_offset)
        assert unit is not None
        assert unit[2] == message.store_timestamp + delay_ms


@pytest.mark.parametrize("text", ["DELAY\x010", "DELAY\x01-1", "XDELAY\x013", "A\x01DELAY", "DELAYED\x013"])
async def test_without_a_level_above_0_a_message_is_not_delayed(broker: UnboundBroker, peer: Peer, text: str) -> None:
    for _ in range(2):
        assert (await sent(broker, peer, send("T", properties=text))).topic == "T"


async def test_a_delayed_message_is_delivered_at_its_time(broker: UnboundBroker, peer: Peer, loop: Any) -> None:
    await peer.ask(send("T", b"later", queue_id=1, properties="DELAY\x012\x02TAGS\x01tagA"))
    consumer = broker.connect()
    command = pull("T", 0, queue_id=1, subscription="tagA", suspend_ms=30_000)
    consumer.post(command)
    broker.clock.advance(4999)
    loop.advance(4.999)
    for _ in range(5):
        await asyncio.sleep(0)
    assert consumer.responses == []
    broker.clock.advance(1)
    loop.advance(0.001)
    for _ in range(5):
        await asyncio.sleep(0)
    (message,) = record.decode_all(bytes(consumer.responses[0].body))
    assert (message.body, message.topic, message.queue_id) == (b"later", "T", 1)


# --- batches


def parts_of(count: int, text: str = "TAGS\x01tagA") -> list[batch.BatchPart]:
    return [(number, b"part %d" % number, text) for number in range(count)]


@pytest.mark.parametrize("frame_codec", CODECS)
async def test_the_messages_of_a_batch_are_stored_one_after_the_other(
    broker: UnboundBroker, peer: Peer, frame_codec: int
) -> None:
    for first in (0, 3):
        command = send("T", batch.encode(parts_of(3)), queue_id=1, code=RequestCode.SEND_BATCH_MESSAGE, batch=True)
        answer = await peer.ask(command, frame_codec)
        assert (header_of(answer).queue_id, header_of(answer).queue_offset) == (1, first)
        messages = stored(broker, answer)
        assert [message.queue_offset for message in messages] == [first, first + 1, first + 2]
        assert [(message.body, message.flag) for message in messages] == [
            (b"part 0", 0),
            (b"part 1", 1),
            (b"part 2", 2),
        ]
        assert messages[0].properties == {"TAGS": "tagA", **ADDED}
        pulled = await peer.ask(pull("T", first, queue_id=1, subscription="tagA"))
        assert len(record.decode_all(bytes(pulled.body))) == 3


@pytest.mark.parametrize(
    ("whole", "part", "stored_text"),
    [
        # As Apache's 4.9.7 was seen to store them, except for the order of the request's properties.
        ("", "TAGS\x01a", f"TAGS\x01a\x02{ADDED_TEXT}"),
        ("", "", ADDED_TEXT),
        (
            "K\x01batch\x02UNIQ_KEY\x01BATCHID\x02WAIT\x01true",
            "UNIQ_KEY\x01PART1\x02TAGS\x01a\x02WAIT\x01true",
            "UNIQ_KEY\x01PART1\x02TAGS\x01a\x02WAIT\x01true\x02K\x01batch\x02UNIQ_KEY\x01BATCHID\x02WAIT\x01true"
            f"\x02{ADDED_TEXT}",
        ),
        ("K\x01batch", "K\x01own\x02", f"K\x01own\x02K\x01batch\x02{ADDED_TEXT}"),
        ("EMPTY\x01\x02K\x01a\x02K\x01b\x02nothing", "X\x01y", f"X\x01y\x02K\x01b\x02{ADDED_TEXT}"),
        ("CLUSTER\x01mine", "CLUSTER\x01other", f"CLUSTER\x01other\x02{ADDED_TEXT}"),
    ],
)
async def test_the_properties_of_a_batch_are_those_of_each_message(
    broker: UnboundBroker, peer: Peer, whole: str, part: str, stored_text: str
) -> None:
    command = send("T", batch.encode(parts_of(2, part)), properties=whole, batch=True)
    messages = stored(broker, await peer.ask(command))
    assert [message.properties_text for message in messages] == [stored_text] * 2


async def test_the_tags_of_a_batch_are_those_of_each_message(peer: Peer) -> None:
    whole = "TAGS\x01whole"
    assert (await peer.ask(send("T", batch.encode(parts_of(3)), properties=whole, batch=True))).code == 0
    for tags, count in (("tagA", 0), ("whole", 3)):
        pulled = await peer.ask(pull("T", 0, subscription=tags))
        assert len(record.decode_all(bytes(pulled.body))) == count


async def test_a_batch_whose_messages_would_have_too_long_properties_is_refused(
    broker: UnboundBroker, peer: Peer
) -> None:
    """A batch whose messages would have too long properties is refused: Apache's broker stores a negative length, and
    the queue becomes unreadable."""
    parts = parts_of(2, "A\x01" + "x" * 20_000)
    await refused(
        peer,
        send("T", batch.encode(parts), properties="B\x01" + "y" * 20_000, batch=True),
        ResponseCode.MESSAGE_ILLEGAL,
    )
    assert broker.store.queue("T", 0) is None


async def test_a_batch_may_come_as_a_plain_send_that_says_so(broker: UnboundBroker, peer: Peer) -> None:
    for _ in range(2):
        assert len(stored(broker, await peer.ask(send("T", batch.encode(parts_of(2)), batch=True)))) == 2


@pytest.mark.parametrize(
    ("properties", "parts"),
    [
        ("DELAY\x011", parts_of(2)),
        (None, parts_of(2, "DELAY\x013")),
        (None, parts_of(2, "TIMER_DELIVER_MS\x011800000000000")),
        (None, parts_of(2, "DELAY\x01")),
        (None, parts_of(2, "TIMER_DELAY_MS\x01\x02A\x01b")),
        (None, []),
    ],
)
async def test_batches_that_cannot_be_are_refused(
    broker: UnboundBroker, peer: Peer, properties: str | None, parts: list[batch.BatchPart]
) -> None:
    command = send("T", batch.encode(parts), properties=properties, code=RequestCode.SEND_BATCH_MESSAGE, batch=True)
    await refused(peer, command, ResponseCode.MESSAGE_ILLEGAL)
    assert broker.store.queue("T", 0) is None


async def test_a_damaged_batch_stores_nothing(broker: UnboundBroker, peer: Peer) -> None:
    body = batch.encode(parts_of(3))
    assert "part 2" in await refused(peer, send("T", body[:-1], batch=True), ResponseCode.SYSTEM_ERROR)
    assert broker.store.queue("T", 0) is None


async def test_a_large_batch_is_answered_after_it_was_written(
    broker: UnboundBroker, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large batch is answered only after it was written, although its answer with all message ids is long."""
    command = send("T", batch.encode(parts_of(1000)), batch=True)
    await peer.ask(send("T"))
    assert len(stored(broker, await peer.ask(command))) == 1000

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(broker.store.log, "write", fail)
    again = send("T", batch.encode(parts_of(1000)), batch=True)
    answers = await peer.ask_all([again, send("T")])
    assert [answer.code for answer in answers] == [ResponseCode.SERVICE_NOT_AVAILABLE] * 2
    monkeypatch.undo()
    assert header_of(await peer.ask(send("T"))).queue_offset == 1001


async def test_a_large_batch_of_a_client_that_does_not_read_is_written_all_the_same(
    broker: UnboundBroker, peer: Peer
) -> None:
    reader = broker.connect()
    await peer.ask(send("T"))
    peer.transport.block()
    while peer.transport.takes_data:
        peer.post(send("T", batch.encode(parts_of(1000)), batch=True))
    queue = broker.store.queue("T", 0)
    assert queue is not None
    answer = await reader.ask(pull("T", queue.next_offset - 1, subscription="*"))
    assert len(record.decode_all(bytes(answer.body))) == 1
    assert queue.next_offset % 1000 == 1
    assert queue.next_offset > 1000
    peer.transport.unblock()
    assert len(peer.responses) == 1 + queue.next_offset // 1000


async def test_a_one_way_batch_is_stored(broker: UnboundBroker, peer: Peer) -> None:
    await peer.ask(send("T"))
    peer.post(send("T", batch.encode(parts_of(5)), batch=True, oneway=True))
    assert header_of(await peer.ask(send("T"))).queue_offset == 6
    assert len(peer.responses) == 2


async def test_requests_of_absurd_numbers_are_answered(broker: UnboundBroker, peer: Peer, logged: list[Any]) -> None:
    """Requests with extreme numbers that fit their fields are answered without an exception."""
    await peer.ask(send("T"))
    for number in (-(2**31), -1, 2**31 - 1):
        for command in (
            send("T", flag=number, reconsume_times=number),
            send("T", default_queues=number),
            send("New", default_queues=number),
            send("T", sys_flag=number & ~0b1100),
            send("%RETRY%g", reconsume_times=number, max_reconsume_times=number),
        ):
            assert (await peer.ask(command)).code in (0, 1)
    assert not [line for line in logged if line["event"] == "request_failed"]


def test_the_limit_of_a_request_code_is_known() -> None:
    assert request(RequestCode.SEND_MESSAGE_V2).code == 310
