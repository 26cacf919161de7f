"""Waiting messages over the wire: LIST_PENDING, DUE_CURVE, CHANGE_PENDING, each with a broker and its store."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from duemq.broker.waiting import pending
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import CODECS, JSON
from duemq.protocol.records import properties, record
from duemq.protocol.records.message_id import offset_message_id, pack_host
from duemq.protocol.requests.headers import CancelMessage, ChangeByHandle, ChangePending, ListPending, QueryDueCurve
from duemq.protocol.topics import TIMER_TOPIC
from duemq.scheduler.search import WaitingMessages
from duemq.scheduler.timers.config import Cancelled
from duemq.storage.durability.jobs import Lane
from duemq.storage.errors import StoreFull
from duemq.storage.queues.pull import ColdRead
from tests.support.broker import Peer, UnboundBroker, running
from tests.support.loop import SteppedLoop, turns
from tests.support.wire import BORN_MS, pull, request, send
from tests.unit.broker.produce.test_retry import last
from tests.unit.broker.produce.test_send import NOW_MS
from tests.unit.broker.settings.test_settings import change as change_settings
from tests.unit.broker.waiting.test_timers import fails

MINUTE_MS = 60_000
LATER_MS = NOW_MS + MINUTE_MS


def listing(**fields: Any) -> Command:
    return request(RequestCode.LIST_PENDING, ListPending(**fields))


def change(action: str, *ids: str, **fields: Any) -> Command:
    if ids:
        fields["msg_id"] = ",".join(ids)
    return request(RequestCode.CHANGE_PENDING, ChangePending(action, **fields))


async def told(peer: Peer, command: Command, frame_codec: int = JSON) -> Any:
    answer = await peer.ask(command, frame_codec)
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return json.loads(bytes(answer.body))


async def later(broker: UnboundBroker, peer: Peer, deliver_ms: int = LATER_MS, text: str = "", topic: str = "T") -> str:
    """Send a message with a timer; return its id."""
    answer = await peer.ask(send(topic, properties=f"{text}TIMER_DELIVER_MS\x01{deliver_ms}"))
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return last(broker).offset_message_id


async def level(broker: UnboundBroker, peer: Peer, number: int, topic: str = "T") -> str:
    """Send a message with a delay level; return its id."""
    assert (await peer.ask(send(topic, properties=f"DELAY\x01{number}"))).code == ResponseCode.SUCCESS
    return last(broker).offset_message_id


async def ids(peer: Peer, **fields: Any) -> list[str]:
    return [each["msgId"] for each in (await told(peer, listing(**fields)))["messages"]]


async def delivered(peer: Peer, topic: str = "T") -> int:
    """Number of messages of a topic that can be consumed."""
    return len(record.decode_all(bytes((await peer.ask(pull(topic))).body)))


async def pass_time(broker: UnboundBroker, loop: SteppedLoop, seconds: float) -> None:
    broker.clock.advance(int(seconds * 1000))
    loop.advance(seconds)
    await turns(10)


@pytest.fixture
async def known(broker: UnboundBroker, peer: Peer) -> UnboundBroker:
    """A broker whose topic has one delivered message."""
    await peer.ask(send("T"))
    return broker


# --- listing


@pytest.mark.parametrize("frame_codec", CODECS)
async def test_what_waits_is_told_with_all_an_operator_wants_to_know(
    known: UnboundBroker, peer: Peer, frame_codec: int
) -> None:
    timer = await later(known, peer, text="UNIQ_KEY\x01U1\x02KEYS\x01a b\x02TAGS\x01t\x02")
    by_level = await level(known, peer, 5)
    page = await told(peer, listing(), frame_codec)
    usual = {"topic": "T", "queueId": 0, "bodySize": 4, "bornMs": BORN_MS, "storeMs": NOW_MS}
    assert page == {
        "messages": [
            {
                "msgId": by_level,
                "uniqueKey": None,
                "deliverMs": NOW_MS + MINUTE_MS,
                "delayLevel": 5,
                "keys": None,
                "tags": None,
                **usual,
            },
            {
                "msgId": timer,
                "uniqueKey": "U1",
                "deliverMs": LATER_MS,
                "delayLevel": 0,
                "keys": "a b",
                "tags": "t",
                **usual,
            },
        ],
        "cursor": None,
        "counted": 2,
    }


async def test_a_selection_by_topic_key_and_time(known: UnboundBroker, peer: Peer) -> None:
    first = await later(known, peer, text="KEYS\x01k\x02")
    second = await later(known, peer, LATER_MS + 1, "KEYS\x01k\x02", "Other")
    third = await later(known, peer, LATER_MS + 2)
    for fields, found in (
        ({"topic": "T"}, [first, third]),
        ({"key": "k"}, [first, second]),
        ({"topic": "T", "key": "k"}, [first]),
        ({"begin_ms": LATER_MS + 1}, [second, third]),
        ({"begin_ms": LATER_MS, "end_ms": LATER_MS + 2}, [first, second]),
        ({"topic": "NoSuch"}, []),
    ):
        assert await ids(peer, **fields) == found
        counted = await told(peer, listing(count_only=True, **fields))
        assert counted == {"messages": [], "cursor": None, "counted": len(found)}


async def test_pages_follow_one_another(known: UnboundBroker, peer: Peer) -> None:
    timers = [await later(known, peer, LATER_MS + n) for n in range(5)]
    all_ids = [await level(known, peer, n) for n in (3, 4)] + timers
    for limit in (1, 2, 3, 6, 7, 1000):
        found: list[str] = []
        cursor, pages = None, 0
        while True:
            page = await told(peer, listing(limit=limit, cursor=cursor))
            found += [each["msgId"] for each in page["messages"]]
            assert page["counted"] == len(page["messages"]) <= limit
            cursor, pages = page["cursor"], pages + 1
            if cursor is None:
                break
        assert (found, pages) == (all_ids, -(-7 // limit))


async def test_a_page_is_of_bounded_size(known: UnboundBroker, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "MAX_PAGE_BYTES", 2500)
    for _ in range(5):
        await later(known, peer, text=f"KEYS\x01{'k' * 1000}\x02")
    page = await told(peer, listing())
    assert len(page["messages"]) == 2
    assert len(await ids(peer, cursor=page["cursor"])) == 2
    monkeypatch.setattr(pending, "MAX_PAGE_BYTES", 1)
    assert len(await ids(peer)) == 1


@pytest.mark.parametrize(
    ("fields", "remark"),
    [
        ({"limit": 0}, "1 to 1000"),
        ({"limit": 1001}, "1 to 1000"),
        ({"cursor": "x"}, "cursor"),
        ({"cursor": "9.9.9"}, "cursor"),
    ],
)
async def test_a_wrong_listing_is_refused(peer: Peer, fields: dict[str, Any], remark: str) -> None:
    assert remark in await fails(peer, listing(**fields), ResponseCode.SYSTEM_ERROR)


# --- the curve


@pytest.mark.parametrize("frame_codec", CODECS)
async def test_the_curve_begins_now_unless_asked_otherwise(known: UnboundBroker, peer: Peer, frame_codec: int) -> None:
    for ms in (0, 1, 60_000):
        await later(known, peer, LATER_MS + ms)
    await later(known, peer, LATER_MS, topic="Other")

    async def curve(*fields: Any) -> Any:
        return await told(peer, request(RequestCode.DUE_CURVE, QueryDueCurve(*fields)), frame_codec)

    assert await curve(60_000, 3) == {"beginMs": NOW_MS, "stepMs": 60_000, "counts": [0, 3, 1]}
    assert await curve(60_000, 3, "T") == {"beginMs": NOW_MS, "stepMs": 60_000, "counts": [0, 2, 1]}
    assert await curve(1000, 1, None, LATER_MS) == {"beginMs": LATER_MS, "stepMs": 1000, "counts": [3]}


@pytest.mark.parametrize("fields", [(999, 1), (1000, 0), (1000, 10_001), (2**60, 1), (1000, 1, None, 2**60)])
async def test_a_wrong_curve_is_refused(peer: Peer, fields: tuple[Any, ...]) -> None:
    await fails(peer, request(RequestCode.DUE_CURVE, QueryDueCurve(*fields)), ResponseCode.SYSTEM_ERROR)


# --- changing


async def test_messages_are_cancelled_by_id(known: UnboundBroker, peer: Peer, loop: SteppedLoop) -> None:
    waiting = [await later(known, peer), await level(known, peer, 5)]
    stays = await later(known, peer)
    done = last(known).physical_offset
    elsewhere = offset_message_id(pack_host("127.0.0.1", 10912), done)
    outcome = await told(peer, change("cancel", *waiting, elsewhere, waiting[0].lower()))
    assert outcome == {
        "counts": {"CANCELLED": 2, "NEVER_EXISTED": 1, "ALREADY_CANCELLED": 1},
        "messages": [
            {"msgId": waiting[0], "result": "CANCELLED"},
            {"msgId": waiting[1], "result": "CANCELLED"},
            {"msgId": elsewhere, "result": "NEVER_EXISTED"},
            {"msgId": waiting[0].lower(), "result": "ALREADY_CANCELLED"},
        ],
    }
    assert await ids(peer) == [stays]
    await pass_time(known, loop, 61)
    assert await delivered(peer) == 2
    assert (await told(peer, change("cancel", stays)))["counts"] == {"ALREADY_DELIVERED": 1}


@pytest.mark.parametrize("by_level", [False, True])
@pytest.mark.parametrize("frame_codec", CODECS)
async def test_by_handle_only_the_message_that_is_meant_is_changed(
    known: UnboundBroker, peer: Peer, by_level: bool, frame_codec: int
) -> None:
    """An id is another message's after the store was replaced, and a sender may only change what is for his topic."""
    delay = "DELAY\x015" if by_level else f"TIMER_DELIVER_MS\x01{LATER_MS}"
    named = []
    for key in ("U,1", "U2"):
        await peer.ask(send("T", properties=f"UNIQ_KEY\x01{key}\x02{delay}"))
        named.append(last(known).offset_message_id)

    def by_handle(action: str, keys: str, topic: str = "T", **more: int) -> Command:
        return request(RequestCode.CHANGE_BY_HANDLE, ChangeByHandle(action, topic, ",".join(named), keys, **more))

    for topic, keys in (("T", "U2\x01U,1"), ("Other", "U,1\x01U2")):
        for action, more in (("reschedule", {"delay_ms": 5}), ("deliver", {}), ("cancel", {})):
            other = await told(peer, by_handle(action, keys, topic, **more), frame_codec)
            assert other["counts"] == {"NEVER_EXISTED": 2}, (topic, action)
    both = "U,1\x01U2"
    assert (await told(peer, by_handle("reschedule", both, delay_ms=90_000), frame_codec))["counts"] == {
        "RESCHEDULED": 2
    }
    assert {each["deliverMs"] for each in (await told(peer, listing()))["messages"]} == {NOW_MS + 90_000}
    mixed = await told(peer, by_handle("cancel", "U,1\x01U,1"), frame_codec)
    assert [each["result"] for each in mixed["messages"]] == ["CANCELLED", "NEVER_EXISTED"]
    again = await told(peer, by_handle("cancel", both), frame_codec)
    assert [each["result"] for each in again["messages"]] == ["ALREADY_CANCELLED", "CANCELLED"]
    assert await ids(peer) == []


