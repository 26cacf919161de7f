"""Sends with a requested time: the messages staged for the timers, the answers, the refusals."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import CODECS
from duemq.protocol.records import batch
from duemq.protocol.records.properties import MAX_BYTES
from duemq.protocol.records.record import FLAG_BORN_IPV6, FLAG_COMPRESSED, FLAG_STORE_IPV6, StoredMessage
from duemq.protocol.records.timer_properties import AGAIN_ROOM, due_of
from duemq.protocol.requests import recall_handle
from duemq.protocol.requests.recall_handle import RecallHandle
from duemq.protocol.topics import SCHEDULE_TOPIC, TIMER_TOPIC
from duemq.scheduler.timers.config import Refusal
from duemq.storage.budget import Unlimited
from duemq.storage.clock import Moment
from tests.support.broker import Peer, UnboundBroker, running
from tests.support.wire import ADDED, ADDED_TEXT, request, send
from tests.unit.broker.produce.test_retry import back, last
from tests.unit.broker.produce.test_send import NOW_MS, header_of, refused, sent, stored

DAY_MS = 86_400_000
LATER_MS = NOW_MS + 5_432
KEY = "UNIQ_KEY\x01U1"

CASES = [
    # requested, deliver time, TIMER_OUT_MS
    (f"TIMER_DELIVER_MS\x01{NOW_MS + 5432}", NOW_MS + 5432, NOW_MS + 5000),
    (f"TIMER_DELIVER_MS\x01{NOW_MS + 5000}", NOW_MS + 5000, NOW_MS + 4000),
    (f"TIMER_DELIVER_MS\x01{NOW_MS + 1}", NOW_MS + 1, NOW_MS),
    (f"TIMER_DELIVER_MS\x01+{NOW_MS + 5432}", NOW_MS + 5432, NOW_MS + 5000),
    ("TIMER_DELAY_MS\x015432", NOW_MS + 5432, NOW_MS + 5000),
    ("TIMER_DELAY_SEC\x015", NOW_MS + 5000, NOW_MS + 4000),
    ("TIMER_DELAY_SEC\x01007", NOW_MS + 7000, NOW_MS + 6000),
    # the first of three counts, the last of two
    (f"TIMER_DELIVER_MS\x01{NOW_MS + 1}\x02TIMER_DELAY_MS\x012\x02TIMER_DELAY_SEC\x013", NOW_MS + 3000, NOW_MS + 2000),
    (f"TIMER_DELIVER_MS\x01{NOW_MS + 1}\x02TIMER_DELAY_MS\x012", NOW_MS + 2, NOW_MS),
    (f"TIMER_DELIVER_MS\x01{NOW_MS + 1}\x02TIMER_DELIVER_MS\x01{NOW_MS + 9999}", NOW_MS + 9999, NOW_MS + 9000),
    # the other properties here are not times
    ("DELAY\x010\x02TIMER_DELAY_MS\x015432", NOW_MS + 5432, NOW_MS + 5000),
    ("TIMER_DELAY_MS\x015432\x02XTIMER_DELAY_SEC\x011\x02A\x01TIMER_OUT_MS", NOW_MS + 5432, NOW_MS + 5000),
]


def values(text: str) -> dict[str, str]:
    return dict(part.split("\x01") for part in text.split("\x02") if part)


def texts(text: str) -> list[str]:
    """Return the same properties in the middle and at the end, as different clients order them."""
    return [f"A\x01a\x02{text}\x02TAGS\x01tagA\x02{KEY}", f"{KEY}\x02TAGS\x01tagA\x02A\x01a\x02{text}\x02"]


@pytest.fixture
async def known(broker: UnboundBroker, peer: Peer) -> UnboundBroker:
    """A broker that has a topic T."""
    await peer.ask(send("T"))
    return broker


@pytest.fixture
async def staged(broker: UnboundBroker, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Record the calls to the timers: queue offset and topic."""
    told = []
    real = broker.timers.staged

    def staged(queue_offset: int, topic: str, key: int = 0) -> None:
        told.append((queue_offset, topic))
        real(queue_offset, topic, key)

    monkeypatch.setattr(broker.timers, "staged", staged)
    return told


# --- stored records


