"""Messages that wait for a time: recalling and cancelling them, the figures for tools, and how the broker drives the
timers.

Tests of the broker's handling replace the timers' own methods.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import uvloop

from duemq._producing.delay import read_delays
from duemq.broker.settings.config import load
from duemq.broker.settings.parts import MAX_ROLL_WINDOW, timer_config
from duemq.broker.turns import Turns
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import CODECS, JSON
from duemq.protocol.records import record
from duemq.protocol.records.message_id import offset_message_id, pack_host, parse_offset_message_id
from duemq.protocol.records.record import HEAD_SIZE_IPV4, RecordSummary, StoredMessage
from duemq.protocol.requests import recall_handle
from duemq.protocol.requests.headers import (
    CancelMessage,
    ChangeByHandle,
    ChangePending,
    RecallMessage,
    RelayToConsumer,
    ViewMessage,
)
from duemq.protocol.topics import SCHEDULE_TOPIC, TIMER_TOPIC
from duemq.scheduler.timers.config import Cancelled
from duemq.scheduler.timers.service import Timers, TimerState
from duemq.storage.budget import Budget
from duemq.storage.clock import Moment, SystemClock
from duemq.storage.durability.jobs import Lane
from duemq.storage.errors import StoreError
from tests.support.broker import Peer, UnboundBroker, running
from tests.support.loop import SteppedLoop, turns
from tests.support.wire import pull, request, send
from tests.unit.broker.produce.test_retry import back, last
from tests.unit.broker.produce.test_send import NOW_MS
from tests.unit.broker.settings.test_settings import change, told
from tests.unit.broker.tables.test_topics import create

LATER_MS = NOW_MS + 60_432
DONE = [Cancelled.CANCELLED, Cancelled.CANCELLED_BEFORE]


def recall(handle: str, topic: str = "T") -> Command:
    return request(RequestCode.RECALL_MESSAGE, RecallMessage(topic, handle, "producers"))


def cancel(*ids: str) -> Command:
    return request(RequestCode.CANCEL_MESSAGE, CancelMessage(",".join(ids)))


def theirs(*words: str) -> str:
    """Return a handle of Apache's broker."""
    return base64.urlsafe_b64encode(" ".join(words).encode()).decode()


@pytest.fixture
async def waiting(broker: UnboundBroker, peer: Peer) -> tuple[StoredMessage, str]:
    """A waiting message, and its handle."""
    await peer.ask(send("T"))
    answer = await peer.ask(send("T", b"x", properties=f"UNIQ_KEY\x01U1\x02TIMER_DELIVER_MS\x01{LATER_MS}"))
    return last(broker), answer.ext["recallHandle"]


