"""Messages from MQTT on their way to a scripted RocketMQ: acknowledgements, QoS 2, and what is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from duemq.errors import AccessDeniedError, ConnectionLostError, MessageRejectedError, RequestTimeoutError
from duemq.messages import SendStatus
from duemq.mqtt_bridge.session.client import ServerLimits
from duemq.mqtt_bridge.session.packets import (
    PUBACK,
    PUBCOMP,
    PUBREC,
    PUBREL,
    Ack,
    Publish,
)
from duemq.mqtt_bridge.status import Status
from tests.unit.duemq.mqtt_bridge.fakes import FakeProducer, FakeSession
from tests.unit.duemq.mqtt_bridge.inbound.bench import NOW, RULES, bench, message


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
        assert at.producer.calls == ["send_batch", "stored", "is_durable"]


@pytest.mark.parametrize("topic", ["in/a", "delayed/10/a"])
@pytest.mark.parametrize(("qos", "kind"), [(1, PUBACK), (2, PUBREC)])
async def test_what_is_stored_and_not_on_the_disk_yet_is_not_acknowledged(
    tmp_path: Path, qos: int, kind: int, topic: str
) -> None:
    producer = FakeProducer(status=SendStatus.FLUSH_DISK_TIMEOUT)
    async with bench(tmp_path, producer=producer) as at:
        at.recaller.durable = [False, False]
        rows: list[bool] = []
        at.session.on_send = lambda: rows.append(at.recaller.durable == [])
        assert await at.acks(message(1, qos=qos, topic=topic)) == [(kind, 1, 0)]
        assert rows == [True]
        assert producer.calls[1:] == ["is_durable"] * 3
        assert producer.bodies == [b"x"]


@pytest.mark.parametrize("qos", [1, 2])
async def test_a_broker_that_ends_before_a_message_is_on_its_disk_gets_it_again(tmp_path: Path, qos: int) -> None:
    """Unless it has the message, as the queue tells for QoS 2, and then it has to be on the disk as well."""
    producer = FakeProducer(status=SendStatus.FLUSH_DISK_TIMEOUT)
    async with bench(tmp_path, producer=producer) as at:
        at.recaller.durable = [False, ConnectionLostError("a", "gone"), False, True]
        await at.acks(message(1, qos=qos))
        assert producer.bodies == [b"x"] * (2 if qos == 1 else 1)
        assert producer.calls.count("is_durable") == 4
        assert at.recaller.durable == []


async def test_with_qos_2_a_delayed_one_is_looked_for_where_it_waits(tmp_path: Path) -> None:
    producer = FakeProducer(failures=[(RequestTimeoutError("a", "send", 3.0), False)])
    async with bench(tmp_path, producer=producer) as at:
        producer.waiting.add("ID1")
        assert await at.acks(message(1, qos=2, topic="delayed/10/a")) == [(PUBREC, 1, 0)]
        assert at.producer.calls == ["send", "stored", "waits", "is_durable"]


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