@pytest.mark.parametrize("frame_codec", CODECS)
@pytest.mark.parametrize(("text", "deliver_ms", "out_ms"), CASES)
async def test_a_message_for_a_later_time_waits_with_the_timers(
    broker: UnboundBroker, peer: Peer, staged: list[Any], text: str, deliver_ms: int, out_ms: int, frame_codec: int
) -> None:
    """A message for a later time waits with the timers: by the long way if its topic is new, and by the short one if it
    is known."""
    for queue_offset, whole in enumerate(texts(text) * 2):
        command = send("T", b"body", queue_id=2, properties=whole, flag=7, sys_flag=FLAG_COMPRESSED, reconsume_times=3)
        answer = await peer.ask(command, frame_codec)
        assert header_of(answer).queue_id == 2
        (message,) = stored(broker, answer)
        assert (message.topic, message.queue_id, message.queue_offset) == (TIMER_TOPIC, 0, queue_offset)
        assert (message.body, message.flag, message.sys_flag, message.reconsume_times) == (b"body", 7, 1, 3)
        added = {"TIMER_OUT_MS": str(out_ms), "REAL_TOPIC": "T", "REAL_QID": "2", **ADDED}
        if "TIMER_DELAY_" in text:
            added["TIMER_DELIVER_MS"] = str(deliver_ms)  # so that consumers know how late it is
        assert message.properties == {**values(whole), **added}
        assert message.properties_text.endswith(f"\x02TIMER_OUT_MS\x01{out_ms}\x02REAL_TOPIC\x01T\x02REAL_QID\x012")
        assert message.prepared_transaction_offset == deliver_ms
        assert due_of(message.properties_text, message.store_timestamp, deliver_ms) == deliver_ms
        assert broker.timers.queue.unit(queue_offset) == (message.physical_offset, message.size, deliver_ms)
    assert staged == [(number, "T") for number in range(4)]
    assert broker.store.queue("T", 2) is None or broker.store.ensure_queue("T", 2).next_offset == 0


@pytest.mark.parametrize(
    "left",
    [
        f"TIMER_OUT_MS\x01{NOW_MS}",
        "TIMER_OUT_MS\x01x\x02TIMER_ROLL_TIMES\x011\x02TIMER_ENQUEUE_MS\x019223372036854775807\x02TIMER_DEQUEUE_MS\x011",
        "REAL_TOPIC\x01Other\x02REAL_QID\x0199",
        "REAL_QID\x0199\x02REAL_TOPIC\x01Other\x02CLUSTER\x01theirs\x02MSG_REGION\x01theirs",
    ],
)
async def test_what_is_left_of_an_earlier_delivery_has_no_effect(broker: UnboundBroker, peer: Peer, left: str) -> None:
    """Properties left from an earlier delivery have no effect. RocketMQ delivers a message that already has
    TIMER_OUT_MS at once."""
    for text in (f"{left}\x02TIMER_DELIVER_MS\x01{LATER_MS}", f"TIMER_DELIVER_MS\x01{LATER_MS}\x02{left}") * 2:
        message = await sent(broker, peer, send("T", queue_id=1, properties=text))
        added = {"TIMER_OUT_MS": str(NOW_MS + 5000), "REAL_TOPIC": "T", "REAL_QID": "1", **ADDED}
        assert message.topic == TIMER_TOPIC
        assert message.properties == {"TIMER_DELIVER_MS": str(LATER_MS), **added}
        assert message.properties_text.endswith(f"TIMER_OUT_MS\x01{NOW_MS + 5000}\x02REAL_TOPIC\x01T\x02REAL_QID\x011")


@pytest.mark.parametrize(
    "text",
    [
        f"TIMER_DELIVER_MS\x01{NOW_MS}",
        f"TIMER_DELIVER_MS\x01{NOW_MS - 1}",
        "TIMER_DELIVER_MS\x010",
        "TIMER_DELAY_MS\x010",
        "TIMER_DELAY_SEC\x01-5",
    ],
)
async def test_a_time_that_is_past_means_at_once(
    broker: UnboundBroker, peer: Peer, staged: list[Any], text: str
) -> None:
    for whole in (text, f"{text}\x02TIMER_OUT_MS\x015", text):
        answer = await peer.ask(send("T", queue_id=1, properties=whole))
        (message,) = stored(broker, answer)
        assert (message.topic, message.queue_id, message.prepared_transaction_offset) == ("T", 1, 0)
        assert message.properties == {**values(text), **ADDED}
        assert "recallHandle" not in answer.ext
    assert staged == []