@pytest.fixture
def cancelled(broker: UnboundBroker, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Record the cancels asked of the timers, which all answer CANCELLED."""
    asked: list[tuple[Any, ...]] = []

    def cancel(place: int, now_ms: int, _: tuple[str, str] | None) -> Cancelled:
        assert now_ms == broker.clock.now_ms()
        asked.append((place,))
        return Cancelled.CANCELLED

    monkeypatch.setattr(broker.timers.changes, "cancel", cancel)
    return asked


def let_say(monkeypatch: pytest.MonkeyPatch, timers: Timers, result: Cancelled) -> None:
    monkeypatch.setattr(timers.changes, "cancel", lambda *_: result)


async def fails(peer: Peer, command: Command, code: int = ResponseCode.ILLEGAL_OPERATION) -> str:
    answer = await peer.ask(command)
    assert answer.code == code, answer.remark
    assert answer.remark is not None
    return answer.remark


# --- recalling


@pytest.mark.parametrize("frame_codec", CODECS)
async def test_a_handle_recalls_its_message(
    peer: Peer, waiting: tuple[StoredMessage, str], cancelled: list[Any], frame_codec: int
) -> None:
    message, handle = waiting
    answer = await peer.ask(recall(handle), frame_codec)
    assert answer.code == ResponseCode.SUCCESS
    assert answer.ext == {"msgId": "U1", "MSG_REGION": "DefaultRegion"}
    assert cancelled == [(message.physical_offset,)]


@pytest.mark.parametrize("result", Cancelled)
async def test_the_answer_says_what_became_of_the_message(
    broker: UnboundBroker,
    peer: Peer,
    waiting: tuple[StoredMessage, str],
    monkeypatch: pytest.MonkeyPatch,
    result: Cancelled,
) -> None:
    let_say(monkeypatch, broker.timers, result)
    answer = await peer.ask(recall(waiting[1]))
    if result in DONE:
        assert (answer.code, answer.ext["msgId"]) == (ResponseCode.SUCCESS, "U1")
        return
    what = {
        Cancelled.DELIVERED: "the message is already delivered",
        Cancelled.NO_LONGER_WAITS: "it was delivered or cancelled, or the store was compacted since",
        Cancelled.UNKNOWN: "no such message",
    }
    assert (answer.code, answer.remark) == (ResponseCode.ILLEGAL_OPERATION, f"recall failed, {what[result]}")


@pytest.mark.parametrize(
    ("handle", "topic", "code", "remark"),
    [
        (theirs("v1", "N", "broker-a", str(LATER_MS), "U1"), "N", 17, "recall failed, the topic[N] not exist"),
        ("", "T", 604, "recall handle is invalid"),
        ("%%%", "T", 604, "recall handle is invalid"),
        ("ü", "T", 604, "recall handle is invalid"),
        ("djE", "T", 604, "recall handle is invalid"),
        (theirs("v2", "T", "broker-a", str(LATER_MS), "U1"), "T", 604, "recall handle is invalid"),
        (theirs("v1", "T", "broker-a", str(LATER_MS)), "T", 604, "recall handle is invalid"),
        (theirs("v1", "Other", "broker-a", str(LATER_MS), "U1"), "T", 604, "recall failed, topic not match"),
        (theirs("v1", "T", "b", str(LATER_MS), "U1"), "T", 604, "recall failed, broker service not available"),
        (theirs("v1", "T", "broker-a", "soon", "U1"), "T", 604, "recall failed, timestamp invalid"),
        (theirs("v1", "T", "broker-a", str(NOW_MS), "U1"), "T", 604, "recall failed, timestamp invalid"),
        (theirs("v1", "T", "broker-a", str(2**62), "U1"), "T", 604, "recall failed, timestamp invalid"),
        (theirs("v1", "T", "broker-a", "9" * 19, "U1"), "T", 604, "recall failed, timestamp invalid"),
        (theirs("v1", "T", "broker-a", str(LATER_MS), "U9"), "T", 604, "recall failed, no such message"),
        (theirs("v1", "T", "broker-a", str(LATER_MS), "U1", "999999999-5"), "T", 604, "recall failed, no such message"),
    ],
)  # fmt: skip
async def test_what_cannot_be_recalled_is_refused_in_rocketmqs_words(
    peer: Peer,
    waiting: tuple[StoredMessage, str],
    cancelled: list[Any],
    handle: str,
    topic: str,
    code: int,
    remark: str,
) -> None:
    assert await fails(peer, recall(handle, topic), code) == remark
    assert cancelled == []


@pytest.mark.parametrize(("topic", "key"), [("T", "U2"), ("Other", "U1")])
async def test_a_handle_of_a_store_that_was_here_before_recalls_nothing(
    peer: Peer, waiting: tuple[StoredMessage, str], topic: str, key: str
) -> None:
    """A handle of a former store recalls nothing: another message is at that place now."""
    await peer.ask(send("Other"))
    handle = recall_handle.encode(topic, "broker-a", NOW_MS + 60_000, key, waiting[0].physical_offset, LATER_MS)
    assert await fails(peer, recall(handle.decode(), topic)) == "recall failed, no such message"
    assert (await peer.ask(recall(waiting[1]))).code == ResponseCode.SUCCESS, "the message still waits"


async def plant(broker: UnboundBroker, peer: Peer, first_id: str, topic: str) -> int:
    """Send a message to T whose body is a whole record of a message that waits, and was appended again; return the
    physical offset at which that record lies."""
    offset = broker.store.log.end + HEAD_SIZE_IPV4
    text = (
        f"REAL_TOPIC\x01T\x02REAL_QID\x010\x02UNIQ_KEY\x01EVIL\x02TIMER_OUT_MS\x01{LATER_MS // 1000 * 1000}\x02"
        f"TIMER_ROLL_TIMES\x011\x02TIMER_FIRST_ID\x01{first_id}-0"
    )
    host = pack_host("127.0.0.1", 1)
    inner = StoredMessage(
        queue_id=0,
        physical_offset=offset,
        born_timestamp=NOW_MS,
        born_host=host,
        store_timestamp=NOW_MS,
        store_host=host,
        body=b"x",
        topic=topic,
        properties_text=text,
    )
    assert (await peer.ask(send("T", record.encode(inner)))).code == ResponseCode.SUCCESS
    found = broker.store.message_at(offset)
    assert found is not None, "the bytes there are those of a record"
    assert found.properties_text == text
    return offset


@pytest.mark.parametrize("topic", [TIMER_TOPIC, SCHEDULE_TOPIC, "T"])
async def test_a_record_inside_a_message_is_none_that_a_client_can_name(
    broker: UnboundBroker, peer: Peer, topic: str
) -> None:
    """A body that is a whole record, also with the place of another message as its first one, is none for requests by a
    physical offset: who sends it would choose what the broker believes. If it is of a usual topic, it looks like one of
    a topic that was deleted, whose messages were delivered."""
    why, told = "no such message", "NEVER_EXISTED"
    if topic == "T":
        why, told = "the message is already delivered", "ALREADY_DELIVERED"
    victim = await peer.ask(
        send("Other", b"victim", properties=f"UNIQ_KEY\x01U\x02TIMER_DELIVER_MS\x01{LATER_MS}"),
    )
    moved = ChangePending(action="reschedule", msg_id=victim.ext["msgId"], deliver_ms=LATER_MS + 5000)
    assert (await peer.ask(request(RequestCode.CHANGE_PENDING, moved))).body
    offset = await plant(broker, peer, victim.ext["msgId"], topic)
    handle = recall_handle.encode("T", "broker-a", NOW_MS + 60_000, "EVIL", offset, LATER_MS).decode()
    assert await fails(peer, recall(handle)) == f"recall failed, {why}"
    planted = broker.store.message_at(offset)
    assert planted is not None
    ids = planted.offset_message_id, offset_message_id(broker.store.appender.store_host, offset)
    assert {outcome for _, outcome in await outcomes(peer, *ids)} == {"NEVER_EXISTED", told}
    change_it = ChangePending(action="deliver", msg_id=ids[0])
    assert b'"NEVER_EXISTED":1' in bytes((await peer.ask(request(RequestCode.CHANGE_PENDING, change_it))).body)
    by_handle = ChangeByHandle(action="cancel", topic="T", msg_id=ids[0], uniq_key="EVIL")
    assert b'"NEVER_EXISTED":1' in bytes((await peer.ask(request(RequestCode.CHANGE_BY_HANDLE, by_handle))).body)
    view = request(RequestCode.VIEW_MESSAGE_BY_ID, ViewMessage(offset))
    assert "can not find message" in await fails(peer, view, ResponseCode.SYSTEM_ERROR)
    assert "look message by offset failed" in await fails(peer, back(offset), ResponseCode.SYSTEM_ERROR)
    relayed = request(RequestCode.CONSUME_MESSAGE_DIRECTLY, RelayToConsumer("g", "c", ids[1]))
    assert "look message by offset failed" in await fails(peer, relayed, ResponseCode.SYSTEM_ERROR)
    assert await outcomes(peer, victim.ext["msgId"]) == [(victim.ext["msgId"], "CANCELLED")], "it still waits"


async def test_what_is_recalled_in_the_end_has_the_topic_and_key_of_the_handle(
    broker: UnboundBroker, peer: Peer, waiting: tuple[StoredMessage, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recall compares the record that it takes out, not only the one that the handle names."""
    victim = await peer.ask(send("Other", properties=f"UNIQ_KEY\x01U\x02TIMER_DELIVER_MS\x01{LATER_MS}"))
    message, handle = waiting
    changes = broker.timers.changes
    assert (await outcomes(peer, message.offset_message_id))[0][1] == "CANCELLED"
    assert (await peer.ask(recall(handle))).code == ResponseCode.SUCCESS  # the ids are complete now
    other = parse_offset_message_id(victim.ext["msgId"])[2]
    monkeypatch.setattr(changes.ids, "newest", lambda first: other if first == message.physical_offset else None)
    assert await fails(peer, recall(handle)) == "recall failed, no such message"
    for action, delay_ms in (("cancel", None), ("deliver", None), ("reschedule", 5000)):
        by_handle = ChangeByHandle(
            action=action, topic="T", msg_id=message.offset_message_id, uniq_key="U1", delay_ms=delay_ms
        )
        answer = await peer.ask(request(RequestCode.CHANGE_BY_HANDLE, by_handle))
        assert b'"NEVER_EXISTED":1' in bytes(answer.body)
    assert changes.cancel(other, broker.clock.now_ms()) is Cancelled.CANCELLED, "it still waits"


@pytest.mark.parametrize("slot_ms", [NOW_MS + 60_001, NOW_MS - 5_000])
async def test_a_handle_of_apaches_broker_is_looked_for_in_its_slot(
    broker: UnboundBroker,
    peer: Peer,
    waiting: tuple[StoredMessage, str],
    cancelled: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    slot_ms: int,
) -> None:
    """A handle of Apache's broker is looked up in its slot, also if the time is past and the message late; RocketMQ
    looks only at the time."""
    asked = []

    def find(*what: Any) -> Iterator[int | None]:
        asked.append(what)
        yield from (None, 4711)

    monkeypatch.setattr(broker.timers.changes, "find", find)
    answer = await peer.ask(recall(theirs("v1", "T", "broker-a", str(slot_ms), "U1")))
    assert (answer.code, answer.ext["msgId"]) == (ResponseCode.SUCCESS, "U1")
    assert (asked, cancelled) == ([("T", "U1", slot_ms)], [(4711,)])


async def test_recalling_can_be_forbidden_while_running(
    broker: UnboundBroker, peer: Peer, waiting: tuple[StoredMessage, str], cancelled: list[Any]
) -> None:
    message, handle = waiting
    await change(peer, recallMessageEnable="false")
    for command in (recall(handle), cancel(message.offset_message_id), recall("", "NoSuch")):
        assert "recallMessageEnable is false" in await fails(peer, command, ResponseCode.NO_PERMISSION)
    assert cancelled == []
    await change(peer, recallMessageEnable="true")
    assert (await peer.ask(recall(handle))).code == ResponseCode.SUCCESS


# --- cancelling by message id


async def outcomes(peer: Peer, *ids: str, frame_codec: int = JSON) -> list[tuple[str, str]]:
    answer = await peer.ask(cancel(*ids), frame_codec)
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return [(each["msgId"], each["result"]) for each in json.loads(bytes(answer.body))]


@pytest.mark.parametrize("frame_codec", CODECS)
async def test_each_message_of_a_list_has_its_outcome(
    broker: UnboundBroker, peer: Peer, monkeypatch: pytest.MonkeyPatch, frame_codec: int
) -> None:
    ids = []
    for delay in ("TIMER_DELAY_SEC\x015", "DELAY\x013", "TIMER_DELAY_SEC\x016", "A\x01a", "A\x01b"):
        await peer.ask(send("T", properties=delay))
        ids.append(last(broker).offset_message_id)
    results = iter(Cancelled)
    monkeypatch.setattr(broker.timers.changes, "cancel", lambda place, now_ms, _: next(results))
    told = await outcomes(peer, *ids[:4], ids[4].lower(), frame_codec=frame_codec)
    results_told = ["CANCELLED", "ALREADY_DELIVERED", "ALREADY_CANCELLED", "NO_LONGER_WAITS", "NEVER_EXISTED"]
    assert [result for _, result in told] == results_told
    assert [message_id for message_id, _ in told] == [*ids[:4], ids[4].lower()]


@pytest.mark.parametrize("result", Cancelled)
async def test_a_recall_always_succeeds_where_programs_want_that(
    peer: Peer,
    waiting: tuple[StoredMessage, str],
    monkeypatch: pytest.MonkeyPatch,
    broker: UnboundBroker,
    result: Cancelled,
) -> None:
    await change(peer, recallAlwaysSucceeds="true")
    let_say(monkeypatch, broker.timers, result)
    answer = await peer.ask(recall(waiting[1]))
    assert (answer.code, answer.ext["msgId"]) == (ResponseCode.SUCCESS, "U1")


async def test_an_id_of_another_broker_cancels_nothing_here(
    broker: UnboundBroker, peer: Peer, waiting: tuple[StoredMessage, str], cancelled: list[Any]
) -> None:
    """An id of another broker cancels nothing here: the same offset at another address; or offsets at which no message
    begins, or none is yet."""
    offset, ours = waiting[0].physical_offset, broker.store.appender.store_host
    ids = [
        offset_message_id(pack_host("127.0.0.1", 10912), offset),
        offset_message_id(pack_host("2001:db8::1", 10911), offset),
        offset_message_id(ours, broker.store.log.end),
        offset_message_id(ours, 2**63 + 5),
        offset_message_id(pack_host("127.0.0.9", 10911), offset + 1),
    ]
    assert await outcomes(peer, *ids) == [(each, "NEVER_EXISTED") for each in ids]
    assert cancelled == []


async def test_a_message_keeps_its_id_when_the_broker_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path, "brokerIP1=10.0.0.1") as broker:
        await broker.connect().ask(send("T", properties="TIMER_DELAY_SEC\x0160"))
        message = last(broker)
    async with running(tmp_path, "brokerIP1=10.0.0.2") as broker:
        monkeypatch.setattr(broker.timers.changes, "cancel", lambda place, now_ms, _: Cancelled.CANCELLED)
        moved = offset_message_id(broker.store.appender.store_host, message.physical_offset)
        told = await outcomes(broker.connect(), message.offset_message_id, moved)
        assert [result for _, result in told] == ["CANCELLED", "NEVER_EXISTED"]


