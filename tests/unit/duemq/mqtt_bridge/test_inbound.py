"""Messages from MQTT, with a scripted RocketMQ."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from duemq._values.intervals import Intervals
from duemq.errors import AccessDeniedError, ConnectionLostError, MessageRejectedError, RequestTimeoutError
from duemq.mqtt_bridge.inbound import FromMqtt
from duemq.mqtt_bridge.receipts import Receipts
from duemq.mqtt_bridge.session.client import ServerLimits
from duemq.mqtt_bridge.session.journal import Journal, open_journal
from duemq.mqtt_bridge.session.packets import (
    NO_PROPERTIES,
    PUBACK,
    PUBCOMP,
    PUBREC,
    PUBREL,
    Ack,
    Properties,
    Publish,
)
from duemq.mqtt_bridge.status import Status
from tests.unit.duemq.mqtt_bridge.fakes import FakeProducer, FakeRecaller, FakeSession, rules

RULES = """
[[to_rocketmq]]
filter = "in/#"
topic = "In"
key = "{2}"
qos = 2
"""
INTERVALS = Intervals(first_pause=0.001, longest_pause=0.002)
NOW = 1_800_000_000_000


class Bench:
    """The inbound part of a bridge, and the fakes around it."""

    def __init__(
        self,
        inbound: FromMqtt,
        producer: FakeProducer,
        recaller: FakeRecaller,
        status: Status,
        journal: Journal,
        passed: list[float],
        running: asyncio.Task[None],
    ) -> None:
        self.inbound = inbound
        self.journal = journal
        self.passed = passed
        """Seconds that have passed; their sum is the time."""
        self.running = running
        self.producer = producer
        self.recaller = recaller
        self.status = status
        self.session = FakeSession()
        self.connect(self.session)

    def connect(self, session: FakeSession) -> None:
        self.session = session
        self.inbound.connected(cast("Any", session))
        self.inbound.accepted(is_present=session.is_present)

    async def acks(self, *items: Publish | Ack, count: int | None = None) -> list[tuple[int, int, int]]:
        """Hand these over, and return the acknowledgements as soon as there are `count`, by default one for each."""
        before = len(self.session.sent)
        self.inbound.received(items)
        await self.session.until(before + (len(items) if count is None else count))
        return self.session.acks()[before:]


@asynccontextmanager
async def bench(
    directory: Path,
    text: str = RULES,
    mqtt: str = "",
    producer: FakeProducer | None = None,
    receipts: Receipts | None = None,
    passed: list[float] | None = None,
) -> AsyncIterator[Bench]:
    journal = await open_journal(directory / "state")
    producer = producer or FakeProducer()
    recaller = FakeRecaller(producer)
    passed = passed if passed is not None else []
    found = rules(text, directory, mqtt)
    status = Status(found.status_topic, lambda: NOW)
    inbound = FromMqtt(
        found,
        bridge="b",
        producer=cast("Any", producer),
        recaller=recaller,
        journal=journal,
        receipts=receipts if receipts is not None else Receipts(),
        status=status,
        intervals=INTERVALS,
        clock=lambda: NOW + round(sum(passed) * 1000),
        monotonic=lambda: sum(passed),
    )
    running = [asyncio.create_task(each) for each in (inbound.run(), inbound.save_forever())]
    try:
        yield Bench(inbound, producer, recaller, status, journal, passed, running[0])
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        await journal.close()


def message(
    packet_id: int = 1, payload: bytes = b"x", qos: int = 1, topic: str = "in/a", dup: bool = False, **more: Any
) -> Publish:
    properties = Properties(**more) if more else NO_PROPERTIES
    return Publish(topic, payload, qos, False, dup, packet_id if qos else 0, properties, len(payload))


@pytest.mark.parametrize(("qos", "kind"), [(1, PUBACK), (2, PUBREC)])
async def test_nothing_is_acknowledged_before_rocketmq_has_it(tmp_path: Path, qos: int, kind: int) -> None:
    async with bench(tmp_path) as at:
        at.producer.may_go.clear()
        at.inbound.received([message(7, qos=qos)])
        for _ in range(100):
            await asyncio.sleep(0)
        assert (at.session.sent, at.producer.messages) == ([], [])
        at.producer.may_go.set()
        await at.session.until(1)
        assert at.session.acks() == [(kind, 7, 0)]
        assert at.producer.bodies == [b"x"]


async def test_what_comes_together_is_one_batch_and_acknowledged_in_its_order(tmp_path: Path) -> None:
    async with bench(tmp_path) as at:
        acks = await at.acks(*(message(number, b"%d" % number) for number in range(1, 300)))
        assert acks == [(PUBACK, number, 0) for number in range(1, 300)]
        assert at.producer.calls == ["send_batch"]
        assert at.producer.bodies == [b"%d" % number for number in range(1, 300)]


async def test_a_large_payload_goes_alone(tmp_path: Path) -> None:
    async with bench(tmp_path) as at:
        await at.acks(message(1, b"a"), message(2, b"b" * 5000), message(3, b"c"))
        assert sorted(at.producer.calls) == ["send", "send_batch"]


@pytest.mark.parametrize("qos", [1, 2])
async def test_a_failed_send_is_tried_again(tmp_path: Path, qos: int) -> None:
    producer = FakeProducer(failures=[(ConnectionLostError("a", "gone"), False)] * 3)
    async with bench(tmp_path, producer=producer) as at:
        await at.acks(message(1, qos=qos))
        assert at.producer.bodies == [b"x"]
        assert at.producer.calls.count("stored") == (3 if qos == 2 else 0)


async def test_with_qos_2_the_journal_has_it_on_the_disk_before_the_send_and_before_the_pubcomp(tmp_path: Path) -> None:
    async with bench(tmp_path) as at:
        saved: list[bool] = []
        at.producer.on_send = at.session.on_send = lambda: saved.append(at.journal.is_saved)
        await at.acks(message(1, qos=2))
        assert saved == [True, True]
        await at.acks(Ack(PUBREL, 1))
        assert saved == [True, True, True]


async def test_with_qos_2_a_send_that_was_stored_though_it_failed_is_not_sent_again(tmp_path: Path) -> None:
    producer = FakeProducer(failures=[(RequestTimeoutError("a", "send", 3.0), True)])
    async with bench(tmp_path, producer=producer) as at:
        assert await at.acks(message(1, qos=2)) == [(PUBREC, 1, 0)]
        assert at.producer.bodies == [b"x"]
        assert at.producer.calls == ["send_batch", "stored"]


async def test_with_qos_2_a_delayed_one_is_looked_for_where_it_waits(tmp_path: Path) -> None:
    producer = FakeProducer(failures=[(RequestTimeoutError("a", "send", 3.0), False)])
    async with bench(tmp_path, producer=producer) as at:
        producer.waiting.add("ID1")
        assert await at.acks(message(1, qos=2, topic="delayed/10/a")) == [(PUBREC, 1, 0)]
        assert at.producer.calls == ["send", "stored", "waits"]


async def test_a_message_whose_packet_id_is_known_is_the_same(tmp_path: Path) -> None:
    async with bench(tmp_path) as at:
        assert await at.acks(message(5, qos=2)) == [(PUBREC, 5, 0)]
        at.connect(FakeSession())
        assert await at.acks(message(5, qos=2, dup=True)) == [(PUBREC, 5, 0)]
        assert await at.acks(Ack(PUBREL, 5)) == [(PUBCOMP, 5, 0)]
        assert at.producer.bodies == [b"x"]
        # The id is free: another message, also with the same content.
        assert await at.acks(message(5, qos=2)) == [(PUBREC, 5, 0)]
        assert at.producer.bodies == [b"x", b"x"]


async def test_after_a_kill_a_message_that_was_stored_is_found(tmp_path: Path) -> None:
    producer = FakeProducer()
    async with bench(tmp_path, producer=producer) as at:
        await at.acks(message(5, qos=2), message(6, b"y", qos=2))
    producer.calls.clear()
    del producer.messages[1]  # as if the kill had come before the second was sent
    async with bench(tmp_path, producer=producer) as at:
        again = await at.acks(message(5, qos=2, dup=True), message(6, b"y", qos=2, dup=True))
        assert again == [(PUBREC, 5, 0), (PUBREC, 6, 0)]
        assert producer.bodies == [b"x", b"y"]
        assert producer.calls[0] == "stored"


async def test_after_a_kill_a_delayed_message_that_was_replaced_or_cancelled_is_not_sent_again(tmp_path: Path) -> None:
    """It waits nowhere, and is in no queue."""
    producer = FakeProducer()
    async with bench(tmp_path, producer=producer) as at:
        saved: list[bool] = []
        at.session.on_send = lambda: saved.append(at.journal.is_saved)
        await at.acks(message(5, b"old", 2, "delayed/2;key=k;replace/a"))
        await at.acks(message(6, b"new", 2, "delayed/2;key=k;replace/a"), message(7, b"z", 2, "delayed/2/a"))
        assert saved == [True, True]
    producer.messages.clear()  # as if `new` had been delivered, and the others been cancelled
    async with bench(tmp_path, producer=producer) as at:
        again = await at.acks(
            message(5, b"old", 2, "delayed/2;key=k;replace/a", dup=True),
            message(6, b"new", 2, "delayed/2;key=k;replace/a", dup=True),
            message(7, b"z", 2, "delayed/2/a", dup=True),
        )
        assert again == [(PUBREC, 5, 0), (PUBREC, 6, 0), (PUBREC, 7, 0)]
        assert producer.bodies == []


async def test_with_qos_2_a_recall_is_done_once(tmp_path: Path) -> None:
    """Otherwise it would cancel what came behind it."""
    async with bench(tmp_path) as at:
        await at.acks(message(5, b"", 2, "delayed/recall;key=k/a"), message(6, b"m", 2, "delayed/2;key=k/a"))
        at.connect(FakeSession())
        await at.acks(
            message(5, b"", 2, "delayed/recall;key=k/a", dup=True), message(6, b"m", 2, "delayed/2;key=k/a", dup=True)
        )
        assert at.recaller.cancelled == ["a#k"]
    async with bench(tmp_path, producer=at.producer) as at:
        await at.acks(message(5, b"", 2, "delayed/recall;key=k/a", dup=True))
        await at.acks(Ack(PUBREL, 5))
        assert at.recaller.cancelled == []
        await at.acks(message(5, b"", 2, "delayed/recall;key=k/a"))
        assert at.recaller.cancelled == ["a#k"]


async def test_a_broker_that_lost_its_last_seconds_sends_again_what_was_released(tmp_path: Path) -> None:
    async with bench(tmp_path) as at:
        await at.acks(message(5, qos=2))
        await at.acks(Ack(PUBREL, 5))
    async with bench(tmp_path, producer=at.producer) as at:
        assert await at.acks(message(5, qos=2, dup=True)) == [(PUBREC, 5, 0)]
        assert at.producer.bodies == [b"x"]


async def test_a_packet_id_with_another_content_is_another_message(tmp_path: Path) -> None:
    async with bench(tmp_path) as at:
        await at.acks(message(5, qos=2))
        await at.acks(message(5, b"y", qos=2))
        assert at.producer.bodies == [b"x", b"y"]


@pytest.mark.parametrize(("qos", "kind"), [(1, PUBACK), (2, PUBREC)])
@pytest.mark.parametrize(("protocol", "reason"), [("5", 0x83), ("3.1.1", 0)])
async def test_what_is_refused_has_a_reason_code_with_mqtt_5(
    tmp_path: Path, qos: int, kind: int, protocol: str, reason: int
) -> None:
    producer = FakeProducer(failures=[(MessageRejectedError(13, "too far ahead", "a"), False)])
    async with bench(tmp_path, mqtt=f'protocol = "{protocol}"', producer=producer) as at:
        assert await at.acks(message(1, qos=qos)) == [(kind, 1, reason)]
        assert await at.acks(message(2, qos=qos, topic="delayed/x/a")) == [(kind, 2, reason)]
        assert await at.acks(message(3, qos=qos)) == [(kind, 3, 0)]
        assert at.status.counters.refused == 2


TEMPLATED = RULES.replace('topic = "In"', 'topic = "{1}-{2}"')
DENIED = AccessDeniedError(1, "No default permission for topic:in-a", "a")


@pytest.mark.parametrize(("qos", "kind"), [(1, PUBACK), (2, PUBREC)])
async def test_a_sender_that_chooses_a_forbidden_topic_is_refused(tmp_path: Path, qos: int, kind: int) -> None:
    producer = FakeProducer(failures=[(DENIED, False)])
    async with bench(tmp_path, TEMPLATED, producer=producer) as at:
        assert await at.acks(message(1, qos=qos)) == [(kind, 1, 0x87)]
        assert await at.acks(message(2, qos=qos, topic="in/b")) == [(kind, 2, 0)]
        assert [each["topic"] for each in producer.messages] == ["in-b"]


@pytest.mark.parametrize("qos", [1, 2])
async def test_while_the_account_is_wrong_a_topic_of_the_senders_choice_waits_too(tmp_path: Path, qos: int) -> None:
    wrong = AccessDeniedError(1, "Check signature failed for accessKey=in-a", "a")
    producer = FakeProducer(failures=[(wrong, False)] * 3)
    async with bench(tmp_path, TEMPLATED, producer=producer) as at:
        await at.acks(message(1, qos=qos))
        assert (producer.bodies, at.status.counters.refused) == ([b"x"], 0)


async def test_a_topic_of_the_senders_choice_is_refused_with_access_control_of_rocketmq_5_too(tmp_path: Path) -> None:
    text = "User:bridge has no permission to access Topic:in-a from 127.0.0.1, no matched policies"
    producer = FakeProducer(failures=[(AccessDeniedError(3004, text, "a"), False)])
    async with bench(tmp_path, TEMPLATED, producer=producer) as at:
        assert await at.acks(message(1)) == [(PUBACK, 1, 0x87)]


async def test_it_is_refused_too_where_the_end_of_the_queue_may_not_be_asked(tmp_path: Path) -> None:
    producer = FakeProducer(denied={"in-a": DENIED})
    async with bench(tmp_path, TEMPLATED, producer=producer) as at:
        both = await at.acks(message(1, qos=2), message(2, qos=2, topic="in/b"))
        assert both == [(PUBREC, 1, 0x87), (PUBREC, 2, 0)]
        assert list(at.journal.received) == [2]


@pytest.mark.parametrize("qos", [1, 2])
async def test_a_rule_whose_topic_the_account_may_not_use_waits_until_it_may(tmp_path: Path, qos: int) -> None:
    producer = FakeProducer(failures=[(DENIED, False)] * 3)
    async with bench(tmp_path, producer=producer) as at:
        await at.acks(message(1, qos=qos))
        assert (producer.bodies, at.status.counters.refused) == ([b"x"], 0)


async def test_one_of_a_batch_that_is_refused_does_not_harm_the_others(tmp_path: Path) -> None:
    refusal = MessageRejectedError(13, "too large", "a")
    producer = FakeProducer(failures=[(refusal, False), (refusal, False)])
    async with bench(tmp_path, producer=producer) as at:
        acks = await at.acks(*(message(number, b"%d" % number) for number in (1, 2, 3)))
        assert acks == [(PUBACK, 1, 0x83), (PUBACK, 2, 0), (PUBACK, 3, 0)]
        assert producer.bodies == [b"2", b"3"]


async def test_what_the_bridge_published_itself_and_what_no_rule_wants_is_acknowledged_only(tmp_path: Path) -> None:
    async with bench(tmp_path) as at:
        own = message(1, user=(("duemq-bridge", "b"),))
        others = message(2, user=(("duemq-bridge", "other"),))
        await at.acks(own, others, message(3, topic="elsewhere"), message(4, topic=at.status.topic))
        assert len(at.producer.messages) == 1
        assert (at.status.counters.own, at.status.counters.unmatched) == (2, 1)


async def test_a_topic_that_only_begins_as_the_status_topic_is_none(tmp_path: Path) -> None:
    status = Status("a/b", lambda: NOW)
    assert [status.is_own(topic) for topic in ("a/b", "a/b/c", "a/bc", "a")] == [True, True, False, False]


async def test_a_report_is_short_and_fits_into_the_brokers_packets(tmp_path: Path) -> None:
    """Otherwise one message of a device could have the connection closed, again and again."""
    async with bench(tmp_path) as at:
        at.status.connected(cast("Any", at.session))
        wrong = f"delayed/{'x' * 60_000}/a"
        at.session.limits = ServerLimits(packet_bytes=10_000)
        await at.acks(message(1, topic=wrong), count=2)
        [report] = [each for each in at.session.sent if isinstance(each, Publish) and each.topic.endswith("/refused")]
        assert len(report.payload) < 2000
        at.session.limits = ServerLimits(packet_bytes=100)
        await at.acks(message(2, topic=wrong), count=1)
        assert at.session.acks()[-1] == (PUBACK, 2, 0x83)


async def test_qos_0_beyond_the_bound_is_dropped_and_counted(tmp_path: Path) -> None:
    async with bench(tmp_path, mqtt="receive_maximum = 5") as at:
        at.producer.may_go.clear()
        at.inbound.received([message(number, qos=0) for number in range(15)])
        assert at.status.counters.dropped == 5
        at.inbound.received([message(1)])
        at.producer.may_go.set()
        await at.session.until(1)
        assert len(at.producer.messages) == 11


async def test_a_broker_that_sends_more_than_is_held_is_not_read(tmp_path: Path) -> None:
    async with bench(tmp_path, mqtt='receive_maximum = 5\nprotocol = "3.1.1"') as at:
        at.producer.may_go.clear()
        at.inbound.received([message(1)])
        await asyncio.sleep(0)
        at.inbound.received([message(number) for number in range(2, 30)])
        assert at.session.pauses == ["pause"]
        at.producer.may_go.set()
        await at.session.until(29)
        assert at.session.pauses == ["pause", "resume"]
        assert len(at.producer.messages) == 29


async def test_no_more_bytes_are_held_than_the_rules_allow(tmp_path: Path) -> None:
    async with bench(tmp_path, mqtt="receive_maximum_bytes = 65536") as at:
        at.producer.may_go.clear()
        at.inbound.received([message(1, b"a" * 40_000)])
        await at.producer.has_begun.wait()
        assert at.session.pauses == []
        at.inbound.received([message(2, b"b" * 40_000), message(0, b"c", qos=0), message(3, b"d")])
        assert at.session.pauses == ["pause"]
        assert at.status.counters.dropped == 1
        at.producer.may_go.set()
        await at.session.until(3)
        assert at.session.pauses == ["pause", "resume"]
        # What is done takes no room.
        at.producer.may_go.clear()
        at.inbound.received([message(4, b"e" * 40_000)])
        assert at.session.pauses == ["pause", "resume"]


async def test_one_message_is_taken_though_it_is_larger_than_all_may_be(tmp_path: Path) -> None:
    async with bench(tmp_path, mqtt="receive_maximum_bytes = 65536") as at:
        await at.acks(message(1, b"a" * 100_000), message(2, b"b" * 100_000))
        assert at.session.pauses == ["pause", "resume"]
        assert len(at.producer.messages) == 2


async def test_a_new_connection_begins_with_all_room(tmp_path: Path) -> None:
    async with bench(tmp_path, mqtt="receive_maximum_bytes = 65536") as at:
        at.producer.may_go.clear()
        at.inbound.received([message(1)])
        await at.producer.has_begun.wait()
        at.inbound.received([message(2, b"b" * 70_000)])
        assert at.session.pauses == ["pause"]
        at.connect(FakeSession())
        at.inbound.received([message(2, b"b" * 60_000)])
        assert at.session.pauses == []


async def test_a_lost_connection_gets_no_acknowledgement_and_the_next_one_neither(tmp_path: Path) -> None:
    """The MQTT broker sends messages that were on their way again."""
    async with bench(tmp_path) as at:
        first = at.session
        at.producer.may_go.clear()
        at.inbound.received([message(1)])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        at.inbound.received([message(2)])
        second = FakeSession()
        at.connect(second)
        at.producer.may_go.set()
        at.inbound.received([message(2, dup=True)])
        await second.until(1)
        assert (first.acks(), second.acks()) == ([(PUBACK, 1, 0)], [(PUBACK, 2, 0)])
        assert len(at.producer.messages) == 2


async def test_what_replaces_and_what_cancels_keep_their_order(tmp_path: Path) -> None:
    async with bench(tmp_path) as at:
        await at.acks(
            message(1, topic="delayed/0;key=k;replace/a"),
            message(2, topic="delayed/recall;key=k/a"),
            message(3, topic="delayed/2;key=k;replace/a"),
        )
        assert at.producer.calls == ["send", "send"]
        assert at.recaller.cancelled == ["a#k"]
        assert [each["replace"] for each in at.producer.messages] == [True, True]


def at_time(kind: str, qos: int, number: int, dup: bool = False) -> Publish:
    """A message that is due 3 s after the beginning, its recall, or its replacement."""
    due = f"@{NOW + 3000}" if "at" in kind else "3"
    option = {"recall": "recall;key=k", "plain": f"{due};key=k"}.get(kind, f"{due};key=k;replace")
    return message(number, kind.encode(), qos, f"delayed/{option}/a", dup)


async def while_rocketmq_is_away(at: Bench, batches: list[list[Publish]], seconds: float) -> None:
    """Hand over batches, each after a second, while nothing can be sent; RocketMQ comes back after `seconds` more."""
    at.producer.may_go.clear()
    at.inbound.received(batches[0])
    await at.producer.has_begun.wait()
    for batch in batches[1:]:
        at.passed.append(1)
        at.inbound.received(batch)
    at.passed.append(seconds)
    at.producer.may_go.set()


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize(
    ("kinds", "sent", "cancelled"),
    [
        (["plain", "recall"], [], 1),
        (["plain at", "recall"], [], 1),
        (["replace", "recall"], [], 1),
        (["replace", "replace at"], [b"replace at"], 0),
        (["replace", "replace at", "replace"], [b"replace"], 0),
        (["replace", "replace", "recall", "plain"], [b"plain"], 1),
        (["plain", "replace"], [b"plain", b"replace"], 0),
    ],
)
@pytest.mark.parametrize("is_one_batch", [True, False])
async def test_what_is_cancelled_or_replaced_in_time_is_not_delivered_though_rocketmq_was_away(
    tmp_path: Path, qos: int, kinds: list[str], sent: list[bytes], cancelled: int, is_one_batch: bool
) -> None:
    """Both wait in the bridge, in one batch or one behind the other, until the time of the first has passed."""
    producer = FakeProducer(failures=[(ConnectionLostError("a", "gone"), False)] * 2)
    async with bench(tmp_path, producer=producer) as at:
        messages = [at_time(kind, qos, number) for number, kind in enumerate(kinds, 2)]
        first = [message(1)] if is_one_batch else []
        batches = [first, messages] if is_one_batch else [[message(1), messages[0]], messages[1:]]
        await while_rocketmq_is_away(at, batches, 9)
        acks = await at.acks(message(99), count=2 + len(kinds) * bool(qos))
        assert [number for _, number, _ in acks] == [1, *range(2, 2 + len(kinds) * bool(qos)), 99]
        assert [body for body in producer.bodies if body != b"x"] == sent
        assert at.status.counters.superseded == len(kinds) - len(sent) - kinds.count("recall")
        assert at.status.counters.recalled == cancelled + kinds.count("recall")  # the fake cancels one each time


@pytest.mark.parametrize(("topic", "retries"), [("delayed/3;key=k/a", 0), ("delayed/3/a", None)])
async def test_the_producer_does_not_insist_on_what_may_be_superseded(
    tmp_path: Path, topic: str, retries: int | None
) -> None:
    async with bench(tmp_path) as at:
        await at.acks(message(1, topic=topic))
        assert [each["retries"] for each in at.producer.messages] == [retries]


async def test_a_recall_or_replacement_that_comes_after_the_time_is_too_late(tmp_path: Path) -> None:
    async with bench(tmp_path) as at:
        await while_rocketmq_is_away(
            at, [[message(1)], [at_time("replace", 1, 2)], [], [], [at_time("recall", 1, 3)]], 9
        )
        await at.session.until(3)
        assert producer_bodies(at) == [b"replace"]


def producer_bodies(at: Bench) -> list[bytes]:
    return [body for body in at.producer.bodies if body != b"x"]


@pytest.mark.parametrize("kind", ["recall", "replace at"])
async def test_one_that_comes_after_the_time_does_not_overtake_the_delivery(tmp_path: Path, kind: str) -> None:
    """A message that is overdue when it is sent waits in RocketMQ for a moment, if it is a replacement itself."""
    async with bench(tmp_path) as at:
        at.producer.waiting.add("id")
        batches = [[message(1)], [at_time("replace", 1, 2)], [], [], [at_time(kind, 1, 3)]]
        await while_rocketmq_is_away(at, batches, 9)
        async with asyncio.timeout(10):
            while at.producer.calls.count("waits") < 3:
                await asyncio.sleep(0)
        assert (producer_bodies(at), at.recaller.cancelled) == ([b"replace"], [])
        at.producer.waiting.clear()
        await at.session.until(3)
        assert (producer_bodies(at)[1:], at.recaller.cancelled) == (
            ([], ["a#k"]) if kind == "recall" else ([b"replace at"], [])
        )


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_if_the_replacement_is_refused_the_message_is_sent(tmp_path: Path, qos: int) -> None:
    refusal = MessageRejectedError(13, "too far ahead", "a")
    producer = FakeProducer(failures=[(ConnectionLostError("a", "gone"), True), (refusal, False)])
    async with bench(tmp_path, producer=producer) as at:
        messages = [at_time("replace", qos, number) for number in (2, 3)]
        await while_rocketmq_is_away(at, [[message(1, qos=2)], messages], 9)
        acks = await at.acks(message(99), count=2 + 2 * bool(qos))
        assert [number for _, number, reason in acks if reason] == [3] * bool(qos)
        assert (producer_bodies(at), at.status.counters.superseded) == ([b"replace"], 0)


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("order", [["plain", "recall"], ["replace", "replace"], ["recall", "plain"]])
async def test_what_is_sent_again_over_a_new_connection_keeps_its_order(
    tmp_path: Path, qos: int, order: list[str]
) -> None:
    """The messages in hand are there twice: a recall of before must not cancel what came behind it."""
    producer = FakeProducer(failures=[(ConnectionLostError("a", "gone"), False)] * 2)
    async with bench(tmp_path, producer=producer) as at:
        producer.may_go.clear()
        at.inbound.received([message(1), *(at_time(kind, qos, number) for number, kind in enumerate(order, 2))])
        await producer.has_begun.wait()
        at.passed.append(9)
        at.connect(FakeSession())
        at.inbound.received(
            [message(1, dup=True), *(at_time(kind, qos, number, dup=True) for number, kind in enumerate(order, 2))]
        )
        producer.may_go.set()
        await at.session.until(3)
        last = order[-1].encode()
        expected = [] if last == b"recall" else [last] * (2 if qos == 1 else 1)
        assert producer_bodies(at) == expected


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("is_kept", [True, False])
async def test_a_recall_of_a_lost_connection_counts(tmp_path: Path, qos: int, is_kept: bool) -> None:
    """RocketMQ comes back before the MQTT broker, with which the recall is."""
    producer = FakeProducer(failures=[(ConnectionLostError("a", "gone"), False)] * 2)
    async with bench(tmp_path, producer=producer) as at:
        producer.may_go.clear()
        at.inbound.received([message(1), at_time("plain", qos, 2)])
        await producer.has_begun.wait()
        at.inbound.received([at_time("recall", qos, 3)])
        at.passed.append(9)
        session = FakeSession(is_present=is_kept)
        at.inbound.connected(cast("Any", session))
        producer.may_go.set()
        async with asyncio.timeout(10):
            while not producer.messages:
                await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert producer_bodies(at) == []
        if not is_kept:
            at.journal.forget_session()
        at.connect(session)
        if is_kept:
            at.inbound.received(
                [message(1, dup=True), at_time("plain", qos, 2, dup=True), at_time("recall", qos, 3, dup=True)]
            )
            await session.until(3)
        else:
            await at.acks(message(4))
        assert producer_bodies(at) == []


async def test_a_message_that_expires_before_it_is_due_is_dropped(tmp_path: Path) -> None:
    async with bench(tmp_path) as at:
        await at.acks(message(1, topic="delayed/10/a", expiry=10), message(2, topic="delayed/10/a", expiry=11))
        assert (len(at.producer.messages), at.status.counters.expired) == (1, 1)


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("topic", ["in/a", "delayed/1/a", f"delayed/@{NOW // 1000 + 1}/a"])
async def test_a_message_that_expires_while_it_waits_here_is_dropped(tmp_path: Path, qos: int, topic: str) -> None:
    """Whether RocketMQ is away from the beginning, or the bridge notices while it sends."""
    away = ConnectionLostError("a", "gone")
    producer = FakeProducer(failures=[(away, False)] * 2)
    async with bench(tmp_path, producer=producer) as at:
        producer.may_go.clear()
        at.inbound.received([message(1, b"sent", qos, topic, expiry=5)])
        await producer.has_begun.wait()
        at.inbound.received([message(2, b"behind it", qos, topic, expiry=5)])
        at.inbound.received([message(3, b"lives longer", qos, topic, expiry=6)])
        at.passed.append(5)
        producer.may_go.set()
        acks = await at.acks(message(4), count=3 * bool(qos) + 1)
        kind = {1: PUBACK, 2: PUBREC}.get(qos, 0)
        assert acks == [(kind, number, 0) for number in (1, 2, 3) if qos] + [(PUBACK, 4, 0)]
        assert (sorted(producer.bodies), at.status.counters.expired) == ([b"lives longer", b"x"], 2)


async def test_it_is_dropped_too_if_it_had_expired_before_it_was_due(tmp_path: Path) -> None:
    async with bench(tmp_path) as at:
        at.producer.may_go.clear()
        at.inbound.received([message(1)])
        await at.producer.has_begun.wait()
        at.inbound.received([message(2, topic=f"delayed/@{NOW // 1000 + 10}/a", expiry=8)])
        at.passed.append(3)
        at.producer.may_go.set()
        await at.session.until(2)
        assert (len(at.producer.messages), at.status.counters.expired) == (1, 1)


async def test_one_that_rocketmq_has_stored_is_not_counted_as_expired(tmp_path: Path) -> None:
    producer = FakeProducer(failures=[(RequestTimeoutError("a", "send", 3.0), True)])
    async with bench(tmp_path, producer=producer) as at:
        at.producer.on_send = lambda: at.passed.append(9)
        assert await at.acks(message(1, qos=2, expiry=5)) == [(PUBREC, 1, 0)]
        assert (producer.bodies, at.status.counters.expired) == ([b"x"], 0)


async def test_a_recall_does_not_expire(tmp_path: Path) -> None:
    async with bench(tmp_path) as at:
        at.producer.may_go.clear()
        at.inbound.received([message(1)])
        await at.producer.has_begun.wait()
        at.inbound.received([message(2, topic="delayed/recall;key=k/a", expiry=5)])
        at.passed.append(9)
        at.producer.may_go.set()
        await at.session.until(2)
        assert at.recaller.cancelled == ["a#k"]


@pytest.mark.parametrize("qos", [1, 2])
async def test_delay_and_expiry_count_from_the_receipt(tmp_path: Path, qos: int) -> None:
    async with bench(tmp_path) as at:
        at.passed.append(100)
        at.producer.may_go.clear()
        at.inbound.received([message(1)])
        await at.producer.has_begun.wait()
        at.inbound.received([message(2, b"3 s", qos, "delayed/3/a", expiry=20)])
        at.passed.append(1)
        at.inbound.received([message(3, b"plain", qos, expiry=20), message(4, b"1 s", qos, "delayed/1/a")])
        at.passed.append(1.5)
        at.producer.may_go.set()
        await at.session.until(4)
        found = {
            each["body"]: (each.get("delay"), each["properties"].get("MQTT_EXPIRES_AT"))
            for each in at.producer.messages[1:]
        }
        due = {each["body"]: each["properties"].get("MQTT_DUE_AT") for each in at.producer.messages[1:]}
    assert found == {
        b"3 s": (timedelta(seconds=0.5), str(NOW + 120_000)),
        b"plain": (None, str(NOW + 121_000)),
        b"1 s": (timedelta(0), None),
    }
    assert due == {b"3 s": None, b"plain": None, b"1 s": str(NOW + 102_000)}


@pytest.mark.parametrize("qos", [1, 2])
async def test_they_count_from_the_first_receipt_though_it_is_sent_again_over_new_connections(
    tmp_path: Path, qos: int
) -> None:
    """Twice over a new connection, then with new rules: 6 s in all. The MQTT broker takes the time from the expiry."""
    text = RULES.replace("in/#", "out/#")
    passed: list[float] = [100]
    receipts = Receipts()
    away = FakeProducer(failures=[(ConnectionLostError("a", "gone"), False)] * 100_000)

    def messages(dup: bool, expiry: int) -> list[Publish]:
        return [
            message(1, b"in hand", qos, "delayed/10/a", dup, expiry=expiry),
            message(2, b"waits", qos, "delayed/10/a", dup, expiry=expiry),
        ]

    async with bench(tmp_path, producer=away, receipts=receipts, passed=passed) as at:
        at.inbound.received(messages(False, 20)[:1])
        await away.has_begun.wait()
        at.inbound.received(messages(False, 20)[1:])
        for expiry in (18, 16):
            passed.append(2)
            at.connect(FakeSession())
            at.inbound.received(messages(True, expiry))
        passed.append(2)
        at.inbound.close()
        at.inbound.left()
        async with asyncio.timeout(10):
            await at.running
    async with bench(tmp_path, text, receipts=receipts, passed=passed) as at:
        again = [*messages(True, 14), message(3, b"new", qos, "delayed/10/a", expiry=20)]
        await at.acks(*again)
        found = {each["body"]: (each["delay"], each["properties"]["MQTT_EXPIRES_AT"]) for each in at.producer.messages}
        first = (timedelta(seconds=4), str(NOW + 120_000))
        assert found == {
            b"in hand": first,
            b"waits": first,
            b"new": (timedelta(seconds=10), str(NOW + 126_000)),
        }
    assert len(receipts) == 0


async def test_an_acknowledgement_that_did_not_arrive_does_not_begin_the_delay_again(tmp_path: Path) -> None:
    async with bench(tmp_path) as at:
        at.session.is_lost = True
        await at.acks(message(1, topic="delayed/10/a"))
        at.passed.append(3)
        at.connect(FakeSession())
        await at.acks(message(1, topic="delayed/10/a", dup=True))
        assert [each["delay"] for each in at.producer.messages] == [timedelta(seconds=10), timedelta(seconds=7)]


@pytest.mark.parametrize("why", ["new", "another", "session"])
async def test_another_message_with_the_packet_id_has_its_own_time(tmp_path: Path, why: str) -> None:
    receipts = Receipts()
    async with bench(tmp_path, receipts=receipts) as at:
        at.producer.may_go.clear()
        at.inbound.received([message(9)])
        await at.producer.has_begun.wait()
        at.inbound.received([message(1, b"old", topic="delayed/10/a")])
        at.passed.append(3)
        at.connect(FakeSession(is_present=why != "session"))
        at.inbound.received(
            [message(1, b"other" if why == "another" else b"old", topic="delayed/10/a", dup=why != "new")]
        )
        at.producer.may_go.set()
        await at.session.until(1)
        assert at.producer.messages[-1]["delay"] == timedelta(seconds=10)


def test_only_so_many_receipts_are_kept_as_may_be_without_acknowledgement() -> None:
    receipts = Receipts()
    receipts.note([(message(number), 1.0) for number in range(1, 10)], most=4)
    receipts.note([(message(7), 1.0), (message(20), 2.0)], most=4)
    assert len(receipts) == 4
    found = {each: receipts.take(message(each, dup=True)) for each in (6, 7, 8, 9, 20)}
    assert {each for each, receipt in found.items() if receipt is not None} == {7, 8, 9, 20}


@pytest.mark.parametrize("qos", [1, 2])
async def test_what_waits_here_is_sent_when_the_mqtt_broker_has_lost_the_session(tmp_path: Path, qos: int) -> None:
    """Nobody else has it. It gets no acknowledgement: its packet id is that of another message now."""
    async with bench(tmp_path) as at:
        at.producer.may_go.clear()
        at.inbound.received([message(1, b"first", qos)])
        await at.producer.has_begun.wait()
        at.inbound.received([message(2, b"second", qos), message(3, b"third", qos)])
        at.journal.forget_session()
        at.connect(FakeSession(is_present=False))
        at.producer.may_go.set()
        async with asyncio.timeout(10):
            while len(at.producer.messages) < 3:
                await asyncio.sleep(0)
        assert await at.acks(message(2, b"second", qos)) == [(PUBACK if qos == 1 else PUBREC, 2, 0)]
        assert at.producer.bodies == [b"first", b"second", b"third", b"second"]


@pytest.mark.parametrize("qos", [1, 2])
async def test_what_waits_here_keeps_its_order_over_several_lost_sessions(tmp_path: Path, qos: int) -> None:
    async with bench(tmp_path) as at:
        at.producer.may_go.clear()
        at.inbound.received([message(1)])
        await at.producer.has_begun.wait()
        for number in range(4):
            at.inbound.received([message(2, b"%d" % number, qos), message(0, b"%d a" % number, 0)])
            at.passed.append(1)
            at.journal.forget_session()
            session = FakeSession(is_present=False)
            at.inbound.connected(cast("Any", session))
            at.inbound.received([message(0, b"%d b" % number, 0)])  # right behind the CONNACK
            at.connect(session)
        at.producer.may_go.set()
        await at.acks(message(9, b"last"))
        async with asyncio.timeout(10):
            while len(at.producer.messages) < 14:
                await asyncio.sleep(0)
        of_qos = [body for body in producer_bodies(at) if len(body) == 1]
        of_qos_0 = [body for body in producer_bodies(at) if len(body) == 3]
        assert of_qos == [b"%d" % number for number in range(4)]
        assert of_qos_0 == [b"%d %c" % (number, letter) for number in range(4) for letter in b"ab"]


async def test_what_waits_here_is_dropped_when_the_mqtt_broker_sends_it_again(tmp_path: Path) -> None:
    async with bench(tmp_path) as at:
        at.producer.may_go.clear()
        at.inbound.received([message(1)])
        await at.producer.has_begun.wait()
        at.inbound.received([message(2, b"again")])
        session = FakeSession()
        at.inbound.connected(cast("Any", session))
        at.inbound.received([message(2, b"again", dup=True)])  # comes right behind the CONNACK
        at.inbound.accepted(is_present=True)
        at.producer.may_go.set()
        await session.until(1)
        assert at.producer.bodies == [b"x", b"again"]


async def test_no_row_of_a_lost_session_is_taken_for_a_message_of_the_next_one(tmp_path: Path) -> None:
    async with bench(tmp_path) as at:
        at.producer.may_choose.clear()
        at.inbound.received([message(1, qos=2)])
        await at.producer.has_begun.wait()
        at.journal.forget_session()
        at.connect(FakeSession(is_present=False))
        at.producer.may_choose.set()
        assert await at.acks(message(1, qos=2)) == [(PUBREC, 1, 0)]
        assert at.producer.bodies == [b"x", b"x"]


@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_used_packet_id_is_known_as_used_again_while_its_message_waits(tmp_path: Path, is_killed: bool) -> None:
    """An MQTT broker that has to send it again marks it as sent again; the message before had the same content."""
    async with bench(tmp_path) as at:
        await at.acks(message(5, qos=2))
        await at.acks(Ack(PUBREL, 5))
        at.producer.may_go.clear()
        at.inbound.received([message(1)])
        await asyncio.sleep(0)
        at.inbound.received([message(5, qos=2)])
        if not is_killed:
            at.connect(FakeSession())
            at.producer.may_go.set()
            await at.acks(message(5, qos=2, dup=True))
            assert at.producer.bodies == [b"x", b"x", b"x"]
            return
        async with asyncio.timeout(10):
            while not at.journal.is_saved:
                await asyncio.sleep(0.001)
    producer = FakeProducer()
    async with bench(tmp_path, producer=producer) as at:
        await at.acks(message(5, qos=2, dup=True))
        assert producer.bodies == [b"x"]


@pytest.mark.parametrize("is_stored", [False, True])
async def test_a_message_on_its_way_is_sent_once_though_its_rule_has_another_topic_now(
    tmp_path: Path, is_stored: bool
) -> None:
    producer = FakeProducer(failures=[(ConnectionLostError("a", "gone"), is_stored)])
    async with bench(tmp_path, producer=producer) as at:
        at.producer.may_go.clear()
        at.inbound.received([message(5, qos=2)])
        await producer.has_begun.wait()
        at.inbound.close()
        producer.may_go.set()
        await at.running
    async with bench(tmp_path, RULES.replace('topic = "In"', 'topic = "New"'), producer=producer) as at:
        assert await at.acks(message(5, qos=2, dup=True)) == [(PUBREC, 5, 0)]
        assert [each["topic"] for each in producer.messages] == ["In" if is_stored else "New"]


async def test_it_ends_at_once_while_rocketmq_is_away(tmp_path: Path) -> None:
    producer = FakeProducer(failures=[(ConnectionLostError("a", "gone"), False)] * 1000)
    async with bench(tmp_path, producer=producer) as at:
        at.inbound.received([message(1), message(2, topic="delayed/1/a")])
        await producer.has_begun.wait()
        at.inbound.close()
        async with asyncio.timeout(10):
            await at.running
        assert (len(producer.failures) > 900, at.session.sent) == (True, [])
