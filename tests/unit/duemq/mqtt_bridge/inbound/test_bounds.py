"""How much waits in the bridge while RocketMQ is away."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from duemq.errors import ConnectionLostError, DueMQError
from duemq.mqtt_bridge.inbound.arrivals import Arrival, Keyed, superseded
from duemq.mqtt_bridge.rules.model import Delay
from tests.unit.duemq.mqtt_bridge.fakes import FakeProducer, FakeSession
from tests.unit.duemq.mqtt_bridge.inbound.bench import at_time, bench, message, producer_bodies


async def test_qos_0_beyond_the_bound_is_dropped_and_counted(tmp_path: Path) -> None:
    async with bench(tmp_path, mqtt="receive_maximum = 5") as at:
        at.producer.may_go.clear()
        at.inbound.received([message(number, qos=0) for number in range(15)])
        assert at.status.counters.dropped == 5
        at.inbound.received([message(1)])
        at.producer.may_go.set()
        await at.session.until(1)
        assert len(at.producer.messages) == 11


AWAY: list[tuple[DueMQError, bool]] = [(ConnectionLostError("a", "gone"), False)]
SMALL = "receive_maximum = 10"
"""So that 20 messages with QoS 0 are held."""


@pytest.mark.parametrize("read", [3, 50])
async def test_of_a_value_that_changes_often_the_newest_is_kept(tmp_path: Path, read: int) -> None:
    """While RocketMQ is away the bound holds also for what the bridge takes over to see whether it supersedes."""
    producer = FakeProducer(failures=AWAY * 100_000)
    async with bench(tmp_path, mqtt=SMALL, producer=producer) as at:
        values = [message(0, b"%d" % number, 0, "delayed/60;key=k;replace/a") for number in range(600)]
        for begin in range(0, 600, read):
            at.inbound.received(values[begin : begin + read])
            tries = len(producer.calls)
            while len(producer.calls) < tries + 2:  # each looks for what waits
                await asyncio.sleep(0)
            assert at.inbound.held <= 20 + 1
        producer.failures.clear()
        await at.acks(message(1))
        assert (producer_bodies(at), at.status.counters.dropped) == ([b"599"], 0)
        assert (at.status.counters.superseded, at.status.counters.received) == (599, 601)


@pytest.mark.parametrize("read", [1, 3, 50])
@pytest.mark.parametrize("others", [0, 15, 30])
async def test_the_newest_value_is_kept_though_others_have_all_the_room(tmp_path: Path, read: int, others: int) -> None:
    producer = FakeProducer(failures=AWAY * 100_000)
    async with bench(tmp_path, mqtt=SMALL, producer=producer) as at:
        at.inbound.received([message(0, b"x", 0) for _ in range(others)])
        values = [
            message(0, b"%d" % number, 0, f"delayed/60;key={key};replace/a")
            for number in range(40)
            for key in ("k", "l")
        ]
        for begin in range(0, len(values), read):
            at.inbound.received(values[begin : begin + read])
            await asyncio.sleep(0)
            assert at.inbound.held <= 20 + 1
        producer.failures.clear()
        await at.acks(message(1))
        newest = {b"k": b"39", b"l": b"39"}
        while len(at.producer.messages) < min(others, 20) + 3:
            await asyncio.sleep(0)
        assert Counter(producer_bodies(at))[b"39"] == len(newest), "it comes last"
        assert at.status.counters.dropped == max(0, others - 20)


@pytest.mark.parametrize("read", [1, 9])
@pytest.mark.parametrize("qos", [0, 1])
async def test_a_recall_of_a_value_that_found_no_room_counts(tmp_path: Path, read: int, qos: int) -> None:
    """Also in the same read: the recall comes behind the value for which it is, and before the next one."""
    async with bench(tmp_path, mqtt=SMALL) as at:
        at.producer.may_go.clear()
        at.inbound.received([message(0, b"x", 0)])
        await at.producer.has_begun.wait()
        at.inbound.received([message(0, b"x", 0) for _ in range(25)])
        packets = [
            at_time("replace", 0, 0),
            at_time("recall", qos, 7),
            at_time("plain", 0, 0),
            message(0, b"last", 0, "delayed/60;key=l;replace/a"),
        ]
        if qos == 0:
            del packets[1]  # it finds no room itself
        for begin in range(0, len(packets), read):
            at.inbound.received(packets[begin : begin + read])
        at.producer.may_go.set()
        while b"last" not in at.producer.bodies:
            await asyncio.sleep(0)
        assert producer_bodies(at) == ([b"last"] if qos else [b"replace", b"last"])


async def test_newest_values_that_found_no_room_survive_a_lost_connection_and_new_rules(tmp_path: Path) -> None:
    async with bench(tmp_path, mqtt=SMALL) as at:
        at.producer.may_go.clear()
        at.inbound.received([message(0, b"x", 0)])
        await at.producer.has_begun.wait()
        at.inbound.received([message(0, b"x", 0) for _ in range(25)])
        at.inbound.received([message(0, b"a", 0, "delayed/60;key=k;replace/a")])
        at.connect(FakeSession())
        at.inbound.received([message(0, b"b", 0, "delayed/60;key=l;replace/a")])
        left = [each.payload for arrival in at.inbound.left() for _, each in arrival.messages()]
        assert left[-2:] == [b"a", b"b"]


async def test_the_bound_holds_for_many_keys_too(tmp_path: Path) -> None:
    producer = FakeProducer(failures=AWAY * 100_000)
    async with bench(tmp_path, mqtt=SMALL, producer=producer) as at:
        for number in range(300):
            values = [
                message(0, b"%d" % number, 0, f"delayed/60;key=k{key};replace/a") for key in range(number % 40 + 1)
            ]
            at.inbound.received(values)
            await asyncio.sleep(0.001 if number % 10 == 0 else 0)
            assert at.inbound.held <= 20 + 1
        assert at.status.counters.dropped > 1000


def keyed(*messages: tuple[float, str, int]) -> list[Arrival]:
    """Messages with a key: each with its time, the kind of `at_time`, and its QoS."""
    found = []
    for order, (at, kind, qos) in enumerate(messages):
        delay = Delay("a", delay_ms=3000, key="k", replace="replace" in kind, recall=kind == "recall")
        found.append(Arrival([message(order, qos=qos)], at, None, order, keyed=[Keyed(order, qos, delay)]))
    return found


@pytest.mark.parametrize(
    ("messages", "gone"),
    [
        ([(0, "replace", 0), (1, "replace", 0), (2, "replace", 0)], {0, 1}),
        ([(0, "replace", 1), (1, "replace", 0), (2, "replace", 0)], {1}),
        ([(0, "replace", 0), (3, "replace", 0)], set()),
        ([(0, "plain", 0), (1, "replace", 0), (2, "recall", 0)], {0, 1}),
        ([(0, "plain", 0), (1, "replace", 0)], set()),
        ([(0, "replace", 1), (2, "replace", 0), (4, "replace", 0)], set()),  # the last is too late for the first
        ([(0, "plain", 1), (2, "replace", 0), (4, "replace", 0)], {1}),
    ],
)
def test_what_is_superseded_is_dropped_if_it_supersedes_nothing(
    messages: list[tuple[float, str, int]], gone: set[int]
) -> None:
    def due(at: float, _: Delay) -> float:
        return at + 3

    assert superseded(keyed(*messages), (), due) == gone


@pytest.mark.parametrize(("due", "gone"), [(0.5, {0, 1}), (1.5, {0}), (2.5, {0, 1})])
def test_it_is_not_dropped_either_if_it_supersedes_one_of_the_batch(due: float, gone: set[int]) -> None:
    arrivals = keyed((0, "plain", 0), (1, "replace", 0), (2, "recall", 0))
    first = Delay("a", delay_ms=0, key="k", replace=True)
    assert superseded(arrivals, [(first, due)], lambda at, _: at + 3) == gone


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