@pytest.mark.parametrize(
    ("ids", "remark"), [(["x"], "is not 32 or 56 hex digits"), ([""], "hex"), (["0" * 32] * 1001, "1000")]
)
async def test_a_wrong_list_is_refused_as_a_whole(
    peer: Peer, cancelled: list[Any], ids: list[str], remark: str
) -> None:
    assert remark in await fails(peer, cancel(*ids), ResponseCode.SYSTEM_ERROR)
    assert cancelled == []


# --- durable


def append_a_mark(broker: UnboundBroker) -> Callable[..., Cancelled]:
    """Return a cancel that does as the timers do: it appends a record that is not yet durable."""

    def cancel(*_: Any) -> Cancelled:
        appender = broker.store.appender
        appender.begin(NOW_MS)
        appender.add(broker.store.ensure_queue("mark", 0), b"0", b"", 0, NOW_MS, bytes(8))
        appender.commit()
        return Cancelled.CANCELLED

    return cancel


@pytest.mark.parametrize("by", ["handle", "id"])
async def test_the_answer_waits_for_the_disk_as_a_sends_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    async with running(tmp_path, "flushDiskType=SYNC_FLUSH") as broker:
        peer = broker.connect()
        answer = await peer.ask(send("T", properties="UNIQ_KEY\x01U1\x02TIMER_DELAY_SEC\x0160"))
        command = recall(answer.ext["recallHandle"]) if by == "handle" else cancel(last(broker).offset_message_id)
        monkeypatch.setattr(broker.timers.changes, "cancel", append_a_mark(broker))
        peer.post(command)
        while broker.store.ensure_queue("mark", 0).next_offset == 0:
            await asyncio.sleep(0)
        assert last(broker).topic == "mark"
        assert peer.answer_of(command) is None
        while peer.answer_of(command) is None:
            await asyncio.sleep(0)
        assert broker.store.log.flushed == broker.store.log.end