@pytest.mark.parametrize(
    ("fields", "remark"),
    [
        (("cancel", "T", "x", "K"), "x"),
        (("cancel", "T", "0" * 32, "K\x01K"), "2 uniqKeys for 1 ids"),
        (("cancel", "T", ",".join(["0" * 32] * 1001), "K"), "1001 ids are more than 1000"),
        (("drop", "T", "0" * 32, "K"), "is not one of cancel, reschedule, deliver"),
        (("reschedule", "T", "0" * 32, "K"), "reschedule needs exactly one of them"),
    ],
)
async def test_a_wrong_change_by_handle_is_refused(peer: Peer, fields: tuple[str, str, str, str], remark: str) -> None:
    answer = await peer.ask(request(RequestCode.CHANGE_BY_HANDLE, ChangeByHandle(*fields)))
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert remark in (answer.remark or "")


async def test_messages_get_another_time(known: UnboundBroker, peer: Peer, loop: SteppedLoop) -> None:
    waiting = [await later(known, peer, text="UNIQ_KEY\x01U1\x02"), await level(known, peer, 5)]
    outcome = await told(peer, change("reschedule", *waiting, deliver_ms=NOW_MS + 5000))
    assert outcome["counts"] == {"RESCHEDULED": 2}
    assert [(each["msgId"], each["result"]) for each in outcome["messages"]] == [
        (each, "RESCHEDULED") for each in waiting
    ]
    page = await told(peer, listing())
    assert [each["msgId"] for each in page["messages"]] == waiting
    assert [(each["deliverMs"], each["uniqueKey"]) for each in page["messages"]] == [
        (NOW_MS + 5000, "U1"),
        (NOW_MS + 5000, None),
    ]
    await pass_time(known, loop, 4.999)
    assert await delivered(peer) == 1
    await pass_time(known, loop, 0.001)
    assert await delivered(peer) == 3
    await pass_time(known, loop, 60)
    assert await delivered(peer) == 3