@pytest.mark.parametrize("text", ["TIMER_OUT_MS\x011", "XTIMER_DELAY_MS\x015", "A\x01TIMER_DELIVER_MS"])
async def test_a_message_that_asks_for_no_time_is_a_plain_one(broker: UnboundBroker, peer: Peer, text: str) -> None:
    for _ in range(2):
        message = await sent(broker, peer, send("T", properties=text))
        assert message.topic == "T"
        assert message.properties_text.startswith(text)


@pytest.mark.parametrize("order", [1, -1])
async def test_a_level_counts_before_a_time(broker: UnboundBroker, peer: Peer, order: int, staged: list[Any]) -> None:
    parts = [f"TIMER_DELIVER_MS\x01{LATER_MS}", "TIMER_DELAY_SEC\x01x", "TIMER_OUT_MS\x015", "DELAY\x012", "A\x01a"]
    for _ in range(2):
        message = await sent(broker, peer, send("T", properties="\x02".join(parts[::order])))
        assert (message.topic, message.queue_id) == (SCHEDULE_TOPIC, 1)
        assert message.prepared_transaction_offset == NOW_MS + 5000
        wanted = {"A": "a", "DELAY": "2", "REAL_TOPIC": "T", "REAL_QID": "0", **ADDED}
        assert message.properties == wanted
    assert staged == []


@pytest.mark.parametrize("sys_flag", [FLAG_BORN_IPV6, FLAG_BORN_IPV6 | FLAG_STORE_IPV6])
async def test_a_client_does_not_say_what_kind_of_host_it_has(broker: UnboundBroker, peer: Peer, sys_flag: int) -> None:
    for _ in range(2):
        command = send("T", sys_flag=sys_flag, properties=f"TIMER_DELIVER_MS\x01{LATER_MS}")
        assert (await sent(broker, peer, command)).sys_flag == 0


async def test_a_negative_queue_lets_the_broker_choose(broker: UnboundBroker, peer: Peer) -> None:
    chosen = set()
    for _ in range(60):
        answer = await peer.ask(send("T", queue_id=-1, properties="TIMER_DELAY_SEC\x015"))
        (message,) = stored(broker, answer)
        chosen.add(header_of(answer).queue_id)
        assert message.get_property("REAL_QID") == str(header_of(answer).queue_id)
    assert chosen == {0, 1, 2, 3}


async def test_a_one_way_send_is_staged_and_not_answered(broker: UnboundBroker, peer: Peer) -> None:
    await peer.ask(send("T"))
    peer.post(send("T", properties=f"TIMER_DELIVER_MS\x01{LATER_MS}\x02{KEY}", oneway=True))
    assert broker.timers.queue.next_offset == 1
    assert len(peer.responses) == 1


async def test_messages_of_one_read_are_staged_in_order(known: UnboundBroker, peer: Peer) -> None:
    commands = [send("T", b"%d" % number, properties=f"TIMER_DELAY_MS\x01{9 - number}") for number in range(5)]
    commands.insert(2, send("T", b"plain"))
    answers = await peer.ask_all(commands)
    assert [header_of(answer).queue_offset for answer in answers] == [0, 1, 1, 2, 3, 4]
    assert [stored(known, answer)[0].topic for answer in answers] == [TIMER_TOPIC] * 2 + ["T"] + [TIMER_TOPIC] * 3


# --- the recall handle


@pytest.mark.parametrize("frame_codec", CODECS)
async def test_the_answer_has_a_handle_to_recall_the_message_by(
    broker: UnboundBroker, peer: Peer, frame_codec: int
) -> None:
    for text in [
        *texts(f"TIMER_DELIVER_MS\x01{LATER_MS}"),
        f"TIMER_OUT_MS\x011\x02TIMER_DELAY_MS\x015432\x02{KEY}",
    ] * 2:
        answer = await peer.ask(send("T", queue_id=1, properties=text), frame_codec)
        (message,) = stored(broker, answer)
        handle = recall_handle.decode(answer.ext["recallHandle"])
        kept = (message.physical_offset, LATER_MS)
        assert handle == RecallHandle("T", "broker-a", NOW_MS + 5001, "U1", kept)
        assert answer.ext["TRACE_ON"] == "true"


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ("UNIQ_KEY\x01U1\x02UNIQ_KEY\x01U2", "U2"),
        ("XUNIQ_KEY\x01U1\x02UNIQ_KEY\x01U2", "U2"),
        ("UNIQ_KEY\x01U2\x02A\x01UNIQ_KEY\x01U1", "U2"),
    ],
)
async def test_the_key_in_a_handle_is_the_one_that_counts(
    broker: UnboundBroker, peer: Peer, keys: str, key: str
) -> None:
    for text in (f"{keys}\x02TIMER_DELIVER_MS\x01{LATER_MS}", f"TIMER_DELIVER_MS\x01{LATER_MS}\x02{keys}") * 2:
        answer = await peer.ask(send("T", properties=text))
        assert recall_handle.decode(answer.ext["recallHandle"]).unique_key == key
        assert last(broker).get_property("UNIQ_KEY") == key


