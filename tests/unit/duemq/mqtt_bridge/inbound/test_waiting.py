"""Delay, expiry and order of what waits in the bridge, over connections and sessions that are lost."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from duemq.errors import ConnectionLostError, RequestTimeoutError
from duemq.mqtt_bridge.inbound.receipts import Receipts
from duemq.mqtt_bridge.session.packets import (
    PUBACK,
    PUBREC,
    Publish,
)
from tests.unit.duemq.mqtt_bridge.fakes import FakeProducer, FakeSession
from tests.unit.duemq.mqtt_bridge.inbound.bench import NOW, RULES, bench, message, producer_bodies


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
    receipts.note([(message(number), 1.0, number) for number in range(1, 10)], most=4)
    receipts.note([(message(7), 1.0, 7), (message(20), 2.0, 20)], most=4)
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