async def test_messages_are_delivered_now(known: UnboundBroker, peer: Peer, loop: SteppedLoop) -> None:
    waiting = [await later(known, peer), await level(known, peer, 5)]
    outcome = await told(peer, change("deliver", *waiting))
    assert outcome["counts"] == {"DELIVERED_NOW": 2}
    await pass_time(known, loop, 0)
    assert await delivered(peer) == 3
    assert (await told(peer, change("deliver", *waiting)))["counts"] == {"ALREADY_DELIVERED": 2}


async def test_a_selection_is_changed(known: UnboundBroker, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "_CHANGE_UNITS", 3)
    monkeypatch.setattr(pending, "MAX_IDS", 4)
    chosen = [await later(known, peer, LATER_MS + n, "KEYS\x01k\x02") for n in range(7)]
    others = [await later(known, peer, LATER_MS + 8), await later(known, peer, LATER_MS, "KEYS\x01k\x02", "Other")]
    outcome = await told(peer, change("cancel", topic="T", key="k", begin_ms=LATER_MS + 1))
    assert outcome["counts"] == {"CANCELLED": 6}
    assert [each["msgId"] for each in outcome["messages"]] == chosen[1:5]
    assert await ids(peer) == [chosen[0], *others]
    assert (await told(peer, change("cancel", topic="T", end_ms=LATER_MS + 1)))["counts"] == {"CANCELLED": 1}
    assert await told(peer, change("cancel", topic="T", key="k")) == {"counts": {}, "messages": []}