@pytest.mark.parametrize("key", ["", "\x02UNIQ_KEY\x01a b", "\x02XUNIQ_KEY\x01a", "\x02UNIQ_KEY\x01"])
async def test_without_a_key_that_fits_there_is_no_handle(broker: UnboundBroker, peer: Peer, key: str) -> None:
    for frame_codec in CODECS:
        answer = await peer.ask(send("T", properties=f"TIMER_DELIVER_MS\x01{LATER_MS}{key}"), frame_codec)
        assert stored(broker, answer)[0].topic == TIMER_TOPIC
        assert "recallHandle" not in answer.ext


async def test_a_broker_whose_name_has_a_blank_gives_no_handles(tmp_path: Path) -> None:
    async with running(tmp_path, "brokerName=my broker") as broker:
        for _ in range(2):
            answer = await broker.connect().ask(send("T", properties=f"TIMER_DELIVER_MS\x01{LATER_MS}\x02{KEY}"))
            assert answer.code == ResponseCode.SUCCESS
            assert "recallHandle" not in answer.ext


@pytest.mark.parametrize("region", ["50%b}", '"quoted"', "größe"])
async def test_any_region_is_told(tmp_path: Path, region: str) -> None:
    async with running(tmp_path, f"regionId={region}") as broker:
        peer = broker.connect()
        for text in (None, f"TIMER_DELIVER_MS\x01{LATER_MS}\x02{KEY}") * 2:
            answer = await peer.ask(send("T", properties=text))
            assert answer.ext["MSG_REGION"] == region
            assert ("recallHandle" in answer.ext) == (text is not None)


# --- refusals


@pytest.mark.parametrize(
    "text",
    [
        "TIMER_DELIVER_MS\x01soon",
        "TIMER_DELIVER_MS\x01",
        "TIMER_DELAY_MS\x011.5",
        "TIMER_DELAY_SEC\x01" + "9" * 5000,
        f"TIMER_DELAY_SEC\x01x\x02TIMER_DELIVER_MS\x01{LATER_MS}",
        f"TIMER_DELIVER_MS\x01{'1' * 20}",
        "TIMER_DELIVER_MS\x01١٧٩٥٣٨١٧٦٣١٢٣",  # noqa: RUF001
    ],
)
async def test_a_time_that_is_no_number_is_refused(broker: UnboundBroker, peer: Peer, text: str) -> None:
    assert "timer message illegal" in await refused(peer, send("T", properties=text), ResponseCode.MESSAGE_ILLEGAL)
    assert broker.timers.queue.next_offset == 0


@pytest.mark.parametrize("ways", ["short", "long"])
@pytest.mark.parametrize(
    ("refusal", "code", "remarks"),
    [
        (
            Refusal.DISABLED,
            ResponseCode.SYSTEM_ERROR,
            ["accurate timer message is not enabled, timerWheelEnable is false"],
        ),
        (
            Refusal.TOO_FAR,
            ResponseCode.MESSAGE_ILLEGAL,
            ["timer message illegal, the delay time should not be bigger than the max delay 31622400000ms; or if set",
             "It asks for 5 s, and timerMaxDelaySec is 31622400"],
        ),
        (
            Refusal.CONGESTED,
            ResponseCode.SYSTEM_ERROR,
            ["timer message is under flow control, max num limit is 2147483647", "timerCongestNumEachSlot"],
        ),
        (
            Refusal.STALLED,
            ResponseCode.SERVICE_NOT_AVAILABLE,
            ["service not available now: the timer log cannot be written"],
        ),
    ],
)  # fmt: skip
async def test_what_the_timers_refuse_is_answered_in_rocketmqs_words(
    known: UnboundBroker,
    peer: Peer,
    monkeypatch: pytest.MonkeyPatch,
    refusal: Refusal,
    code: int,
    remarks: list[str],
    ways: str,
) -> None:
    asked = []

    def refuse(deliver_ms: int, now_ms: int) -> Refusal:
        asked.append((deliver_ms, now_ms))
        return refusal

    monkeypatch.setattr(known.timers, "refusal", refuse)
    text = f"TIMER_DELIVER_MS\x01{LATER_MS}" + ("" if ways == "short" else "\x02TIMER_OUT_MS\x011")
    remark = await refused(peer, send("T", properties=text), code)
    assert all(part in remark for part in remarks)
    assert asked == [(LATER_MS, NOW_MS)] * 2
    assert known.timers.queue.next_offset == 0
    assert (await peer.ask(send("T"))).code == ResponseCode.SUCCESS


