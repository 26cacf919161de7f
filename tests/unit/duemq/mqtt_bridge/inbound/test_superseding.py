"""Recalls and replacements that wait in the bridge with the messages that they are for."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from duemq.errors import ConnectionLostError, MessageRejectedError
from duemq.mqtt_bridge.inbound.receipts import Receipts
from tests.unit.duemq.mqtt_bridge.fakes import FakeProducer, FakeSession
from tests.unit.duemq.mqtt_bridge.inbound.bench import at_time, bench, message, producer_bodies, while_rocketmq_is_away


async def test_what_replaces_and_what_cancels_keep_their_order(tmp_path: Path) -> None:
    async with bench(tmp_path) as at:
        await at.acks(
            message(1, topic="delayed/0;key=k;replace/a"),
            message(2, topic="delayed/recall;key=k/a"),
            message(3, topic="delayed/2;key=k;replace/a"),
        )
        assert at.producer.calls == ["send", "cancel", "send"]
        assert at.recaller.cancelled == ["a#k"]
        assert [each["replace"] for each in at.producer.messages] == [True, True]


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


MIXED = [
    ([("plain", 1), ("recall", 0)], []),
    ([("plain", 2), ("recall", 0)], []),
    ([("replace", 1), ("replace at", 0)], [b"replace at"]),
    ([("replace", 2), ("replace at", 0)], [b"replace at"]),
    ([("recall", 0), ("plain", 1)], [b"plain"]),
    ([("replace at", 0), ("replace", 1)], [b"replace"]),
]
"""What waits in the bridge, each with its QoS, and what RocketMQ has to get of it."""


@pytest.mark.parametrize(("kinds", "sent"), [*MIXED, ([("recall", 1), ("plain", 0)], [b"plain"])])
@pytest.mark.parametrize("is_one_read", [True, False])
@pytest.mark.parametrize("change", ["connection", "rules"])
async def test_what_has_qos_0_keeps_its_place_when_the_others_are_sent_again(
    tmp_path: Path, kinds: list[tuple[str, int]], sent: list[bytes], is_one_read: bool, change: str
) -> None:
    """Over a new connection, the MQTT broker sends those with QoS 1 and 2 again, behind those with QoS 0 that wait."""
    receipts, passed = Receipts(), [0.0]
    away = FakeProducer(failures=[(ConnectionLostError("a", "gone"), False)] * 100_000)
    messages = [at_time(kind, qos, number) for number, (kind, qos) in enumerate(kinds, 2)]
    again = [replace(each, dup=True) for each in messages if each.qos]
    async with bench(tmp_path, producer=away, receipts=receipts, passed=passed) as at:
        at.inbound.received([message(1)])
        await away.has_begun.wait()
        for read in [messages] if is_one_read else [[each] for each in messages]:
            at.inbound.received(read)
            passed.append(1)
        if change == "connection":
            at.connect(FakeSession())
            passed.append(9)
            at.inbound.received([message(1, dup=True), *again])
            away.failures.clear()
            await at.session.until(1 + len(again))
            found = at
        else:
            at.inbound.close()
            async with asyncio.timeout(10):
                await at.running
            left = at.inbound.left()
    if change == "rules":
        passed.append(9)
        async with bench(tmp_path, receipts=receipts, passed=passed, waiting=left) as found:
            await found.acks(message(1, dup=True), *again)
    assert producer_bodies(found) == sent
    assert found.recaller.cancelled == ["a#k"] * ("recall" in dict(kinds))
    assert found.producer.calls[-1:] == (["send"] if sent else ["cancel"])


@pytest.mark.parametrize("messages_and_later", [each for each, _ in MIXED[:4]])
@pytest.mark.parametrize("is_in_hand", [False, True])
async def test_what_has_qos_0_counts_for_what_is_sent_again_also_when_it_is_done(
    tmp_path: Path, messages_and_later: list[tuple[str, int]], is_in_hand: bool
) -> None:
    """The connection is lost after RocketMQ has it, and before the acknowledgements arrive; or RocketMQ has it, and the
    message comes again, while the batch is sent."""
    async with bench(tmp_path) as at:
        messages = [at_time(kind, qos, number) for number, (kind, qos) in enumerate(messages_and_later, 2)]
        again = replace(messages[0], dup=True)
        if is_in_hand:
            at.producer.may_go.clear()
            at.inbound.received([*messages, message(1)])
            await at.producer.has_begun.wait()
            at.connect(FakeSession())
            at.inbound.received([again, message(1, dup=True)])
            at.producer.may_go.set()
            await at.session.until(2)
            assert producer_bodies(at) == ([b"replace at"] if messages_and_later[1][0] == "replace at" else [])
            return
        at.session.is_lost = True
        await at.acks(*messages, count=1)
        before = producer_bodies(at)
        at.passed.append(1)
        at.connect(FakeSession())
        await at.acks(again)
        assert producer_bodies(at) == before


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