async def test_a_selection_gets_another_time_once(
    known: UnboundBroker, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rescheduling a selection changes each message once, although the changed messages match the selection again."""
    monkeypatch.setattr(pending, "_CHANGE_UNITS", 3)
    for n in range(20):
        await later(known, peer, LATER_MS + n)
        await level(known, peer, 5)
    outcome = await told(peer, change("reschedule", topic="T", begin_ms=NOW_MS, deliver_ms=LATER_MS + 5000))
    assert outcome["counts"] == {"RESCHEDULED": 40}
    page = await told(peer, listing())
    assert {each["deliverMs"] for each in page["messages"]} == {LATER_MS + 5000}
    assert [each["msgId"] for each in page["messages"]] == [each["msgId"] for each in outcome["messages"]]


async def test_a_new_time_may_be_a_delay_by_the_brokers_clock(known: UnboundBroker, peer: Peer) -> None:
    message_id = await later(known, peer)
    known.clock.advance(3000)
    outcome = await told(peer, change("reschedule", message_id, delay_ms=5000))
    assert outcome["counts"] == {"RESCHEDULED": 1}
    page = await told(peer, listing())
    assert [each["deliverMs"] for each in page["messages"]] == [NOW_MS + 8000]
    await told(peer, change("reschedule", topic="T", begin_ms=0, delay_ms=7000))
    page = await told(peer, listing())
    assert [each["deliverMs"] for each in page["messages"]] == [NOW_MS + 10_000]


@pytest.mark.parametrize(
    ("command", "remark"),
    [
        (change("stop", "0" * 32), "action=stop"),
        (change("reschedule", "0" * 32), "reschedule needs exactly one of them"),
        (change("cancel", "0" * 32, deliver_ms=5), "reschedule needs exactly one of them"),
        (change("deliver", "0" * 32, deliver_ms=5), "reschedule needs exactly one of them"),
        (change("reschedule", "0" * 32, deliver_ms=2**60), "reschedule needs exactly one of them"),
        (change("reschedule", "0" * 32, delay_ms=2**60), "reschedule needs exactly one of them"),
        (change("reschedule", "0" * 32, delay_ms=5, deliver_ms=5), "reschedule needs exactly one of them"),
        (change("cancel", "0" * 32, delay_ms=5), "reschedule needs exactly one of them"),
        (change("cancel", "x"), "is not 32 or 56 hex digits"),
        (change("cancel", msg_id=""), "hex"),
        (change("cancel", *["0" * 32] * 1001), "1000"),
        (change("cancel", "0" * 32, topic="T"), "not both"),
        (change("cancel"), "give msgId"),
        (change("cancel", topic="T"), "give msgId"),
        (change("cancel", key="k"), "give msgId"),
        (change("cancel", begin_ms=0), "give msgId"),
        (change("cancel", topic="T", key=""), "give msgId"),
        (change("cancel", topic="", key="k"), "give msgId"),
    ],
)  # fmt: skip
async def test_a_wrong_change_is_refused_as_a_whole(
    known: UnboundBroker, peer: Peer, command: Command, remark: str
) -> None:
    await later(known, peer)
    assert remark in await fails(peer, command, ResponseCode.SYSTEM_ERROR)
    assert len(await ids(peer)) == 1


async def test_one_wrong_id_spoils_the_list(known: UnboundBroker, peer: Peer) -> None:
    message_id = await later(known, peer)
    assert "hex" in await fails(peer, change("cancel", message_id, "x"), ResponseCode.SYSTEM_ERROR)
    assert await ids(peer) == [message_id]


async def test_a_new_time_has_the_limits_of_a_send(known: UnboundBroker, peer: Peer) -> None:
    message_id = await later(known, peer)
    await change_settings(peer, timerMaxDelaySec=100)
    for fields in ({"msg_id": message_id}, {"topic": "T", "key": "NoSuch"}):
        command = change("reschedule", deliver_ms=NOW_MS + 100_001, **fields)
        assert "timerMaxDelaySec" in await fails(peer, command, ResponseCode.MESSAGE_ILLEGAL)
    await change_settings(peer, timerCongestNumEachSlot=3)
    for _ in range(4):
        await later(known, peer, NOW_MS + 20_000 + (await told(peer, listing(count_only=True)))["counted"] * 1000)
    command = change("reschedule", topic="T", begin_ms=NOW_MS, deliver_ms=NOW_MS + 50_000)
    remark = await fails(peer, command, ResponseCode.SYSTEM_ERROR)
    assert "timerCongestNumEachSlot" in remark
    assert "after 3 messages" in remark
    counted = await told(peer, listing(begin_ms=NOW_MS + 50_000, end_ms=NOW_MS + 50_001, count_only=True))
    assert counted["counted"] == 3


async def test_without_the_timer_wheel_messages_get_no_time_but_now(tmp_path: Path) -> None:
    async with running(tmp_path, "timerWheelEnable=false") as broker:
        peer = broker.connect()
        await peer.ask(send("T"))
        message_id = await level(broker, peer, 5)
        command = change("reschedule", message_id, deliver_ms=LATER_MS)
        assert "timerWheelEnable" in await fails(peer, command, ResponseCode.SYSTEM_ERROR)
        assert (await told(peer, change("deliver", message_id)))["counts"] == {"DELIVERED_NOW": 1}


async def test_changing_can_be_forbidden_and_looking_not(known: UnboundBroker, peer: Peer) -> None:
    message_id = await later(known, peer)
    await change_settings(peer, recallMessageEnable="false")
    for command in (change("cancel", message_id), change("deliver", topic="T", begin_ms=0)):
        assert "recallMessageEnable is false" in await fails(peer, command, ResponseCode.NO_PERMISSION)
    assert await ids(peer) == [message_id]
    await told(peer, request(RequestCode.DUE_CURVE, QueryDueCurve(1000, 1)))
    await change_settings(peer, recallMessageEnable="true")
    assert (await told(peer, change("cancel", message_id)))["counts"] == {"CANCELLED": 1}


# --- durable


@pytest.mark.parametrize("action", pending.ACTIONS)
async def test_the_answer_waits_for_the_disk_as_a_sends_does(tmp_path: Path, action: str) -> None:
    async with running(tmp_path, "flushDiskType=SYNC_FLUSH", "timerStopDequeue=true") as broker:
        peer = broker.connect()
        message_id = await later(broker, peer)
        flushed, before = broker.store.log.flushed, len(peer.responses)
        broker.lanes.hold(Lane.FLUSH)
        command = change(action, message_id, deliver_ms=LATER_MS + 1 if action == "reschedule" else None)
        telling = asyncio.ensure_future(told(peer, command))
        while not broker.lanes.held[Lane.FLUSH]:
            await asyncio.sleep(0)
        await turns(20)
        assert len(peer.responses) == before
        broker.lanes.let_go(Lane.FLUSH)
        await telling
        assert broker.store.log.flushed == broker.store.log.end > flushed


@pytest.mark.parametrize("action", pending.ACTIONS)
async def test_an_answer_that_goes_by_what_the_disk_has_waits_for_nothing(tmp_path: Path, action: str) -> None:
    """An answer that depends only on durable data does not wait: nothing is appended, so no flush would come for it."""
    async with running(tmp_path, "flushDiskType=SYNC_FLUSH") as broker:
        peer = broker.connect()
        message_id = await later(broker, peer)
        await told(peer, change("cancel", message_id))
        deliver_ms = LATER_MS + 1 if action == "reschedule" else None
        broker.lanes.hold(Lane.FLUSH)
        answer = await told(peer, change(action, message_id, deliver_ms=deliver_ms))
        assert answer["counts"] == {"ALREADY_CANCELLED": 1}
        answer = await told(peer, change(action, topic="T", begin_ms=0, deliver_ms=deliver_ms))
        assert answer["counts"] == {}
        broker.lanes.let_go(Lane.FLUSH)


async def test_what_could_not_be_written_is_no_success(known: UnboundBroker, peer: Peer) -> None:
    message_id = await later(known, peer)
    known.store.health.fill("the disk is 95% full")
    for command in (change("cancel", message_id), change("deliver", topic="T", begin_ms=0)):
        assert "95% full" in await fails(peer, command, ResponseCode.SERVICE_NOT_AVAILABLE)
    known.store.health.has_room()
    assert await ids(peer) == [message_id]


@pytest.mark.parametrize("by", [RequestCode.CHANGE_PENDING, RequestCode.CANCEL_MESSAGE])
async def test_a_change_that_the_disk_ends_midway_says_after_how_many(
    known: UnboundBroker, peer: Peer, monkeypatch: pytest.MonkeyPatch, by: int
) -> None:
    message_ids = [await later(known, peer) for _ in range(3)]
    cancel, done = known.timers.changes.cancel, list[int]()

    def until_full(place: int, now_ms: int, *_: object) -> Cancelled | None:
        if len(done) == 2:
            raise StoreFull("the disk is full")
        done.append(place)
        return cancel(place, now_ms)

    monkeypatch.setattr(known.timers.changes, "cancel", until_full)
    command = change("cancel", ",".join(message_ids))
    if by == RequestCode.CANCEL_MESSAGE:
        command = request(by, CancelMessage(",".join(message_ids)))
    remark = await fails(peer, command, ResponseCode.SERVICE_NOT_AVAILABLE)
    assert "full" in remark
    assert "(after 2 messages)" in remark
    monkeypatch.undo()
    assert await ids(peer) == message_ids[2:]


# --- beside other requests


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Searches that find nothing and never end; returns their steps."""
    steps: list[int] = []

    def select(*_: Any) -> Any:
        while True:
            steps.append(1)
            yield None

    monkeypatch.setattr(WaitingMessages, "select", select)
    return steps


async def test_others_are_served_while_a_search_goes_on(known: UnboundBroker, peer: Peer, endless: list[int]) -> None:
    peer.post(listing())
    await turns(5)
    before = len(endless)
    assert (await known.connect().ask(send("T"))).code == ResponseCode.SUCCESS
    await turns(5)
    assert len(endless) > before > 0


async def test_a_search_for_which_nobody_waits_ends(known: UnboundBroker, endless: list[int]) -> None:
    peer = known.connect()
    peer.post(listing())
    await turns(5)
    peer.transport.abort()
    await turns(5)
    ended = len(endless)
    await turns(5)
    assert len(endless) == ended > 0


async def test_searches_take_turns_and_too_many_are_refused(
    known: UnboundBroker, peer: Peer, endless: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending, "MAX_QUEUED", 3)
    commands = [listing() for _ in range(pending.MAX_SEARCHES + 3)]
    peer.post(*commands)
    await turns(5)
    assert "try again later" in await fails(peer, listing(), ResponseCode.SYSTEM_BUSY)
    assert [peer.answer_of(command) for command in commands] == [None] * len(commands)


async def test_at_its_end_the_broker_gives_searches_up(tmp_path: Path, endless: list[int]) -> None:
    async with running(tmp_path) as broker:
        peer = broker.connect()
        command = change("cancel", topic="T", begin_ms=0)
        peer.post(command)
        await turns(5)
        assert endless
        assert peer.answer_of(command) is None
    answer = peer.answer_of(command)
    assert answer is not None
    assert answer.code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert "given up" in (answer.remark or "")


async def test_a_message_that_says_no_queue_is_told_all_the_same(known: UnboundBroker, peer: Peer) -> None:
    """A message without a queue id, as Apache's broker may leave it, is listed with queue 0."""
    store = known.store
    text = f"REAL_TOPIC\x01T\x02TIMER_OUT_MS\x01{LATER_MS}"
    appender = store.appender
    appender.begin(NOW_MS)
    offset = appender.add(store.ensure_queue(TIMER_TOPIC, 0), b"x", text.encode(), LATER_MS, NOW_MS, bytes(8))
    known.timers.staged(offset, "T")
    appender.commit()
    assert properties.get(last(known).properties_text, properties.REAL_QID) is None
    (found,) = (await told(peer, listing()))["messages"]
    assert (found["queueId"], found["deliverMs"]) == (0, LATER_MS)


async def test_a_search_lets_a_thread_read_what_is_not_in_memory(
    known: UnboundBroker, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        await later(known, peer, text=f"KEYS\x01k{number}\x02")
    threads: list[str] = []
    real = ColdRead.run

    def run(self: ColdRead) -> bytes:
        threads.append(threading.current_thread().name)
        return real(self)

    monkeypatch.setattr(ColdRead, "run", run)
    monkeypatch.setattr(known.store, "is_cached", lambda _: False)
    assert len(await ids(peer, key="k1")) == 1
    assert (await told(peer, listing(key="k2", count_only=True)))["counted"] == 1
    assert len(threads) == 2, "the three records are read at once"
    assert all(name.startswith("reads") for name in threads)