async def test_the_limits_of_the_settings_hold(tmp_path: Path) -> None:
    async with running(tmp_path, "timerMaxDelaySec=60") as broker:
        peer = broker.connect()
        for way in ("", "\x02TIMER_OUT_MS\x011"):
            assert (await peer.ask(send("T", properties=f"TIMER_DELAY_SEC\x0160{way}"))).code == 0
            command = send("T", properties=f"TIMER_DELAY_MS\x0160001{way}")
            assert "60000ms" in await refused(peer, command, ResponseCode.MESSAGE_ILLEGAL)


async def test_without_the_timer_wheel_only_times_that_are_past_are_taken(tmp_path: Path) -> None:
    async with running(tmp_path, "timerWheelEnable=false") as broker:
        peer = broker.connect()
        assert (await peer.ask(send("T", properties=f"TIMER_DELIVER_MS\x01{NOW_MS}"))).code == ResponseCode.SUCCESS
        command = send("T", properties=f"TIMER_DELIVER_MS\x01{NOW_MS + 1}")
        assert "timerWheelEnable is false" in await refused(peer, command, ResponseCode.SYSTEM_ERROR)


@pytest.mark.parametrize("named", ["Other+U1", "+U1", "T +U1", "t+U1", "%RETRY%T+U1"])
@pytest.mark.parametrize("before", ["", "REAL_TOPIC\x01Other\x02"])
async def test_a_mark_that_names_a_message_of_another_topic_is_refused(
    broker: UnboundBroker, peer: Peer, named: str, before: str
) -> None:
    """A mark deletes messages of the topic to which it is sent, which is the one for which its sender has a
    permission."""
    text = f"{before}TIMER_DELIVER_MS\x01{LATER_MS}\x02TIMER_DEL_UNIQKEY\x01"
    assert "of another topic" in await refused(peer, send("T", properties=text + named), ResponseCode.MESSAGE_ILLEGAL)
    for own in ("T+U1", "T+U+1", "U1"):
        message = await sent(broker, peer, send("T", properties=text + own))
        assert (message.topic, message.get_property("REAL_TOPIC")) == (TIMER_TOPIC, "T")


async def test_a_mark_that_deletes_a_message_needs_a_time_to_come(broker: UnboundBroker, peer: Peer) -> None:
    """A mark that deletes a message needs a time in the future: RocketMQ's clients may cancel a message by another one
    that says so and goes into the same slot."""
    mark = "TIMER_DEL_UNIQKEY\x01T+U1"
    for _ in range(2):
        message = await sent(broker, peer, send("T", properties=f"{mark}\x02TIMER_DELIVER_MS\x01{LATER_MS}"))
        assert message.topic == TIMER_TOPIC
        assert message.get_property("TIMER_DEL_UNIQKEY") == "T+U1"
        # It names no record that it deletes, and its unit has no time: it has to be read, as in RocketMQ.
        assert message.prepared_transaction_offset == 0
        assert broker.timers.queue.unit(message.queue_offset) == (message.physical_offset, message.size, 0)
    command = send("T", properties=f"{mark}\x02TIMER_DELIVER_MS\x01{NOW_MS}")
    assert "if set del msg" in await refused(peer, command, ResponseCode.MESSAGE_ILLEGAL)


@pytest.mark.parametrize(("text", "sys_flag"), [("TRAN_MSG\x01true\x02", 0), ("", 4)])
async def test_half_messages_are_refused_whatever_time_they_ask_for(
    peer: Peer, known: UnboundBroker, text: str, sys_flag: int
) -> None:
    command = send("T", properties=f"{text}TIMER_DELIVER_MS\x01{LATER_MS}", sys_flag=sys_flag)
    await refused(peer, command, ResponseCode.NO_PERMISSION)


