"""Recurring messages over the wire, each with a broker and its store."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest

from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames import fastjson
from duemq.protocol.frames.command import Command
from duemq.protocol.records import batch, properties, record
from duemq.protocol.records.record import StoredMessage
from duemq.protocol.records.recurrence import FLAG_RECURS
from duemq.protocol.requests.headers import ChangePending, ChangeRecurring, ListPending, TopicName
from duemq.scheduler.timers.policy.policies import TimerPolicy
from duemq.scheduler.timers.seconds.slots import Slots
from duemq.scheduler.timers.service import Timers
from duemq.storage.clock import ManualClock, look
from duemq.storage.durability.jobs import Lane
from duemq.storage.errors import StoreFull
from duemq.storage.log.copies import origin_of
from tests.support.broker import Peer, UnboundBroker, running
from tests.support.loop import SteppedLoop, turns
from tests.support.wire import pull, request, send
from tests.unit.broker.produce.test_replace import instead
from tests.unit.broker.produce.test_retry import last
from tests.unit.broker.produce.test_send import NOW_MS
from tests.unit.broker.tables.test_topics import create
from tests.unit.broker.waiting.test_pending import pass_time
from tests.unit.broker.waiting.test_timers import fails


def every(text: str, name: str = "n", number: int = 1) -> str:
    return f"UNIQ_KEY\x01U{number}\x02KEYS\x01{name}\x02TIMER_EVERY\x01{text}"


def cron(text: str, name: str = "n", more: str = "") -> str:
    return f"UNIQ_KEY\x01U1\x02KEYS\x01{name}\x02TIMER_CRON\x01{text}{more}"


def change(action: str, name: str = "n", topic: str = "T") -> Command:
    return request(RequestCode.CHANGE_RECURRING, ChangeRecurring(topic, name, action))


async def changed(peer: Peer, action: str, name: str = "n") -> dict[str, Any]:
    answer = await peer.ask(change(action, name))
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    found: dict[str, Any] = fastjson.loads(bytes(answer.body))
    return found


async def listed(peer: Peer, **fields: Any) -> list[dict[str, Any]]:
    answer = await peer.ask(request(RequestCode.LIST_PENDING, ListPending(recurring=True, **fields)))
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    found: list[dict[str, Any]] = fastjson.loads(bytes(answer.body))["messages"]
    return found


async def delivered(peer: Peer, topic: str = "T") -> list[StoredMessage]:
    return record.decode_all(bytes((await peer.ask(pull(topic, count=32))).body))


async def times(peer: Peer, topic: str = "T") -> list[float]:
    """Return the seconds after NOW_MS at which the messages of a topic were delivered."""
    return [(message.store_timestamp - NOW_MS) / 1000 for message in await delivered(peer, topic)]


@pytest.fixture
async def known(broker: UnboundBroker, peer: Peer) -> UnboundBroker:
    """A broker with a topic without messages."""
    await peer.ask(create("T", 1))
    return broker


async def begin(peer: Peer, text: str, body: bytes = b"tick", topic: str = "T") -> Command:
    answer = await peer.ask(send(topic, body, properties=text))
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return answer


async def seconds_pass(broker: UnboundBroker, loop: SteppedLoop, seconds: int, step: float = 1.0) -> None:
    for _ in range(round(seconds / step)):
        await pass_time(broker, loop, step)


async def test_a_message_comes_again_and_again(known: UnboundBroker, peer: Peer, loop: SteppedLoop) -> None:
    await begin(peer, every("90s"))
    await seconds_pass(known, loop, 300, 30)
    found = await delivered(known.connect())
    assert [(message.store_timestamp - NOW_MS) / 1000 for message in found] == [90, 180, 270]
    assert {message.body for message in found} == {b"tick"}
    keys = [message.get_property(properties.UNIQ_KEY) for message in found]
    assert keys[0] == "U1"
    assert len(set(keys)) == 3
    assert {message.sys_flag & FLAG_RECURS for message in found} == {0}
    assert [message.get_property("TIMER_DELIVER_MS") for message in found] == [
        str(NOW_MS + seconds * 1000) for seconds in (90, 180, 270)
    ]
    assert len({origin_of(message.prepared_transaction_offset) for message in found}) == 3


async def test_cron_follows_its_zone(known: UnboundBroker, peer: Peer, loop: SteppedLoop) -> None:
    # NOW_MS is 2023-11-14 22:13:20 UTC, a Tuesday; 07:13:20 in Tokyo.
    await begin(peer, cron("30 7 * * *", more="\x02TIMER_ZONE\x01Asia/Tokyo"))
    (found,) = await listed(peer)
    assert found["deliverMs"] == NOW_MS + (16 * 60 + 40) * 1000
    assert found["recurrence"] == {"cron": "30 7 * * *", "zone": "Asia/Tokyo"}
    await seconds_pass(known, loop, 90_000, 1000)
    assert len(await delivered(known.connect())) == 2


async def test_it_ends_with_its_count_or_its_end(known: UnboundBroker, peer: Peer, loop: SteppedLoop) -> None:
    await begin(peer, every("10s", "count") + "\x02TIMER_COUNT\x013", b"count")
    await begin(peer, every("10s", "end") + f"\x02TIMER_END\x01{NOW_MS + 20_000}", b"end")
    await begin(peer, every("10s", "start") + f"\x02TIMER_START\x01{NOW_MS + 35_000}\x02TIMER_COUNT\x011", b"start")
    await seconds_pass(known, loop, 100)
    found = [(message.body, (message.store_timestamp - NOW_MS) // 1000) for message in await delivered(peer)]
    assert sorted(found) == [(b"count", 10), (b"count", 20), (b"count", 30), (b"end", 10), (b"end", 20), (b"start", 35)]
    assert await listed(peer) == []


async def test_a_start_in_the_past_keeps_its_beat(known: UnboundBroker, peer: Peer, loop: SteppedLoop) -> None:
    await begin(peer, every("10s") + f"\x02TIMER_START\x01{NOW_MS - 33_000}")
    await seconds_pass(known, loop, 20)
    assert await times(peer) == [7, 17]


async def test_the_next_of_the_name_replaces_it(known: UnboundBroker, peer: Peer, loop: SteppedLoop) -> None:
    await begin(peer, every("10s"), b"old")
    await seconds_pass(known, loop, 25)
    await begin(peer, every("7s", number=2), b"new")
    await begin(peer, every("7s", "other", number=3), b"other")
    await seconds_pass(known, loop, 8)
    assert [message.body for message in await delivered(peer)] == [b"old", b"old", b"new", b"other"]
    # A message that is delivered once ends it as well.
    await begin(peer, instead(f"TIMER_DELIVER_MS\x01{NOW_MS + 35_000}", "n", 4), b"once")
    await seconds_pass(known, loop, 15)
    assert [message.body for message in await delivered(peer)][4:] == [b"once", b"other", b"other"]


async def test_it_is_paused_resumed_and_removed(known: UnboundBroker, peer: Peer, loop: SteppedLoop) -> None:
    await begin(peer, every("10s"))
    await begin(peer, every("100s", "other"))
    await seconds_pass(known, loop, 15)
    assert await changed(peer, "pause") == {"result": "PAUSED", "deliverMs": None}
    assert (await changed(peer, "pause"))["result"] == "UNCHANGED"
    by_name = {each["keys"]: each["recurrence"] for each in await listed(peer)}
    assert by_name["n"] == {"everyMs": 10_000, "zone": "UTC", "startMs": NOW_MS + 10_000, "isPaused": True}
    assert "isPaused" not in by_name["other"]
    await seconds_pass(known, loop, 20)
    assert await times(peer) == [10]
    assert await changed(peer, "resume") == {"result": "RESUMED", "deliverMs": NOW_MS + 40_000}
    assert (await changed(peer, "resume"))["result"] == "UNCHANGED"
    await seconds_pass(known, loop, 20)
    assert await times(peer) == [10, 40, 50]
    assert (await changed(peer, "remove"))["result"] == "REMOVED"
    assert (await changed(peer, "remove"))["result"] == "NOT_FOUND"
    await seconds_pass(known, loop, 60)
    assert await times(peer) == [10, 40, 50, 100]
    assert [each["keys"] for each in await listed(peer)] == ["other"]
    assert "not one of pause" in await fails(peer, change("stop"), ResponseCode.SYSTEM_ERROR)


async def test_a_pause_outlives_a_start_and_the_expiry_of_its_file(tmp_path: Path, loop: SteppedLoop) -> None:
    async with running(tmp_path) as broker:
        peer = broker.connect()
        await peer.ask(send("T", b"first"))
        await begin(peer, every("10s"))
        await changed(peer, "pause")
        while broker.timers.keep_next(broker.store.log.end, look(broker.clock)) is not None:
            pass
    async with running(tmp_path) as broker:
        peer = broker.connect()
        assert [each["recurrence"]["isPaused"] for each in await listed(peer)] == [True]


async def test_only_recurring_messages_are_listed(known: UnboundBroker, peer: Peer) -> None:
    await begin(peer, instead("TIMER_DELAY_SEC\x0160"))
    await begin(peer, "TIMER_DELAY_SEC\x0160")
    await begin(peer, "DELAY\x015")
    await begin(peer, every("10s", "a"))
    assert [each["keys"] for each in await listed(peer)] == ["a"]
    assert [each["keys"] for each in await listed(peer, topic="T")] == ["a"]
    assert await listed(peer, topic="Other") == []
    count = await peer.ask(request(RequestCode.LIST_PENDING, ListPending(recurring=True, count_only=True)))
    assert fastjson.loads(bytes(count.body))["counted"] == 1


async def test_a_delivery_can_be_moved_and_cancelled(known: UnboundBroker, peer: Peer, loop: SteppedLoop) -> None:
    await begin(peer, every("10s"))
    (waiting,) = await listed(peer)
    header = ChangePending("reschedule", deliver_ms=NOW_MS + 13_000, msg_id=waiting["msgId"])
    await peer.ask(request(RequestCode.CHANGE_PENDING, header))
    await seconds_pass(known, loop, 25)
    assert await times(peer) == [13, 20], "the next ones keep the beat"
    await peer.ask(request(RequestCode.CHANGE_PENDING, ChangePending("cancel", topic="T", key="n")))
    await seconds_pass(known, loop, 25)
    assert await times(peer) == [13, 20]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("KEYS\x01n\x02TIMER_EVERY\x01often", "not a duration"),
        ("KEYS\x01n\x02TIMER_EVERY\x01", "exactly one of the properties TIMER_EVERY and TIMER_CRON"),
        ("KEYS\x01n\x02TIMER_EVERY\x01999ms", "not between 1 s and 3660 days"),
        ("KEYS\x01n\x02TIMER_EVERY\x0199999d", "not between 1 s and 3660 days"),
        ("TIMER_EVERY\x011h", "exactly one key in KEYS; it has 0 keys"),
        ("KEYS\x01a b\x02TIMER_EVERY\x011h", "exactly one key in KEYS; it has 2 keys"),
        ("KEYS\x01n\x02TIMER_EVERY\x011h\x02TIMER_CRON\x01* * * * *", "exactly one of the properties"),
        ("KEYS\x01n\x02TIMER_EVERY\x011h\x02TIMER_ZONE\x01UTC", "TIMER_ZONE has no meaning"),
        ("KEYS\x01n\x02TIMER_EVERY\x011h\x02TIMER_DELAY_MS\x01500", "TIMER_START says when it begins"),
        ("KEYS\x01n\x02TIMER_EVERY\x011h\x02DELAY\x013", "TIMER_START says when it begins"),
        ("KEYS\x01n\x02TIMER_EVERY\x011h\x02TIMER_COUNT\x010", "TIMER_COUNT=0 is not above 0"),
        ("KEYS\x01n\x02TIMER_EVERY\x011h\x02TIMER_COUNT\x01-1", "TIMER_COUNT=-1 is not a number"),
        ("KEYS\x01n\x02TIMER_EVERY\x011h\x02TIMER_START\x01soon", "TIMER_START=soon is not a number"),
        (f"KEYS\x01n\x02TIMER_EVERY\x011h\x02TIMER_END\x01{NOW_MS + 1}", "would never be delivered"),
        ("KEYS\x01n\x02TIMER_EVERY\x013000d", "the max delay"),
        ("KEYS\x01n\x02TIMER_CRON\x01every day", "does not have five or six fields"),
        ("KEYS\x01n\x02TIMER_CRON\x0161 * * * *", "is not a cron expression: Bad minute"),
        ("KEYS\x01n\x02TIMER_CRON\x010 0 30 2 *", "is not a cron expression: Bad day-of-month"),
        (
            "KEYS\x01n\x02TIMER_CRON\x01* * * * *\x02TIMER_ZONE\x01Mars/Olympus",
            "not a time zone that this broker knows",
        ),
        ("KEYS\x01n\x02TIMER_CRON\x01* * * * *\x02TIMER_ZONE\x01../../etc/passwd", "not a time zone that this broker"),
        *(
            (f"KEYS\x01n\x02TIMER_CRON\x01* * * * *\x02TIMER_ZONE\x01{zone}", "something else on each machine")
            for zone in ("localtime", "posixrules", "Factory", "right/Europe/Paris", "posix/UTC")
        ),
        ("KEYS\x01n\x02TIMER_CRON\x01* * * * *\x02TIMER_ZONE\x01" + "x" * 65, "has 65 characters, 64 at most"),
        ("KEYS\x01n\x02TIMER_CRON\x01" + "1," * 200 + "1 * * * *", "has 409 characters, 256 at most"),
        ("KEYS\x01n\x02TIMER_EVERY\x011h\x02TIMER_DEL_UNIQKEY\x01U", "TIMER_DEL_UNIQKEY"),
    ],
)
async def test_what_makes_no_sense_is_refused(known: UnboundBroker, peer: Peer, text: str, why: str) -> None:
    assert why in await fails(peer, send("T", properties=text), ResponseCode.MESSAGE_ILLEGAL)
    assert known.timers.state(known.clock.now_ms()).pending == 0


async def test_a_batch_has_none(known: UnboundBroker, peer: Peer) -> None:
    command = send("T", b"", properties=every("10s"), code=RequestCode.SEND_BATCH_MESSAGE, batch=True)
    await fails(peer, command, ResponseCode.MESSAGE_ILLEGAL)


async def test_a_client_may_send_on_what_it_received(known: UnboundBroker, peer: Peer, loop: SteppedLoop) -> None:
    await begin(peer, every("100s"))
    await seconds_pass(known, loop, 100, 10)
    (message,) = await delivered(peer)
    await begin(peer, message.properties_text, b"sent on")
    await seconds_pass(known, loop, 100, 10)
    assert [message.body for message in await delivered(peer)] == [b"tick", b"sent on", b"tick"]
    sent_on = (await delivered(peer))[1]
    assert not {*properties.RECURRENCE, properties.TIMER_REPLACE} & sent_on.properties.keys()


async def test_a_client_cannot_set_the_flag(known: UnboundBroker, peer: Peer, loop: SteppedLoop) -> None:
    for text in ("TIMER_DELAY_MS\x015000", "", "DELAY\x011"):
        await peer.ask(send("T", b"x", properties=text, sys_flag=FLAG_RECURS))
        assert last(known).sys_flag == 0
    await seconds_pass(known, loop, 20)
    assert len(await delivered(peer)) == 3


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (None, [10, *[100.0] * 9, 110]),
        (TimerPolicy(newest=True), [10, 103, 110]),
        (TimerPolicy(drop_after_ms=30_000), [10, 100, 100, 100, 100, 110]),
    ],
)
async def test_what_was_missed_counts_as_the_policy_says(
    tmp_path: Path, loop: SteppedLoop, policy: TimerPolicy | None, expected: list[float]
) -> None:
    async with running(tmp_path) as broker:
        peer = broker.connect()
        await peer.ask(create("T", 1))
        await begin(peer, every("10s"))
        await seconds_pass(broker, loop, 11)
        broker.timers.set_policy("T", policy)
        broker.clock.advance(89_000)
        loop.advance(89)
        for _ in range(50):
            await turns(10)
        await seconds_pass(broker, loop, 19)
        assert await times(peer) == expected


async def test_a_delivery_that_fails_is_repeated_as_a_whole(
    known: UnboundBroker, peer: Peer, loop: SteppedLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    await begin(peer, every("10s"))
    add, failures = known.store.appender.add, [StoreFull("no room")] * 2

    def fail(*args: Any, **more: Any) -> int:
        if failures:
            raise failures.pop()
        return add(*args, **more)

    monkeypatch.setattr(known.store.appender, "add", fail)
    await seconds_pass(known, loop, 25)
    assert failures == []
    found = await delivered(peer)
    assert [message.get_property("TIMER_DELIVER_MS") for message in found] == [
        str(NOW_MS + 10_000),
        str(NOW_MS + 20_000),
    ]


async def test_starts_find_each_of_them_once(tmp_path: Path, loop: SteppedLoop) -> None:
    seen: list[int] = []
    clock = ManualClock(NOW_MS)
    for start in range(4):
        async with running(tmp_path, clock=clock) as broker:
            peer = broker.connect()
            if not start:
                await peer.ask(create("T", 1))
                for number in range(100):
                    await begin(peer, every("10s", f"n{number}", number))
            await seconds_pass(broker, loop, 10)
            answer = await peer.ask(pull("T", count=32))
            assert answer.code == ResponseCode.SUCCESS
            seen.append(int(answer.ext["maxOffset"]))
    assert seen == [100 * (start + 1) for start in range(4)]


# --- power cuts, full disks, and what clients can make up


def copy_of(root: Path, other: Path, cut: int = 0) -> Path:
    """Copy the files of a store as a kill leaves them; `cut`: number of last records of the commitlog that a power cut
    took away."""
    shutil.copytree(root, other, ignore=shutil.ignore_patterns("*.tmp", "lock"))
    file = other / "commitlog" / ("0" * 20)
    data = file.read_bytes()
    starts = []
    at = 0
    while (size := int.from_bytes(data[at : at + 4], "big")) and data[at + 4 : at + 8] == b"\xda\xa3\x20\xa7":
        starts.append(at)
        at += size
    if cut:
        file.write_bytes(data[: starts[-cut]].ljust(len(data), b"\0"))
    return other


@pytest.mark.parametrize("text", ["UNIQ_KEY\x01U", "OTHER\x01x"], ids=["the same key", "no key"])
async def test_messages_with_the_same_id_go_on_after_a_power_cut(tmp_path: Path, loop: SteppedLoop, text: str) -> None:
    clock = ManualClock(NOW_MS)
    async with running(tmp_path / "a", clock=clock) as broker:
        peer = broker.connect()
        await peer.ask(create("T", 1))
        for name in "ab":
            await begin(peer, f"{text}\x02KEYS\x01{name}\x02TIMER_EVERY\x0110s")
        broker.lanes.hold(Lane.FILES)  # no checkpoint covers what the power cut takes away
        await seconds_pass(broker, loop, 10)
        root = copy_of(tmp_path / "a", tmp_path / "b", cut=1)
    async with running(root, clock=clock) as broker:
        peer = broker.connect()
        await seconds_pass(broker, loop, 20)
        assert sorted(each["keys"] for each in await listed(peer)) == ["a", "b"]
        found = await delivered(peer)
        assert sorted(message.get_property("KEYS") or "" for message in found) == ["a"] * 3 + ["b"] * 3
        keys = [message.get_property(properties.UNIQ_KEY) for message in found[2:]]
        assert len(set(keys)) == 4


@pytest.mark.parametrize("ends", ["stop", "kill"])
async def test_a_start_on_a_full_disk_remembers_what_a_power_cut_left_out(
    tmp_path: Path, loop: SteppedLoop, ends: str
) -> None:
    clock = ManualClock(NOW_MS)
    async with running(tmp_path / "a", clock=clock) as broker:
        peer = broker.connect()
        await peer.ask(create("T", 1))
        await begin(peer, every("10s"))
        broker.lanes.hold(Lane.FILES)  # no checkpoint covers what the power cut takes away
        await seconds_pass(broker, loop, 10)
        root = copy_of(tmp_path / "a", tmp_path / "b", cut=1)
    async with running(root, "diskSpaceWarningLevelRatio=0", clock=clock) as broker:
        peer = broker.connect()
        await seconds_pass(broker, loop, 5)
        assert await listed(peer) == []
        if ends == "kill":
            root = copy_of(root, tmp_path / "c")
    for _ in range(2):  # the second start finds it in the files
        async with running(root, clock=clock) as broker:
            peer = broker.connect()
            await seconds_pass(broker, loop, 5)
            assert [each["keys"] for each in await listed(peer)] == ["n"]


async def test_a_message_of_a_batch_never_recurs(tmp_path: Path, loop: SteppedLoop) -> None:
    """Whatever a client puts into a message: only a record that the broker made so recurs, also after a kill."""
    clock = ManualClock(NOW_MS)
    forged = "UNIQ_KEY\x01E\x02KEYS\x01e\x02TIMER_EVERY\x0110s\x02TIMER_OUT_MS\x011"
    forged += "\x02REAL_TOPIC\x01SECRET\x02REAL_QID\x010"
    async with running(tmp_path / "a", clock=clock) as broker:
        peer = broker.connect()
        for topic in ("T", "OUT", "SECRET"):
            await peer.ask(create(topic, 1))
        await begin(peer, every("10s"))
        await seconds_pass(broker, loop, 11)
        for whole, part in (("", forged), (forged, "")):
            body = batch.encode([(0, b"forged", part)])
            command = send("OUT", body, properties=whole, code=RequestCode.SEND_BATCH_MESSAGE, batch=True)
            assert (await peer.ask(command)).code == ResponseCode.SUCCESS
            assert "TIMER_EVERY" not in last(broker).properties_text
        root = copy_of(tmp_path / "a", tmp_path / "b")
    async with running(root, clock=clock) as broker:
        await seconds_pass(broker, loop, 30)
        peer = broker.connect()
        assert await delivered(peer, "SECRET") == []
        assert [each["keys"] for each in await listed(peer)] == ["n"]


async def test_a_drop_that_fails_half_way_is_not_followed_twice(
    tmp_path: Path, loop: SteppedLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, failures = ManualClock(NOW_MS), [OSError(errno.ENOSPC, "No space left on device")]
    real_put, real_cancel = Slots.put, Timers._cancel
    is_cancelled: list[bool] = []

    def put(self: Slots, *args: Any, **more: Any) -> None:
        if is_cancelled and failures:
            raise failures.pop()
        real_put(self, *args, **more)

    def cancel(self: Timers, waits: Any, now_ms: int) -> None:
        real_cancel(self, waits, now_ms)
        is_cancelled.extend([True] * len(waits))

    async with running(tmp_path / "a", clock=clock) as broker:
        peer = broker.connect()
        await peer.ask(create("T", 1))
        await begin(peer, every("1000s") + f"\x02TIMER_START\x01{NOW_MS + 10_100}")
        for number in range(5):
            await begin(peer, f"UNIQ_KEY\x01p{number}\x02TIMER_DELIVER_MS\x01{NOW_MS + 10_900}", b"plain")
        await seconds_pass(broker, loop, 5)
        broker.timers.set_policy("T", TimerPolicy(drop_after_ms=31_000, rate=1))
        monkeypatch.setattr(Slots, "put", put)
        monkeypatch.setattr(Timers, "_cancel", cancel)
        await pass_time(broker, loop, 36.5)
        await seconds_pass(broker, loop, 10)
        assert failures == []
        assert len(await listed(peer)) == 1
        root = copy_of(tmp_path / "a", tmp_path / "b")
    async with running(root, clock=clock) as broker:
        peer = broker.connect()
        await seconds_pass(broker, loop, 2)
        assert len(await listed(peer)) == 1


@pytest.mark.parametrize("is_stopped", [False, True], ids=["killed", "stopped"])
async def test_a_drop_that_is_half_done_at_the_end_is_not_undone(
    tmp_path: Path, loop: SteppedLoop, monkeypatch: pytest.MonkeyPatch, *, is_stopped: bool
) -> None:
    """The broker ends while the rest of the split cannot be written, and after a checkpoint that covers the drop."""
    clock, is_full = ManualClock(NOW_MS), False
    real_put = Slots.put

    def put(self: Slots, waits: Any, *args: Any, **more: Any) -> None:
        if is_full and len(waits):
            raise OSError(errno.ENOSPC, "No space left on device")
        real_put(self, waits, *args, **more)

    monkeypatch.setattr(Slots, "put", put)
    async with running(tmp_path / "a", clock=clock) as broker:
        peer = broker.connect()
        await peer.ask(create("T", 1))
        broker.timers.set_policy("T", TimerPolicy(is_paused=True))
        await begin(peer, every("1000s") + f"\x02TIMER_START\x01{NOW_MS + 10_100}")
        for number in range(5):
            await begin(peer, f"UNIQ_KEY\x01p{number}\x02TIMER_DELIVER_MS\x01{NOW_MS + 30_900}", b"plain")
        await seconds_pass(broker, loop, 45)
        is_full = True
        broker.timers.set_policy("T", TimerPolicy(drop_after_ms=31_000))
        while not broker.timers._cancelled:
            await seconds_pass(broker, loop, 1)
        end = broker.store.log.end
        while (broker.store.checkpoint.recovery_offset or 0) < end:
            await pass_time(broker, loop, 0.1)
            await turns(20)
        assert broker.timers._cancelled, "the rest of the split is still to be written"
        root = tmp_path / "a" if is_stopped else copy_of(tmp_path / "a", tmp_path / "b")
    is_full = False
    async with running(root, clock=clock) as broker:
        peer = broker.connect()
        await seconds_pass(broker, loop, 2)
        (waiting,) = await listed(peer)
        assert waiting["deliverMs"] == NOW_MS + 1_010_100
        await seconds_pass(broker, loop, 60)
        assert {message.body for message in await delivered(peer)} <= {b"plain"}


async def test_a_name_is_not_taken_twice_while_a_record_is_left_out(tmp_path: Path, loop: SteppedLoop) -> None:
    clock = ManualClock(NOW_MS)
    async with running(tmp_path / "a", clock=clock) as broker:
        peer = broker.connect()
        await peer.ask(create("T", 1))
        await begin(peer, every("10s"))
        await begin(peer, every("10s", "other", 2))
        broker.lanes.hold(Lane.FILES)  # no checkpoint covers what the power cut takes away
        await seconds_pass(broker, loop, 10)
        root = copy_of(tmp_path / "a", tmp_path / "b", cut=2)
    async with running(root, "diskSpaceWarningLevelRatio=0", clock=clock) as broker:
        peer = broker.connect()
        await seconds_pass(broker, loop, 5)
        assert (await peer.ask(change("remove", "other"))).code != ResponseCode.SUCCESS, "it cannot be told yet"
        # With its reason: the next checkpoint would find it again.
        broker.durability._no_room.clear()
        broker.store.health.has_room()
        await begin(peer, every("7s", number=9))
        assert (await changed(peer, "remove", "other"))["result"] == "REMOVED"
        await seconds_pass(broker, loop, 1)
        assert [each["recurrence"]["everyMs"] for each in await listed(peer)] == [7000]


async def test_names_of_other_properties_are_not_taken_for_those_of_a_recurrence(
    tmp_path: Path, loop: SteppedLoop, logged: Any
) -> None:
    clock = ManualClock(NOW_MS)
    async with running(tmp_path / "a", clock=clock) as broker:
        peer = broker.connect()
        await peer.ask(create("T", 1))
        await begin(peer, every("10s"))
        for number in range(70):
            await begin(peer, f"UNIQ_KEY\x01p{number}\x02X_TIMER_EVERY\x01no\x02TIMER_DELIVER_MS\x01{NOW_MS + 10_000}")
        broker.lanes.hold(Lane.FILES)  # no checkpoint covers what the power cut takes away
        await seconds_pass(broker, loop, 10)
        root = copy_of(tmp_path / "a", tmp_path / "b", cut=1)
    async with running(root, clock=clock) as broker:
        peer = broker.connect()
        await seconds_pass(broker, loop, 1)
        assert [each["keys"] for each in await listed(peer)] == ["n"]
    assert [line for line in logged if line["event"] == "recurring_message_ended"] == []


async def delete_topic(peer: Peer, topic: str = "T") -> None:
    assert (await peer.ask(request(RequestCode.DELETE_TOPIC_IN_BROKER, TopicName(topic)))).code == ResponseCode.SUCCESS


async def test_it_ends_with_its_topic(known: UnboundBroker, peer: Peer, loop: SteppedLoop, logged: Any) -> None:
    """Or it would be delivered for ever to queues of a topic that nobody can read."""
    await begin(peer, every("10s"))
    await peer.ask(create("U", 1))
    await begin(peer, every("10s"), topic="U")
    await seconds_pass(known, loop, 15)
    await delete_topic(peer)
    await seconds_pass(known, loop, 30)
    assert [(each["topic"], each["keys"]) for each in await listed(peer)] == [("U", "n")]
    (line,) = [line for line in logged if line["event"] == "recurring_message_ended"]
    assert (line["topic"], line["name"]) == ("T", "n")
    assert "deleted" in line["reason"]
    await peer.ask(create("T", 1))
    end = len(await delivered(peer))
    await seconds_pass(known, loop, 30)
    assert len(await delivered(peer)) == end
    assert await times(peer, "U") == [10, 20, 30, 40, 50, 60, 70]


async def test_it_goes_on_where_its_topic_is_made_anew(known: UnboundBroker, peer: Peer, loop: SteppedLoop) -> None:
    await begin(peer, every("10s"))
    await delete_topic(peer)
    await peer.ask(create("T", 1))
    await seconds_pass(known, loop, 20)
    assert await times(peer) == [10, 20]


async def test_it_goes_on_where_the_table_of_topics_was_lost(tmp_path: Path, loop: SteppedLoop) -> None:
    """A topic that is not in the table need not have been deleted then."""
    clock = ManualClock(NOW_MS)
    for lost in (True, False):
        async with running(tmp_path / str(lost), clock=clock) as broker:
            peer = broker.connect()
            await peer.ask(create("T", 1))
            await begin(peer, every("10s"))
            if not lost:
                await delete_topic(peer)
        if lost:
            for path in (tmp_path / str(lost) / "config").glob("topics.json*"):
                path.unlink()
        async with running(tmp_path / str(lost), clock=clock) as broker:
            await seconds_pass(broker, loop, 15)
            assert [each["keys"] for each in await listed(broker.connect())] == (["n"] if lost else [])


async def test_no_delivery_comes_again_if_the_clock_is_set_back_before_a_pause(
    known: UnboundBroker, peer: Peer, loop: SteppedLoop
) -> None:
    await begin(peer, every("10s"))
    await seconds_pass(known, loop, 25)
    known.clock.set_wall(NOW_MS)
    assert (await changed(peer, "pause"))["result"] == "PAUSED"
    assert await changed(peer, "resume") == {"result": "RESUMED", "deliverMs": NOW_MS + 30_000}