async def test_what_is_told_of_a_delivery_waits_for_the_disk_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer about a delivery waits for the disk too: a power cut would otherwise take the delivery, and the message
    would be delivered after its sender was told that it had been."""
    async with running(tmp_path, "flushDiskType=SYNC_FLUSH", "syncFlushTimeout=1000") as broker:
        peer = broker.connect()
        answer = await peer.ask(send("T", properties="UNIQ_KEY\x01U1\x02TIMER_DELAY_SEC\x0160"))
        let_say(monkeypatch, broker.timers, Cancelled.DELIVERED)
        broker.lanes.hold(Lane.FLUSH)
        peer.post(send("T"))  # the last write of the log
        in_time, late = (recall(answer.ext["recallHandle"]) for _ in range(2))
        peer.post(in_time)
        await turns(20)
        assert peer.answer_of(in_time) is None
        broker.lanes.let_go(Lane.FLUSH)
        while (told := peer.answer_of(in_time)) is None:
            await asyncio.sleep(0)
        assert (told.code, told.remark) == (604, "recall failed, the message is already delivered")

        broker.lanes.hold(Lane.FLUSH)
        peer.post(send("T"), late)
        await turns(20)
        asyncio.get_running_loop().advance(1.1)  # type: ignore[attr-defined]
        while (told := peer.answer_of(late)) is None:
            await asyncio.sleep(0)
        assert told.code == ResponseCode.FLUSH_DISK_TIMEOUT
        broker.lanes.let_go(Lane.FLUSH)


async def test_a_change_of_no_message_is_answered_when_what_was_stored_is_on_the_disk(tmp_path: Path) -> None:
    """The MQTT bridge asks so whether it may acknowledge."""
    async with running(tmp_path, "flushDiskType=SYNC_FLUSH", "syncFlushTimeout=1000") as broker:
        peer = broker.connect()
        await peer.ask(send("T"))
        broker.lanes.hold(Lane.FLUSH)
        peer.post(send("T"))
        await turns(20)
        assert broker.store.log.flushed < broker.store.log.end
        nobody = ChangeByHandle(action="cancel", topic="T", msg_id="0" * 32, uniq_key="0" * 32)
        asked = request(RequestCode.CHANGE_BY_HANDLE, nobody)
        peer.post(asked)
        await turns(20)
        assert peer.answer_of(asked) is None
        broker.lanes.let_go(Lane.FLUSH)
        while (answer := peer.answer_of(asked)) is None:
            await asyncio.sleep(0)
        assert answer.code == ResponseCode.SUCCESS
        assert sum(json.loads(bytes(answer.body))["counts"].values()) == 1


@pytest.mark.parametrize("by", ["handle", "id"])
async def test_what_could_not_be_written_is_no_success(
    broker: UnboundBroker, peer: Peer, waiting: tuple[StoredMessage, str], monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    command = recall(waiting[1]) if by == "handle" else cancel(waiting[0].offset_message_id)
    monkeypatch.setattr(broker.timers.changes, "cancel", append_a_mark(broker))
    broker.store.health.fill("the disk is 95% full")
    assert "95% full" in await fails(peer, command, ResponseCode.SERVICE_NOT_AVAILABLE)


# --- figures for tools


async def test_replicas_are_told_how_far_the_timers_are(
    broker: UnboundBroker, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker.timers, "checkpoint_body", lambda: b"56 bytes of it")
    answer = await peer.ask(request(RequestCode.GET_TIMER_CHECK_POINT))
    assert (answer.code, bytes(answer.body)) == (ResponseCode.SUCCESS, b"56 bytes of it")


async def test_the_metrics_have_rocketmqs_form(
    broker: UnboundBroker, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker.timers, "metrics", lambda: {"T": 3, "%RETRY%g": 1})
    answer = await peer.ask(request(RequestCode.GET_TIMER_METRICS))
    assert answer.code == ResponseCode.SUCCESS
    assert json.loads(bytes(answer.body)) == {
        "dataVersion": {"counter": 0, "stateVersion": 0, "timestamp": NOW_MS},
        "timingCount": {
            "T": {"count": 3, "timeStamp": NOW_MS},
            "%RETRY%g": {"count": 1, "timeStamp": NOW_MS},
        },
    }


async def test_broker_status_shows_rocketmqs_keys(
    broker: UnboundBroker, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker.timers, "state", lambda now_ms: TimerState(NOW_MS, 9, 7, 1234, 5.0, 0, 3999))
    answer = await peer.ask(request(RequestCode.GET_BROKER_RUNTIME_INFO))
    table = json.loads(bytes(answer.body))["table"]
    assert {name: value for name, value in table.items() if name.startswith("timer")} == {
        "timerReadBehind": "3",
        "timerOffsetBehind": "7",
        "timerCongestNum": "1234",
        "timerEnqueueTps": "5.0",
        "timerDequeueTps": "0.0",
    }


@pytest.mark.parametrize("is_enabled", [True, False])
async def test_a_client_of_ours_learns_whether_there_are_timers(tmp_path: Path, is_enabled: bool) -> None:
    async with running(tmp_path, f"timerWheelEnable={is_enabled}") as broker:
        answer = await broker.connect().ask(request(RequestCode.GET_BROKER_CONFIG))
        assert read_delays(answer).timers == is_enabled


# --- settings


def test_the_timers_settings_are_those_of_the_broker() -> None:
    settings = {
        "mappedFileSizeTimerLog": 8192,
        "timerWheelEnable": "false",
        "timerRollWindowSlot": 77,
        "timerMaxDelaySec": 88,
        "timerCongestNumEachSlot": 99,
        "timerStopEnqueue": "true",
        "timerStopDequeue": "true",
    }
    found = timer_config(load(None, [f"{name}={value}" for name, value in settings.items()], {}).config)
    assert (found.log_segment_size, found.is_enabled, found.roll_window) == (8192, False, 77)
    assert (found.max_delay, found.congest_limit) == (88, 99)
    assert (found.stop_enqueue, found.stop_dequeue) == (True, True)
    usual = timer_config(load(None, [], {}).config)
    assert (usual.log_segment_size, usual.is_enabled, usual.roll_window) == (104_857_600, True, 172_800)
    assert (usual.max_delay, usual.congest_limit) == (366 * 86_400, 2**31 - 1)
    assert (usual.stop_enqueue, usual.stop_dequeue) == (False, False)


@pytest.mark.parametrize(
    ("asked", "used"),
    [(-1, MAX_ROLL_WINDOW), (1, MAX_ROLL_WINDOW), (2, 2), (604_740, 604_740), (604_741, 604_740), (2**31 - 1, 604_740)],
)
def test_a_roll_window_that_the_wheel_cannot_have_is_the_longest(asked: int, used: int) -> None:
    assert timer_config(load(None, [f"timerRollWindowSlot={asked}"], {}).config).roll_window == used


async def test_settings_change_while_running(
    broker: UnboundBroker, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []
    monkeypatch.setattr(broker.running.works.timers, "wake", lambda: looked.append(broker.timers.config.stop_dequeue))
    await change(peer, timerMaxDelaySec=60, timerRollWindowSlot=1, timerCongestNumEachSlot=5, timerStopDequeue="true")
    config = broker.timers.config
    assert (config.max_delay, config.roll_window, config.congest_limit) == (60, MAX_ROLL_WINDOW, 5)
    assert looked == [True]
    assert (await told(peer))["timerMaxDelaySec"] == "60"


@pytest.mark.parametrize("name", ["mappedFileSizeTimerLog", "timerPrecisionMs", "timerWheelEnable"])
async def test_what_is_fixed_with_the_store_does_not_change_while_running(peer: Peer, name: str) -> None:
    value = {"timerWheelEnable": "false", "timerPrecisionMs": "1001"}.get(name, "8192")
    command = request(RequestCode.UPDATE_BROKER_CONFIG, body=f"{name}={value}\n".encode())
    assert "cannot change while the broker runs" in await fails(peer, command, ResponseCode.SYSTEM_ERROR)


# --- how the broker drives them


@pytest.fixture
def steps(broker: UnboundBroker) -> list[int]:
    """Record the times at which the timers are called; they ask to be called again after 5 s each time."""
    called: list[int] = []

    def step(now: Moment, _: Budget) -> float:
        called.append(now.wall_ms - NOW_MS)
        return 5.0

    broker.running.turns._steps[broker.running.works.timers] = step
    return called


async def pass_time(broker: UnboundBroker, loop: SteppedLoop, seconds: float) -> None:
    broker.clock.advance(int(seconds * 1000))
    loop.advance(seconds)
    await turns(5)


async def test_the_timers_are_called_when_they_ask_for_it(
    broker: UnboundBroker, loop: SteppedLoop, steps: list[int]
) -> None:
    broker.running.works.timers.wake()
    await turns()
    assert steps == [0]
    await pass_time(broker, loop, 4.999)
    assert steps == [0]
    await pass_time(broker, loop, 0.001)
    assert steps == [0, 5000]
    await pass_time(broker, loop, 1)
    broker.running.works.timers.wake()
    broker.running.works.timers.wake()
    await turns()
    assert steps == [0, 5000, 6000]
    await pass_time(broker, loop, 4.5)
    assert steps == [0, 5000, 6000], "the call for 10000 was replaced"


async def test_what_is_not_due_soon_is_gathered(broker: UnboundBroker, loop: SteppedLoop, steps: list[int]) -> None:
    arrived = broker.timers._wake_later
    arrived()
    await pass_time(broker, loop, 0.009)
    arrived()
    assert steps == []
    await pass_time(broker, loop, 0.001)
    assert steps == [10]
    arrived()
    broker.running.works.timers.wake()
    arrived()
    await turns()
    assert steps == [10, 10], "what is due soon does not wait for more"


async def test_a_mark_of_a_client_deletes_the_message_that_it_names(
    broker: UnboundBroker, peer: Peer, loop: SteppedLoop
) -> None:
    """A client's mark deletes the message that it names by topic and unique key, in the same second, and is not
    delivered itself, as in RocketMQ."""
    at = f"TIMER_DELIVER_MS\x01{NOW_MS + 5000}"
    await peer.ask(send("T", b"plain"))
    for key in ("K1", "K2"):
        await peer.ask(send("T", key.encode(), properties=f"UNIQ_KEY\x01{key}\x02{at}"))
    mark = await peer.ask(send("T", b"mark", properties=f"UNIQ_KEY\x01M\x02TIMER_DEL_UNIQKEY\x01T+K1\x02{at}"))
    assert mark.code == ResponseCode.SUCCESS
    stored = last(broker)
    unit = broker.timers.queue.unit(stored.queue_offset)
    text, promise = stored.properties_text, stored.prepared_transaction_offset
    code = broker.store.tags_code(stored.topic, RecordSummary(stored.store_timestamp, promise, text))
    assert unit == (stored.physical_offset, stored.size, code), "a start that makes the queue anew finds the same"
    for _ in range(8):
        await pass_time(broker, loop, 1)
    queue = broker.store.ensure_queue("T", 0)
    found = [broker.store.message_at((queue.unit(at) or (0,))[0]) for at in range(queue.next_offset)]
    assert [message.body for message in found if message is not None] == [b"plain", b"K2"]


def test_uvloop_is_driven_as_well() -> None:
    """The broker drives the timers under uvloop as well, whose handles do not give their time."""
    loop = uvloop.new_event_loop()
    called: list[int] = []
    turns = Turns(loop, SystemClock())
    work = turns.work("timers", lambda now, budget: called.append(1))
    turns.start()
    work.wake()
    work.wake_later()
    loop.call_later(0.02, loop.stop)
    loop.run_forever()
    assert called == [1]
    work.wake_later()
    work.wake_later()
    loop.call_later(0.05, loop.stop)
    loop.run_forever()
    loop.close()
    assert called == [1, 1]


async def test_levels_and_timers_do_not_wait_for_each_other(
    broker: UnboundBroker, peer: Peer, loop: SteppedLoop, steps: list[int]
) -> None:
    await peer.ask(send("T", properties="DELAY\x011"))
    broker.running.works.timers.wake()
    await pass_time(broker, loop, 1)
    assert steps == [0, 1000][-len(steps) :]
    assert len(record.decode_all(bytes((await peer.ask(pull("T"))).body))) == 1


async def test_what_is_earlier_while_they_are_called_is_not_forgotten_and_comes_once(
    broker: UnboundBroker, loop: SteppedLoop
) -> None:
    called: list[int] = []

    def step(now: Moment, _: Budget) -> float:
        called.append(now.wall_ms - NOW_MS)
        if len(called) == 1:
            broker.running.works.timers.wake()
        return 5.0

    broker.running.turns._steps[broker.running.works.timers] = step
    broker.running.works.timers.wake()
    await turns(5)
    assert called == [0, 0]
    await pass_time(broker, loop, 5)
    assert called == [0, 0, 5000]


async def test_an_error_does_not_stop_the_timers(broker: UnboundBroker, loop: SteppedLoop, logged: Any) -> None:
    called: list[int] = []

    def step(now: Moment, _: Budget) -> None:
        called.append(now.wall_ms - NOW_MS)
        if len(called) == 1:
            raise RuntimeError("x")

    broker.running.turns._steps[broker.running.works.timers] = step
    broker.running.works.timers.wake()
    await turns()
    await pass_time(broker, loop, 1)
    assert called == [0, 1000]
    assert [line["of"] for line in logged if line["event"] == "step_failed"] == ["timers"]


async def test_a_clock_that_was_moved_is_looked_at(broker: UnboundBroker, loop: SteppedLoop, steps: list[int]) -> None:
    broker.running.works.clock_moved()
    await turns()
    assert steps == [0]


async def test_the_timers_report_each_second(
    broker: UnboundBroker, loop: SteppedLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[int] = []
    async with running(Path(broker.config.store_root) / "other") as other:
        monkeypatch.setattr(other.timers, "report", lambda now: reports.append(1))
        for _ in range(3):
            await pass_time(other, loop, 1)
    assert len(reports) == 3


async def test_at_its_end_the_broker_hands_over_before_the_last_flush(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        events: list[str] = []

        def hand_over_next(now_ms: int) -> bool:
            events.append("hand over")
            return len(events) < 3

        def stop() -> None:
            events.append("stop")
            real_stop()

        real_stop = broker.durability.stop
        broker.timers.hand_over_next = hand_over_next  # type: ignore[method-assign]
        broker.durability.stop = stop  # type: ignore[method-assign]
    assert events == [*["hand over"] * 3, "stop"]


async def test_the_broker_stops_cleanly_where_it_cannot_hand_over(tmp_path: Path, logged: Any) -> None:
    async with running(tmp_path) as broker:
        await broker.connect().ask(send("T"))

        fail = Mock(side_effect=StoreError("x"))
        broker.timers.hand_over_next = fail  # type: ignore[method-assign]
        # Both parts: a failure of the one does not keep the other from being handed over.
        broker.levels.hand_over_next = fail  # type: ignore[method-assign]
    assert [line["reason"] for line in logged if line["event"] == "not_handed_over"] == ["x", "x"]
    assert not (tmp_path / "abort").exists()


async def test_a_topic_that_got_fewer_queues_gets_its_messages_where_they_are_read(
    broker: UnboundBroker, peer: Peer, loop: SteppedLoop
) -> None:
    """A topic with fewer queues gets its waiting messages in queues that consumers can pull from; messages of the
    remaining queues stay there."""
    assert (await peer.ask(create("T", 8, 8))).code == 0
    waiting = [
        send("T", b"%d" % number, queue_id=number, properties=f"TIMER_DELAY_MS\x01{1000 + 1000 * (number % 2)}\x02")
        for number in range(8)
    ]
    levels = [send("T", b"l%d" % number, queue_id=number, properties="DELAY\x012\x02") for number in range(8)]
    assert {answer.code for answer in await peer.ask_all([*waiting, *levels])} == {0}
    broker.clock.advance(1500)
    loop.advance(11)
    await turns(20)
    assert (await peer.ask(create("T", 2, 2))).code == 0
    broker.clock.advance(10_000)
    loop.advance(11)
    await turns(40)
    answers = [await peer.ask(pull("T", queue_id=queue_id)) for queue_id in range(2)]
    found = [message.body for answer in answers for message in record.decode_all(bytes(answer.body))]
    late = {b"1", b"3", b"5", b"7", *(b"l%d" % number for number in range(8))}
    assert late <= set(found)
