"""Messages to MQTT: the window, and QoS 2 over connections and kills."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from duemq.consumer import Consumer
from duemq.messages import MessageQueue, ReceivedMessage
from duemq.mqtt_bridge.outbound import CLOSES_CONNECTION, LOST_CONNECTIONS, Flight, PublishWindow, ToMqtt
from duemq.mqtt_bridge.rules.model import Outbound, QoS, TemplateError
from duemq.mqtt_bridge.session.client import ServerLimits
from duemq.mqtt_bridge.session.journal import Journal, MessagePosition, Published, State, fingerprint_of, open_journal
from duemq.mqtt_bridge.session.packet_ids import NoPacketIdError, PacketIds
from duemq.mqtt_bridge.session.packets import (
    MAX_PACKET_IDS,
    NO_PROPERTIES,
    PUBACK,
    PUBCOMP,
    PUBREC,
    PUBREL,
    QUOTA_EXCEEDED,
    Ack,
    Publish,
    encode_publish,
)
from duemq.mqtt_bridge.status import Status
from duemq.protocol.codes import RequestCode
from duemq.protocol.frames.command import Command
from tests.unit.duemq.conftest import INTERVALS
from tests.unit.duemq.consuming.test_consumer_control import wait_until
from tests.unit.duemq.fake import FakeBroker, Request, success
from tests.unit.duemq.mqtt_bridge.fakes import FakeSession, rules

QUEUE = MessageQueue("Out", "broker-a", 0)


def place(number: int) -> MessagePosition:
    return MessagePosition("g", QUEUE, number, 7)


def flight(number: int, qos: int) -> Flight:
    packet = encode_publish("t", b"%d" % number, qos=qos, retain=False, packet_id=number, properties=NO_PROPERTIES)
    return Flight(number, packet, cast("Any", None), qos, place(number), is_noted=qos == 2)


class Bench:
    def __init__(self, journal: Journal, most: int = 100) -> None:
        self.journal = journal
        self.ids = PacketIds()
        self.finished: list[Flight] = []
        self.window = PublishWindow(
            most=most,
            journal=journal,
            ids=self.ids,
            comes_again=lambda place: place.group == "g",
            finished=self.finished.extend,
        )
        self.session = FakeSession()

    async def connect(self, session: FakeSession, *, is_subscribed: bool = True) -> FakeSession:
        self.window.disconnected()
        self.session = session
        await self.window.connected(cast("Any", session))
        if is_subscribed:
            self.window.subscribed()
        return session

    def send(self, *numbers: int, qos: int) -> None:
        if qos == 2:
            self.journal.set_published((place(each), Published(each, State.PUBLISHED)) for each in numbers)
        self.window.send([flight(number, qos) for number in numbers])

    def shown(self) -> list[str]:
        """The packets that were sent: PUBLISH as its number, with a + if it is marked as sent again; PUBREL as r and
        its id."""
        return [
            f"{each.payload.decode()}{'+' * each.dup}" if isinstance(each, Publish) else f"r{each.packet_id}"
            for each in self.session.sent
        ]

    def published(self) -> list[str]:
        """The same without PUBREL."""
        return [each for each in self.shown() if not each.startswith("r")]


@pytest.fixture
async def journal(tmp_path: Path) -> Any:
    journal = await open_journal(tmp_path)
    yield journal
    await journal.close()


def session(*, is_present: bool = True, most: int = 100) -> FakeSession:
    return FakeSession(is_present=is_present, limits=ServerLimits(receive_maximum=most))


async def test_no_more_is_sent_than_the_broker_allows(journal: Journal) -> None:
    bench = Bench(journal)
    await bench.connect(session(most=3))
    assert await bench.window.room() == 2
    bench.send(1, 2, 3, 4, qos=1)
    assert bench.shown() == ["1", "2"]
    bench.window.received([Ack(PUBACK, 2), Ack(PUBACK, 9)])
    assert bench.shown() == ["1", "2", "3"]
    assert [each.packet_id for each in bench.finished] == [2]
    waiting = asyncio.create_task(bench.window.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    bench.window.received([Ack(PUBACK, 1), Ack(PUBACK, 3)])
    assert await waiting == 1
    assert bench.shown() == ["1", "2", "3", "4"]


async def test_without_a_connection_there_is_no_room_and_what_is_sent_waits(journal: Journal) -> None:
    bench = Bench(journal)
    waiting = asyncio.create_task(bench.window.room())
    await asyncio.sleep(0)
    bench.send(1, 2, qos=1)
    assert not waiting.done()
    await bench.connect(session())
    assert await waiting == 97
    assert bench.shown() == ["1", "2"]


async def test_a_connection_that_took_messages_is_told(journal: Journal) -> None:
    """Then the next one is made at once: other messages may stand before one that has the connection closed."""
    bench = Bench(journal)
    assert not bench.window.disconnected()
    await bench.connect(session())
    bench.send(1, 2, qos=1)
    assert not bench.window.disconnected()
    await bench.connect(session())
    bench.window.received([Ack(PUBACK, 1)])
    assert bench.window.disconnected()
    assert not bench.window.disconnected()


async def test_after_a_lost_connection_all_is_sent_again_in_its_order(journal: Journal) -> None:
    bench = Bench(journal)
    await bench.connect(session(most=4))
    bench.send(1, 2, 3, 4, qos=1)
    bench.window.received([Ack(PUBACK, 2)])
    await bench.connect(session(most=3))
    assert bench.shown() == ["1+", "3+"]
    bench.window.received([Ack(PUBACK, 1)])
    assert bench.shown() == ["1+", "3+", "4+"]
    await bench.connect(session(is_present=False))
    assert bench.shown() == ["3", "4"]


def releases(*without: int) -> list[str]:
    """PUBRELs of all packet ids but these, as `Bench.shown` shows them."""
    return [f"r{each}" for each in range(1, MAX_PACKET_IDS + 1) if each not in without]


@pytest.mark.parametrize(("qos", "refusal"), [(1, PUBACK), (2, PUBREC)])
async def test_a_broker_that_has_too_many_messages_is_told_to_release_those_unknown_here(
    journal: Journal, qos: int, refusal: int
) -> None:
    bench = Bench(journal)
    await bench.connect(session(most=4))
    bench.send(7, 8, 9, qos=qos)
    bench.window.received([Ack(refusal, 7, QUOTA_EXCEEDED)])
    bench.window.received([Ack(refusal, 8, QUOTA_EXCEEDED)])
    assert bench.shown() == ["7", "8", "9", *releases(7, 8, 9), "7", "8"]
    assert bench.finished == []
    bench.window.received([Ack(PUBCOMP, 1, 0x92), Ack(refusal, 8, QUOTA_EXCEEDED)])
    assert [(each.packet_id, each.reason) for each in bench.finished] == [(8, QUOTA_EXCEEDED)], "not for ever"


async def test_a_broker_that_ends_the_connection_for_its_quota_is_told_at_the_next(journal: Journal) -> None:
    bench = Bench(journal)
    await bench.connect(session())
    bench.send(1, qos=2)
    bench.window.received([Ack(PUBREC, 1, QUOTA_EXCEEDED)])
    bench.window.disconnected()
    bench.send(2, qos=2)
    await bench.connect(session())
    assert bench.shown() == [*releases(1, 2), "1+", "2"]
    bench.window.received([Ack(PUBREC, 2)])
    await bench.connect(session())
    assert bench.shown() == ["r2", "1+"]


async def test_a_broker_that_takes_nothing_may_have_refused_without_being_heard(journal: Journal) -> None:
    bench = Bench(journal)
    await bench.connect(session())
    bench.send(1, qos=2)
    await bench.connect(session())
    assert bench.shown() == [*releases(1), "1+"]


async def test_a_message_of_an_earlier_process_may_be_the_one_that_is_too_many(journal: Journal) -> None:
    journal.set_published([(place(5), Published(5, State.PUBLISHED))])
    bench = Bench(journal)
    await bench.connect(session())
    bench.window.received([Ack(PUBREC, 5, QUOTA_EXCEEDED)])
    assert bench.shown() == releases(5)


async def test_with_mqtt_3_1_1_every_session_that_goes_on_is_cleared(journal: Journal) -> None:
    bench = Bench(journal)
    journal.set_published([(place(5), Published(5, State.PUBLISHED))])
    await bench.connect(FakeSession(is_v5=False))
    assert bench.shown() == releases(5)
    await bench.connect(FakeSession(is_v5=False, is_present=False))
    assert bench.shown() == []


async def test_with_qos_2_pubrel_follows_when_the_journal_has_the_pubrec(journal: Journal) -> None:
    bench = Bench(journal)
    await bench.connect(session())
    bench.send(1, 2, qos=2)
    releasing = asyncio.create_task(bench.window.run())
    saved: list[bool] = []
    bench.session.on_send = lambda: saved.append(journal.is_saved)
    bench.window.received([Ack(PUBREC, 1)])
    assert bench.shown() == ["1", "2"]
    await bench.session.until(3)
    assert bench.shown() == ["1", "2", "r1"]
    assert saved == [True]
    assert journal.published[place(1)] == Published(1, State.RELEASED)
    bench.window.received([Ack(PUBCOMP, 2), Ack(PUBCOMP, 1)])  # the first is of no message on its way
    assert [each.packet_id for each in bench.finished] == [1]
    assert journal.published[place(1)] == Published(0, State.DONE)
    bench.window.received([Ack(PUBREC, 2, 0x83)])
    assert [(each.packet_id, each.reason) for each in bench.finished] == [(1, 0), (2, 0x83)]
    assert place(2) not in journal.published
    releasing.cancel()


async def test_with_qos_2_a_new_connection_goes_on_where_the_last_was(journal: Journal) -> None:
    bench = Bench(journal)
    await bench.connect(session())
    bench.send(1, 2, 3, qos=2)
    bench.window.received([Ack(PUBREC, 2)])
    await bench.connect(session())
    assert sorted(bench.shown()) == ["1+", "3+", "r2"]
    assert journal.published[place(2)].state is State.RELEASED
    # Where the broker has forgotten the session, nobody can know what it had done with them.
    await bench.connect(session(is_present=False))
    assert bench.shown() == ["1", "2", "3"]
    assert {each.state for each in journal.published.values()} == {State.PUBLISHED}


async def test_after_a_kill_what_was_released_is_released_again_before_rocketmq_gives_it(journal: Journal) -> None:
    bench = Bench(journal)
    for number, state in ((1, State.PUBLISHED), (2, State.RELEASED), (3, State.DONE)):
        journal.set_published([(place(number), Published(number, state))])
    await bench.connect(session())
    assert bench.shown() == ["r2"]
    bench.window.received([Ack(PUBCOMP, 2), Ack(PUBCOMP, 1)])
    assert journal.published[place(2)].state is State.DONE
    assert journal.published[place(1)].state is State.PUBLISHED
    assert bench.finished == []


async def test_after_a_kill_a_pubrec_may_come_before_rocketmq_gives_the_message_again(journal: Journal) -> None:
    bench = Bench(journal)
    journal.set_published([(place(1), Published(1, State.PUBLISHED))])
    await bench.connect(session())
    releasing = asyncio.create_task(bench.window.run())
    bench.window.received([Ack(PUBREC, 1)])
    await bench.session.until(1)
    assert (bench.shown(), journal.published[place(1)].state) == (["r1"], State.RELEASED)
    bench.window.received([Ack(PUBCOMP, 1)])
    assert journal.published[place(1)].state is State.DONE
    releasing.cancel()


async def test_what_was_released_or_done_while_rocketmq_gave_it_again_is_not_published(journal: Journal) -> None:
    bench = Bench(journal)
    await bench.connect(session())
    journal.set_published([(place(1), Published(1, State.RELEASED)), (place(2), Published(0, State.DONE))])
    bench.window.send([flight(1, 2), flight(2, 2)])
    assert bench.shown() == ["r1"]
    assert [each.packet_id for each in bench.finished] == [2]


async def test_the_broker_counts_what_an_earlier_process_sent(journal: Journal) -> None:
    journal.set_published((place(each), Published(each, State.PUBLISHED)) for each in (1, 2))
    bench = Bench(journal)
    await bench.connect(session(most=4))
    bench.send(3, 4, qos=1)
    assert bench.shown() == ["3"]
    bench.window.send([flight(2, 2)])
    assert bench.shown() == ["3", "2"]
    bench.window.received([Ack(PUBACK, 3)])
    assert bench.shown() == ["3", "2", "4"]


async def test_the_journal_has_no_more_than_the_broker_allows(journal: Journal) -> None:
    """After a kill the messages in it are sent again, and the broker has to take them."""
    bench = Bench(journal)
    running = asyncio.create_task(bench.window.run())
    await bench.connect(session(most=4))
    flights = [flight(number, 2) for number in range(1, 10)]
    for each in flights:
        each.is_noted = False
    bench.window.send(flights)
    await bench.session.until(3)
    assert bench.shown() == ["1", "2", "3"]
    assert len(journal.published) == 3
    bench.window.received([Ack(PUBREC, 1)])
    await bench.session.until(4)
    bench.window.received([Ack(PUBCOMP, 1)])
    await bench.session.until(5)
    assert bench.shown() == ["1", "2", "3", "r1", "4"]
    running.cancel()


@pytest.mark.parametrize("qos", [1, 2])
async def test_a_message_on_which_the_broker_closes_the_connection_does_not_hold_up_the_others(
    journal: Journal, qos: int
) -> None:
    bench = Bench(journal)
    await bench.connect(session())
    bench.send(1, 2, 3, qos=qos)
    for _ in range(LOST_CONNECTIONS):
        assert [each.strip("+") for each in bench.published()] == ["1", "2", "3"]
        await bench.connect(session())
    # The subscriptions, and not the message, may be the reason.
    for _ in range(2 * LOST_CONNECTIONS):
        await bench.connect(session(), is_subscribed=False)
        assert bench.published() == []
    await bench.connect(session())
    for _ in range(LOST_CONNECTIONS):
        assert bench.published() == ["1+"]
        await bench.connect(session())
    assert [(each.packet_id, each.reason) for each in bench.finished] == [(1, CLOSES_CONNECTION)]
    assert place(1) not in journal.published
    assert bench.published() == ["2+"]
    bench.window.received([Ack(PUBACK if qos == 1 else PUBREC, 2, 0 if qos == 1 else 0x83)])
    assert bench.published() == ["2+", "3+"]
    bench.window.received([Ack(PUBACK if qos == 1 else PUBREC, 3, 0 if qos == 1 else 0x83)])
    bench.send(4, 5, qos=qos)
    assert bench.published() == ["2+", "3+", "4", "5"]


async def test_lost_connections_with_an_acknowledgement_in_between_are_nobodys_fault(journal: Journal) -> None:
    bench = Bench(journal)
    for number in range(1, 10 * LOST_CONNECTIONS, 2):
        await bench.connect(session())
        bench.send(number, number + 1, qos=1)
        if number % 4 == 1:
            bench.window.received([Ack(PUBACK, number)])
    for _ in range(3 * LOST_CONNECTIONS):
        bench.window.disconnected()  # no connection at all
    await bench.connect(session())
    assert len(bench.published()) > 10
    assert {each.reason for each in bench.finished} == {0}


async def test_drain_waits_until_nothing_is_on_its_way(journal: Journal) -> None:
    bench = Bench(journal)
    await bench.connect(session())
    bench.send(1, qos=1)
    draining = asyncio.create_task(bench.window.drain())
    await asyncio.sleep(0)
    assert not draining.done()
    bench.window.received([Ack(PUBACK, 1)])
    await draining


async def test_what_rocketmq_gives_again_while_it_is_on_its_way_is_not_sent_again(journal: Journal) -> None:
    bench = Bench(journal)
    await bench.connect(session(most=3))
    bench.send(1, qos=2)
    again = flight(1, 2)
    again.message = cast("Any", "again")
    bench.window.send([again])
    assert bench.shown() == ["1"]
    bench.window.received([Ack(PUBREC, 1), Ack(PUBCOMP, 1)])
    assert [each.message is again.message for each in bench.finished] == [True]
    bench.send(2, 3, qos=2)
    assert bench.shown() == ["1", "2", "3"], "it takes the room of one"


async def test_messages_of_rules_that_are_gone_take_no_room_for_ever(journal: Journal) -> None:
    """The MQTT broker counts those that it has, until they get a PUBREL."""
    gone = [MessagePosition("gone", QUEUE, offset, 7) for offset in range(4)]
    states = [State.PUBLISHED, State.PUBLISHED, State.RELEASED, State.DONE]
    rows = zip(gone, (11, 12, 13, 0), states, strict=True)
    journal.set_published((where, Published(packet_id, state)) for where, packet_id, state in rows)
    bench = Bench(journal)
    await bench.connect(session(most=5))
    assert bench.shown() == ["r11", "r12", "r13"]
    assert await bench.window.room() == 100
    bench.send(1, 2, 3, 4, qos=1)
    assert bench.published() == ["1"]
    bench = Bench(journal)  # as after a kill
    await bench.connect(session(most=5))
    assert bench.shown() == ["r11", "r12", "r13"]
    working = asyncio.create_task(bench.window.run())
    bench.window.received([Ack(PUBREC, 12)])  # the broker tells that it has this one
    await bench.session.until(4)
    bench.window.received([Ack(PUBCOMP, each) for each in (11, 12, 12, 13)])
    bench.send(1, 2, 3, 4, qos=1)
    assert bench.published() == ["1", "2", "3", "4"]
    assert journal.published == {where: Published(0, State.DONE) for where in gone[1:]}
    working.cancel()


async def test_a_session_that_the_broker_has_lost_has_none_of_them(journal: Journal) -> None:
    journal.set_published([(MessagePosition("gone", QUEUE, 1, 7), Published(11, State.PUBLISHED))])
    bench = Bench(journal)
    await bench.connect(session(is_present=False))
    assert (bench.shown(), journal.published) == ([], {})
    await bench.connect(session())
    assert bench.shown() == []


def test_packet_ids_go_round_and_each_is_in_use_once() -> None:
    ids = PacketIds([1, 65_535])
    assert [ids.take(), ids.take()] == [2, 3]
    ids.give_back(2)
    assert (ids.take(), ids.lend(), ids.lend()) == (4, 5, 6)
    for _ in range(65_535 - 4):
        ids.take()
    for ask in (ids.take, ids.lend):
        with pytest.raises(NoPacketIdError):
            ask()
    ids.give_back(77)
    assert ids.take() == 77


# --- a rule, with a consumer of a broker that is scripted -------------------------------------------------------------

NOW = 1_800_000_000_000
TO_MQTT = '[[to_mqtt]]\ntopic = "demo"\nmqtt_topic = "t"\n'


class Rule:
    """A rule that publishes, over a session and a window of its own."""

    def __init__(self, journal: Journal, consumer: Consumer, qos: QoS, is_delayed: bool) -> None:
        self.journal = journal
        self.status = Status("status", lambda: NOW)
        self.ids = PacketIds()
        self.window = PublishWindow(
            most=100, journal=journal, ids=self.ids, comes_again=lambda _: True, finished=self._finished
        )
        self.consumer = consumer
        self.session = FakeSession()
        self.rule = ToMqtt(
            Outbound(topic="demo", mqtt_topic=_topic, group="g", tags="*", qos=qos, retain=False, start="first"),
            connection=rules(TO_MQTT, Path("/")).connection,
            is_delayed=is_delayed,
            consumer=consumer,
            window=self.window,
            journal=journal,
            ids=self.ids,
            status=self.status,
            intervals=INTERVALS,
            clock=lambda: NOW,
        )

    def _finished(self, flights: list[Flight]) -> None:
        self.rule.finished(flights)

    def published(self) -> list[tuple[str, bytes, int]]:
        return [(each.topic, each.payload, each.qos) for each in self.session.sent if isinstance(each, Publish)]


def _topic(message: ReceivedMessage) -> str:
    if message.body == b"wrong":
        raise TemplateError("it has no topic")
    return "t"


@asynccontextmanager
async def rule(journal: Journal, broker: FakeBroker, qos: QoS, *, is_delayed: bool = False) -> AsyncIterator[Rule]:
    consumer = Consumer("g", nameserver=broker.address, from_="first", _intervals=INTERVALS, _clock=lambda: NOW)
    consumer.subscribe("demo")
    async with consumer:
        made = Rule(journal, consumer, qos, is_delayed)
        running = [asyncio.create_task(made.rule.run()), asyncio.create_task(made.window.run())]
        await made.window.connected(cast("Any", made.session))
        yield made
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        await made.rule.settle()


async def committed(broker: FakeBroker, offset: int) -> None:
    await broker.until(lambda: broker.offsets.get(("g", "demo", 0)) == offset)


async def test_the_offset_moves_when_mqtt_has_the_message(journal: Journal, broker: FakeBroker) -> None:
    await broker.store("demo", b"a", b"b")
    async with rule(journal, broker, 1) as at:
        await at.session.until(2)
        assert at.published() == [("t", b"a", 1), ("t", b"b", 1)]
        at.window.received([Ack(PUBACK, 2)])
        await broker.until_requests(RequestCode.PULL_MESSAGE, 6)
        assert broker.offsets.get(("g", "demo", 0), 0) == 0
        at.window.received([Ack(PUBACK, 1)])
        await committed(broker, 2)
        assert at.status.counters.published == 2


@pytest.mark.parametrize("is_empty", [True, False])
async def test_a_rule_that_is_closed_takes_nothing_more(journal: Journal, broker: FakeBroker, is_empty: bool) -> None:
    if not is_empty:
        await broker.store("demo", b"a")
    async with rule(journal, broker, 1) as at:
        if not is_empty:
            await at.session.until(1)
            at.window.received([Ack(PUBACK, 1)])
            await committed(broker, 1)
        at.rule.close()
        await broker.store("demo", b"b")
        await wait_until(lambda: at.consumer._inbox.messages > 0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(at.session.sent) == (0 if is_empty else 1)


async def test_with_qos_0_it_moves_when_the_message_is_sent(journal: Journal, broker: FakeBroker) -> None:
    await broker.store("demo", b"a", b"b")
    async with rule(journal, broker, 0) as at:
        await committed(broker, 2)
        assert at.published() == [("t", b"a", 0), ("t", b"b", 0)]


async def test_with_qos_2_the_journal_has_it_before_it_is_published(journal: Journal, broker: FakeBroker) -> None:
    async with rule(journal, broker, 2) as at:
        saved: list[bool] = []
        at.session.on_send = lambda: saved.append(journal.is_saved)
        await broker.store("demo", b"a")
        await at.session.until(1)
        assert saved == [True]
        assert list(journal.published.values()) == [Published(1, State.PUBLISHED)]
        at.window.received([Ack(PUBREC, 1)])
        await at.session.until(2)
        at.window.received([Ack(PUBCOMP, 1)])
        await committed(broker, 1)
    # RocketMQ gives it again, since its broker lost the offset.
    broker.offsets.clear()
    async with rule(journal, broker, 2) as at:
        await committed(broker, 1)
        assert (at.session.sent, at.status.counters.repeated) == ([], 1)


def place_of(broker: FakeBroker, offset: int) -> MessagePosition:
    stored = broker.queues["demo", 0][offset]
    fingerprint = fingerprint_of(stored.offset_message_id, stored.store_timestamp)
    return MessagePosition("g", MessageQueue("demo", "broker-a", 0), offset, fingerprint)


async def publish(at: Rule, number: int) -> None:
    """Have the MQTT broker take so many messages with QoS 2, each of which has its packet already."""
    await at.session.until(number)
    taken = [each.packet_id for each in at.session.sent if isinstance(each, Publish)]
    at.window.received([Ack(PUBREC, each) for each in taken])
    await at.session.until(2 * number)
    at.window.received([Ack(PUBCOMP, each) for each in taken])


@pytest.mark.parametrize("is_passed", [True, False])
async def test_with_qos_2_messages_of_another_store_are_published_though_their_places_are_known(
    journal: Journal, broker: FakeBroker, is_passed: bool
) -> None:
    """The name server is another one, or the broker has a new store; the name of the broker is the same."""
    await broker.store("demo", b"a", b"b")
    async with rule(journal, broker, 2) as at:
        await publish(at, 2)
        await committed(broker, 2)
        if is_passed:
            journal.forget_before("g", {MessageQueue("demo", "broker-a", 0): 2}, NOW)
            assert journal.published == {}
    broker.queues.clear()
    broker.offsets.clear()
    await broker.store("demo", b"c", b"d")
    for sent in ([b"c", b"d"], []):
        async with rule(journal, broker, 2) as at:
            if sent:
                await publish(at, 2)
            await committed(broker, 2)
            assert [payload for _, payload, _ in at.published()] == sent
        broker.offsets.clear()  # and what it gives again is known, as ever


async def test_with_qos_2_what_was_published_before_a_kill_goes_again_with_its_packet_id(
    journal: Journal, broker: FakeBroker
) -> None:
    await broker.store("demo", b"a", b"b")
    states = {0: Published(71, State.PUBLISHED), 1: Published(72, State.RELEASED)}
    journal.set_published((place_of(broker, offset), state) for offset, state in states.items())
    async with rule(journal, broker, 2) as at:
        await at.session.until(3)
        again = [(each.packet_id, each.dup) for each in at.session.sent if isinstance(each, Publish)]
        assert again == [(71, True)]
        assert at.session.acks() == [(PUBREL, 72, 0)] * 2


@pytest.mark.parametrize("why", ["skipped", "refused", "own"])
async def test_with_qos_2_what_is_not_published_again_after_a_kill_takes_no_room(
    journal: Journal, broker: FakeBroker, why: str
) -> None:
    """The offset was skipped, or the message has no topic by the new rules, or would go back."""
    text = "MQTT_BRIDGE\x01b\x02MQTT_TOPIC\x01t\x02" if why == "own" else ""
    await broker.store("demo", b"wrong" if why == "refused" else b"a", text=text)
    if why == "skipped":
        await broker.store("demo", b"b")
        broker.offsets["g", "demo", 0] = 1
    where = place_of(broker, 0)
    journal.set_published([(where, Published(71, State.PUBLISHED))])
    async with rule(journal, broker, 2) as at:
        async with asyncio.timeout(10):
            while (PUBREL, 71, 0) not in at.session.acks():
                await at.session.until(len(at.session.sent) + 1)
        assert at.window.missing == {71}
        at.window.received([Ack(PUBCOMP, 71)])
        assert at.window.missing == set()
        assert where not in journal.published


async def test_what_cannot_be_published_goes_to_the_dead_letters(journal: Journal, broker: FakeBroker) -> None:
    await broker.store("demo", b"wrong", b"a")
    async with rule(journal, broker, 1) as at:
        [request] = await broker.until_requests(RequestCode.CONSUMER_SEND_MSG_BACK)
        assert request.ext["delayLevel"] == "-1"
        await at.session.until(1)
        assert (at.published(), at.status.counters.refused) == ([("t", b"a", 1)], 1)


async def test_what_the_mqtt_broker_refuses_comes_again_later(journal: Journal, broker: FakeBroker) -> None:
    await broker.store("demo", b"a")
    async with rule(journal, broker, 1) as at:
        await at.session.until(1)
        at.window.received([Ack(PUBACK, 1, 0x83)])
        [request] = await broker.until_requests(RequestCode.CONSUMER_SEND_MSG_BACK)
        assert request.ext["delayLevel"] == "0"
        assert at.status.counters.refused == 1


async def test_all_that_is_refused_is_sent_back_though_the_bridge_ends(journal: Journal, broker: FakeBroker) -> None:
    """Else the offset would stay before them, and another bridge would publish all that come behind them again."""

    async def take_its_time(request: Request) -> Command:
        await asyncio.sleep(0.01)
        return success()

    await broker.store("demo", b"a", b"b", b"c", b"d")
    broker.on(RequestCode.CONSUMER_SEND_MSG_BACK, take_its_time)
    async with rule(journal, broker, 1) as at:
        await at.session.until(4)
        at.window.received([Ack(PUBACK, 1, 0x83), Ack(PUBACK, 2), Ack(PUBACK, 3, 0x83), Ack(PUBACK, 4)])
        await broker.until_requests(RequestCode.CONSUMER_SEND_MSG_BACK)
    assert len(broker.requests_of(RequestCode.CONSUMER_SEND_MSG_BACK)) == 2
    assert broker.offsets["g", "demo", 0] == 4


async def test_a_message_that_loses_connections_again_goes_to_the_dead_letters(
    journal: Journal, broker: FakeBroker
) -> None:
    broker.append("demo", 0, b"a", "")
    broker.append("demo", 0, b"b", "", reconsume_times=1)
    await broker.store("demo", b"c")
    async with rule(journal, broker, 1) as at:
        await at.session.until(2)
        for _ in range(3 * LOST_CONNECTIONS):
            at.window.disconnected()
            await at.window.connected(cast("Any", at.session))
            at.window.subscribed()
        first, second = await broker.until_requests(RequestCode.CONSUMER_SEND_MSG_BACK, 2)
        assert [first.ext["delayLevel"], second.ext["delayLevel"]] == ["0", "-1"]


async def test_what_would_go_back_and_what_is_expired_is_not_published(journal: Journal, broker: FakeBroker) -> None:
    await broker.store("demo", b"back", text="MQTT_BRIDGE\x01b\x02MQTT_TOPIC\x01t\x02")
    await broker.store("demo", b"expired", text=f"MQTT_EXPIRES_AT\x01{NOW}\x02")
    await broker.store("demo", b"other", text="MQTT_BRIDGE\x01b\x02MQTT_TOPIC\x01u\x02")
    async with rule(journal, broker, 1) as at:
        await at.session.until(1)
        assert at.published() == [("t", b"other", 1)]
        counters = at.status.counters
        assert (counters.own, counters.expired) == (1, 1)


async def test_a_delayed_message_goes_out_as_it_came(journal: Journal, broker: FakeBroker) -> None:
    text = "MQTT_BRIDGE\x01b\x02MQTT_TOPIC\x01t\x02MQTT_QOS\x010\x02MQTT_RETAIN\x01true\x02own\x011\x02"
    await broker.store("demo", b"\0", text=f"{text}MQTT_EMPTY\x01true\x02")
    async with rule(journal, broker, 2, is_delayed=True) as at:
        await at.session.until(1)
        [message] = at.session.sent
        assert isinstance(message, Publish)
        assert (message.topic, message.payload, message.qos, message.retain) == ("t", b"", 0, True)
        assert message.properties.user == (("own", "1"),)


async def test_lateness_counts_from_a_time_that_passed_in_the_bridge(journal: Journal, broker: FakeBroker) -> None:
    """RocketMQ did not delay such a message, or by nothing, if it replaced another one."""
    text = "MQTT_BRIDGE\x01b\x02MQTT_TOPIC\x01t\x02MQTT_QOS\x011\x02"
    await broker.store("demo", b"plain", text=f"{text}MQTT_DUE_AT\x01{NOW - 4000}\x02")
    await broker.store("demo", b"replace", text=f"{text}MQTT_DUE_AT\x01{NOW - 3000}\x02TIMER_OUT_MS\x01{NOW}\x02")
    async with rule(journal, broker, 2, is_delayed=True) as at:
        await at.session.until(2)
        sent = [each for each in at.session.sent if isinstance(each, Publish)]
        at.window.received([Ack(PUBACK, each.packet_id) for each in sent])
        await committed(broker, 2)
        counters = at.status.counters
        assert (counters.due, counters.late_ms, counters.late_max_ms) == (2, 7000, 4000)
