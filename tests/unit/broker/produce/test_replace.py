"""Sends with TIMER_REPLACE, over the wire, each with a broker and its store."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from duemq.broker.produce import replace
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames.frame import CODECS
from duemq.protocol.records import record
from duemq.protocol.records.record import StoredMessage
from duemq.protocol.topics import TIMER_TOPIC
from duemq.storage.queues.pull import ColdRead
from tests.support.broker import Peer, UnboundBroker, running
from tests.support.loop import SteppedLoop, turns
from tests.support.wire import pull, send
from tests.unit.broker.produce.test_retry import last
from tests.unit.broker.produce.test_send import NOW_MS
from tests.unit.broker.waiting.test_pending import pass_time
from tests.unit.broker.waiting.test_timers import fails

LATER_MS = NOW_MS + 60_000


def instead(text: str, key: str = "k", number: int = 1) -> str:
    return f"UNIQ_KEY\x01U{number}\x02KEYS\x01{key}\x02TIMER_REPLACE\x01true" + (f"\x02{text}" if text else "")


async def bodies(peer: Peer, topic: str = "T") -> list[bytes]:
    return [message.body for message in await delivered(peer, topic)]


async def delivered(peer: Peer, topic: str = "T") -> list[StoredMessage]:
    return record.decode_all(bytes((await peer.ask(pull(topic))).body))


@pytest.fixture
async def known(broker: UnboundBroker, peer: Peer) -> UnboundBroker:
    assert (await peer.ask(send("T", b"first"))).code == ResponseCode.SUCCESS
    return broker


@pytest.mark.parametrize("frame_codec", CODECS)
async def test_the_last_of_a_key_is_delivered(
    known: UnboundBroker, peer: Peer, loop: SteppedLoop, frame_codec: int
) -> None:
    for number, due in enumerate((LATER_MS, NOW_MS + 90_000, NOW_MS + 5432)):
        text = instead(f"TIMER_DELIVER_MS\x01{due}", number=number)
        answer = await peer.ask(send("T", b"%d" % number, properties=text), frame_codec)
        assert answer.code == ResponseCode.SUCCESS, answer.remark
        assert answer.ext["recallHandle"]
    answer = await peer.ask(send("T", b"other", properties=instead("TIMER_DELAY_SEC\x015", "other", 9)), frame_codec)
    assert answer.code == ResponseCode.SUCCESS
    await pass_time(known, loop, 5.431)
    assert await bodies(peer) == [b"first", b"other"]
    await pass_time(known, loop, 0.001)
    await pass_time(known, loop, 100)
    assert await bodies(peer) == [b"first", b"other", b"2"]


async def test_what_one_read_brings_replaces_in_its_order(known: UnboundBroker, peer: Peer, loop: SteppedLoop) -> None:
    commands = [
        send("T", b"%d" % number, properties=instead("TIMER_DELAY_MS\x015000", "ab"[number % 2], number))
        for number in range(20)
    ]
    answers = await peer.ask_all(commands)
    assert {answer.code for answer in answers} == {ResponseCode.SUCCESS}
    await pass_time(known, loop, 10)
    assert await bodies(peer) == [b"first", b"18", b"19"]


async def test_a_level_waits_in_the_wheel(known: UnboundBroker, peer: Peer, loop: SteppedLoop) -> None:
    for number in range(2):
        await peer.ask(send("T", b"%d" % number, properties=instead("DELAY\x013", number=number)))
    assert last(known).topic == TIMER_TOPIC
    await pass_time(known, loop, 9.999)
    assert await bodies(peer) == [b"first"]
    await pass_time(known, loop, 0.001)
    assert await bodies(peer) == [b"first", b"1"]


@pytest.mark.parametrize("text", ["", f"TIMER_DELIVER_MS\x01{NOW_MS - 5000}", "TIMER_DELAY_SEC\x010"])
async def test_one_that_is_due_at_once_replaces_too(
    known: UnboundBroker, peer: Peer, loop: SteppedLoop, text: str
) -> None:
    await peer.ask(send("T", b"waits", properties=instead("TIMER_DELAY_SEC\x0160")))
    answer = await peer.ask(send("T", b"now", properties=instead(text, number=2)))
    assert answer.code == ResponseCode.SUCCESS
    await pass_time(known, loop, 0.02)
    assert await bodies(peer) == [b"first", b"now"]
    await peer.ask(send("T", b"now too", properties=instead(text, number=3)))
    assert last(known).topic == "T", "where nothing waits it goes the short way"
    await pass_time(known, loop, 100)
    assert await bodies(peer) == [b"first", b"now", b"now too"]


@pytest.mark.parametrize(
    ("text", "remark"),
    [
        ("TIMER_REPLACE\x01true", "exactly one key in KEYS, but the message has 0"),
        ("KEYS\x01 \x02TIMER_REPLACE\x01true", "exactly one key in KEYS, but the message has 0"),
        ("KEYS\x01a b\x02TIMER_REPLACE\x01true", "exactly one key in KEYS, but the message has 2"),
        ("KEYS\x01a\x02TIMER_REPLACE\x01yes", "TIMER_REPLACE=yes is neither true nor false"),
        ("KEYS\x01a\x02TIMER_REPLACE\x01true\x02TIMER_DEL_UNIQKEY\x01T+U", "contradict each other"),
    ],
)
@pytest.mark.parametrize("time", ["", "\x02TIMER_DELAY_MS\x015000", "\x02DELAY\x013"])
async def test_what_cannot_replace_is_refused_and_said_why(
    known: UnboundBroker, peer: Peer, text: str, remark: str, time: str
) -> None:
    before = known.store.log.end
    assert remark in await fails(peer, send("T", properties=text + time), ResponseCode.MESSAGE_ILLEGAL)
    assert known.store.log.end == before


async def test_false_asks_for_nothing(known: UnboundBroker, peer: Peer, loop: SteppedLoop) -> None:
    for number in range(2):
        text = f"KEYS\x01k\x02TIMER_REPLACE\x01False\x02TIMER_DELAY_MS\x01500{number}"
        assert (await peer.ask(send("T", b"%d" % number, properties=text))).code == ResponseCode.SUCCESS
    await pass_time(known, loop, 10)
    assert await bodies(peer) == [b"first", b"0", b"1"]


async def test_a_message_too_far_ahead_is_refused_and_replaces_nothing(
    known: UnboundBroker, peer: Peer, loop: SteppedLoop
) -> None:
    await peer.ask(send("T", b"waits", properties=instead("TIMER_DELAY_SEC\x0160")))
    await fails(peer, send("T", properties=instead("TIMER_DELAY_SEC\x0199999999")), ResponseCode.MESSAGE_ILLEGAL)
    await pass_time(known, loop, 61)
    assert await bodies(peer) == [b"first", b"waits"]


async def test_a_store_that_takes_nothing_says_so(known: UnboundBroker, peer: Peer, loop: SteppedLoop) -> None:
    await peer.ask(send("T", b"waits", properties=instead("TIMER_DELAY_SEC\x0160")))
    known.store.health.fill("the disk is full")
    await fails(peer, send("T", properties=instead("TIMER_DELAY_SEC\x0190")), ResponseCode.SERVICE_NOT_AVAILABLE)
    known.store.health.has_room()
    await pass_time(known, loop, 61)
    assert await bodies(peer) == [b"first", b"waits"]


async def test_retries_have_nothing_of_it(known: UnboundBroker, peer: Peer) -> None:
    known.topics.create_for_group("%RETRY%g", 1)
    await known.topics.save()
    await peer.ask(send("%RETRY%g", properties=instead("DELAY\x013"), reconsume_times=1, max_reconsume_times=9))
    assert "TIMER_REPLACE" not in last(known).properties_text


async def test_a_client_cannot_name_what_it_replaces(known: UnboundBroker, peer: Peer, loop: SteppedLoop) -> None:
    await peer.ask(send("T", b"waits", properties="UNIQ_KEY\x01U\x02TIMER_DELAY_SEC\x0160"))
    forged = f"{instead('TIMER_DELAY_SEC')}\x0190\x02TIMER_ROLL_TIMES\x013"
    await peer.ask(send("T", b"forged", properties=forged))
    message = last(known)
    assert "TIMER_ROLL_TIMES" not in message.properties
    assert message.prepared_transaction_offset == NOW_MS + 90_000


async def test_one_way_sends_replace(known: UnboundBroker, peer: Peer, loop: SteppedLoop) -> None:
    for number in range(2):
        text = instead("TIMER_DELAY_MS\x015000", number=number)
        peer.post(send("T", b"%d" % number, properties=text, oneway=True))
        await turns(10)
    await pass_time(known, loop, 10)
    assert await bodies(peer) == [b"first", b"1"]


async def test_after_a_start_sends_wait_until_it_is_known_what_waits(tmp_path: Path, loop: SteppedLoop) -> None:
    async with running(tmp_path) as broker:
        peer = broker.connect()
        await peer.ask(send("T", b"first"))
        for number, key in enumerate("abc"):
            await peer.ask(send("T", key.encode(), properties=instead("TIMER_DELAY_SEC\x0160", key, number)))
    async with running(tmp_path) as broker:
        peer = broker.connect()
        assert not broker.timers.is_counted
        commands = [send("T", b"%d" % n, properties=instead("TIMER_DELAY_SEC\x0190", "b", n)) for n in (7, 8)]
        asked = asyncio.ensure_future(peer.ask_all(commands))
        await turns(5)
        await pass_time(broker, loop, 0.02)
        assert [answer.code for answer in await asked] == [ResponseCode.SUCCESS] * 2
        await pass_time(broker, loop, 100)
        assert await bodies(peer) == [b"first", b"a", b"c", b"8"]


async def test_so_many_wait_and_no_more(known: UnboundBroker, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replace, "MAX_WAITING", 0)
    remark = await fails(peer, send("T", properties=instead("TIMER_DELAY_MS\x015000")), ResponseCode.SYSTEM_BUSY)
    assert "wait to replace others" in remark


async def test_the_record_of_what_is_replaced_is_read_by_a_thread_if_the_disk_has_to_be_waited_for(
    known: UnboundBroker, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await peer.ask(send("T", b"waits", properties=instead("TIMER_DELAY_SEC\x0160")))
    read: list[bytes] = []
    real = ColdRead.run

    def run(self: ColdRead) -> bytes:
        read.append(real(self))
        return read[-1]

    monkeypatch.setattr(ColdRead, "run", run)
    monkeypatch.setattr(known.store, "is_cached", lambda _: False)
    answer = await peer.ask(send("T", b"next", properties=instead("TIMER_DELAY_SEC\x0190", number=2)))
    assert answer.code == ResponseCode.SUCCESS
    assert [b"waits" in data for data in read] == [True]


async def test_a_batch_replaces_nothing(known: UnboundBroker, peer: Peer) -> None:
    text = "KEYS\x01k\x02TIMER_REPLACE\x01true"
    command = send("T", b"", properties=text, code=RequestCode.SEND_BATCH_MESSAGE, batch=True)
    assert "replace" in await fails(peer, command, ResponseCode.MESSAGE_ILLEGAL)