@pytest.mark.parametrize("text", [f"TIMER_DELIVER_MS\x01{LATER_MS}", "TIMER_DELAY_SEC\x011", "TIMER_DELAY_MS\x010"])
async def test_batches_with_a_time_are_refused(broker: UnboundBroker, peer: Peer, text: str) -> None:
    plain, timed = batch.encode([(0, b"x", "A\x01a")]), batch.encode([(0, b"x", "A\x01a"), (0, b"y", text)])
    for body, properties in ((plain, text), (timed, None)):
        command = send("T", body, properties=properties, code=RequestCode.SEND_BATCH_MESSAGE, batch=True)
        await refused(peer, command, ResponseCode.MESSAGE_ILLEGAL)
    assert broker.timers.queue.next_offset == 0
    assert broker.store.queue("T", 0) is None


async def test_the_timers_own_topic_takes_nothing_from_clients(broker: UnboundBroker, peer: Peer) -> None:
    for text in (None, f"TIMER_DELIVER_MS\x01{LATER_MS}", "DELAY\x011"):
        await refused(peer, send(TIMER_TOPIC, properties=text), ResponseCode.NO_PERMISSION)
    assert TIMER_TOPIC in broker.topics.own_names()


async def test_what_is_too_large_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path, "maxMessageSize=1000") as broker:
        peer = broker.connect()
        text = f"TIMER_DELIVER_MS\x01{LATER_MS}"
        room = MAX_BYTES - len(f"\x02A\x01\x02{ADDED_TEXT}") - len(text)
        room -= len(f"\x02TIMER_OUT_MS\x01{NOW_MS}\x02REAL_TOPIC\x01T\x02REAL_QID\x010") + AGAIN_ROOM
        largest = f"{text}\x02A\x01{'x' * room}"
        for _ in range(2):
            assert (await peer.ask(send("T", bytes(1000), properties=largest))).code == ResponseCode.SUCCESS
        await refused(peer, send("T", bytes(1001), properties=text), ResponseCode.MESSAGE_ILLEGAL)
        await refused(peer, send("T", properties=f"{largest}x"), ResponseCode.MESSAGE_ILLEGAL)
        await refused(peer, send("T", properties=f"{text}\x02A\x01\0"), ResponseCode.MESSAGE_ILLEGAL)
        assert broker.timers.queue.next_offset == 2


@pytest.mark.parametrize("wish", [f"TIMER_DELIVER_MS\x01{LATER_MS}", "DELAY\x012"])
async def test_the_largest_that_waits_can_be_appended_once_more(known: UnboundBroker, peer: Peer, wish: str) -> None:
    """The largest waiting message can be appended once more, or no file would expire as long as it waits."""
    size = MAX_BYTES
    while True:
        answer = await peer.ask(send("T", properties=f"{wish}\x02A\x01{'x' * size}"))
        if answer.code == ResponseCode.SUCCESS:
            break
        size -= 1
    assert size > MAX_BYTES - 300
    kept, limit = 0, known.store.log.end
    now = Moment(NOW_MS, 1.0)
    known.timers.step(now, Unlimited())
    while (was_needed := known.timers.keep_next(limit, now)) is not None:
        kept += was_needed
    assert kept == 1


@pytest.mark.parametrize("wish", [f"TIMER_DELIVER_MS\x01{LATER_MS}", "DELAY\x012"])
async def test_what_was_taken_stays_though_less_is_taken_now(known: UnboundBroker, peer: Peer, wish: str) -> None:
    """A waiting message larger than a lowered maxMessageSize is kept, since the setting is for new messages: otherwise
    no file before it could expire, and no consumer could send it back."""
    assert (await peer.ask(send("T", bytes(5000), properties=wish))).code == ResponseCode.SUCCESS
    known.store.appender.max_body_size.value = 1000
    limit, now = known.store.log.end, Moment(NOW_MS, 1.0)
    known.timers.step(now, Unlimited())
    assert known.timers.keep_next(limit, now)


async def test_a_full_store_takes_nothing_and_a_refused_send_leaves_nothing(known: UnboundBroker, peer: Peer) -> None:
    known.store.health.fill("the disk is 95% full")
    command = send("T", properties=f"TIMER_DELIVER_MS\x01{LATER_MS}")
    assert (await peer.ask(command)).code == ResponseCode.SERVICE_NOT_AVAILABLE
    known.store.health.has_room()
    assert known.timers.queue.next_offset == 0


async def test_a_refusal_at_a_new_topic_does_not_stop_the_clock_of_what_follows(
    known: UnboundBroker, peer: Peer
) -> None:
    """A refusal at a new topic does not stop the clock for later sends: the refused send is handled again outside of a
    read, and must leave no batch open."""
    assert (await peer.ask(send("New", properties="TIMER_DELAY_SEC\x0199999999"))).code == ResponseCode.MESSAGE_ILLEGAL
    known.clock.advance(DAY_MS)
    assert (await sent(known, peer, send("T"))).store_timestamp == NOW_MS + DAY_MS


# --- retries


@pytest.fixture
async def delivered(known: UnboundBroker, peer: Peer) -> StoredMessage:
    """A message as the timers deliver it, with all properties that they add."""
    await peer.ask(send("Other"))
    text = "TIMER_DELAY_SEC\x015\x02TIMER_OUT_MS\x011\x02TIMER_ENQUEUE_MS\x012\x02TIMER_DEQUEUE_MS\x013"
    appender = known.store.appender
    appender.begin(NOW_MS)
    appender.add(
        known.store.ensure_queue("T", 1),
        b"body",
        f"{text}\x02TIMER_ROLL_TIMES\x011\x02TAGS\x01tagA\x02REAL_TOPIC\x01T\x02REAL_QID\x011".encode(),
        0,
        NOW_MS,
        bytes(8),
    )
    appender.commit()
    return last(known)


@pytest.mark.parametrize("level", [0, 5, -1])
async def test_a_message_sent_back_has_nothing_of_its_timer(
    known: UnboundBroker, peer: Peer, delivered: StoredMessage, level: int
) -> None:
    assert (await peer.ask(back(delivered.physical_offset, level))).code == 0
    message = last(known)
    assert message.topic == ("%DLQ%g" if level < 0 else SCHEDULE_TOPIC)
    assert not [name for name in message.properties if name.startswith("TIMER_")]
    assert message.get_property("TAGS") == "tagA"


@pytest.mark.parametrize(
    ("delay", "times", "topic"),
    [("\x02DELAY\x014", 3, SCHEDULE_TOPIC), ("\x02DELAY\x014", 16, "%DLQ%g"), ("", 16, "%DLQ%g"), ("", 3, "%RETRY%g")],
)
async def test_a_clients_own_retry_has_nothing_of_its_timer(
    broker: UnboundBroker, peer: Peer, delay: str, times: int, topic: str, staged: list[Any]
) -> None:
    text = f"RETRY_TOPIC\x01T\x02TIMER_DELAY_SEC\x0160\x02TIMER_OUT_MS\x011\x02TIMER_DEL_UNIQKEY\x01x{delay}"
    for _ in range(2):
        assert (await peer.ask(send("%RETRY%g", properties=text, reconsume_times=times))).code == 0
        assert last(broker).topic == topic
        assert not [name for name in last(broker).properties if name.startswith("TIMER_")]
    assert staged == []


# --- durable


async def test_with_sync_flush_the_answer_waits_for_the_disk(tmp_path: Path) -> None:
    async with running(tmp_path, "flushDiskType=SYNC_FLUSH") as broker:
        peer = broker.connect()
        await peer.ask(send("T"))
        command = send("T", properties=f"TIMER_DELIVER_MS\x01{LATER_MS}\x02{KEY}")
        peer.post(command)
        assert peer.answer_of(command) is None
        while peer.answer_of(command) is None:
            await asyncio.sleep(0)
        answer = peer.answer_of(command)
        assert answer is not None
        assert "recallHandle" in answer.ext
        assert broker.store.log.flushed == broker.store.log.end


async def test_a_write_that_fails_is_answered_and_leaves_nothing(
    known: UnboundBroker, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    command: Command = send("T", properties=f"TIMER_DELIVER_MS\x01{LATER_MS}\x02{KEY}")
    monkeypatch.setattr(known.store.log, "write", fail)
    answer = await peer.ask(command)
    assert (answer.code, "recallHandle" in answer.ext) == (ResponseCode.SERVICE_NOT_AVAILABLE, False)
    monkeypatch.undo()
    again = request(command.code, None, bytes(command.body))
    again.ext = command.ext
    assert header_of(await peer.ask(again)).queue_offset == 0
