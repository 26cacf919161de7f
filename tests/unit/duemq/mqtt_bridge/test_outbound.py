"""What becomes of messages that go to MQTT: the window, and QoS 2 over connections and kills."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from duemq.messages import MessageQueue
from duemq.mqtt_bridge.outbound import Flight, Window
from duemq.mqtt_bridge.session.client import ServerLimits
from duemq.mqtt_bridge.session.journal import Journal, Place, Published, State, open_journal
from duemq.mqtt_bridge.session.packet_ids import NoPacketIdError, PacketIds
from duemq.mqtt_bridge.session.packets import PUBACK, PUBCOMP, PUBREC, Ack, Publish, encode_publish
from tests.unit.duemq.mqtt_bridge.fakes import FakeSession

QUEUE = MessageQueue("Out", "broker-a", 0)


def place(number: int) -> Place:
    return Place("g", QUEUE, number)


def flight(number: int, qos: int) -> Flight:
    packet = encode_publish("t", b"%d" % number, qos=qos, retain=False, packet_id=number, properties=None)
    return Flight(number, packet, cast("Any", None), qos, place(number))


class Bench:
    def __init__(self, journal: Journal, most: int = 100) -> None:
        self.journal = journal
        self.ids = PacketIds()
        self.finished: list[Flight] = []
        self.window = Window(most=most, journal=journal, ids=self.ids, finished=self.finished.extend)
        self.session = FakeSession(is_v5=False)

    async def connect(self, session: FakeSession) -> FakeSession:
        self.window.disconnected()
        self.session = session
        await self.window.connected(cast("Any", session))
        return session

    def send(self, *numbers: int, qos: int) -> None:
        for number in numbers:
            self.ids.reserve(number)
        if qos == 2:
            self.journal.set_published((place(each), Published(each, State.PUBLISHED)) for each in numbers)
        self.window.send([flight(number, qos) for number in numbers])

    def shown(self) -> list[str]:
        """What was sent: PUBLISH as its number, with a + where it is marked as sent again; PUBREL as r and its id."""
        return [
            f"{each.payload.decode()}{'+' * each.dup}" if isinstance(each, Publish) else f"r{each.packet_id}"
            for each in self.session.sent
        ]


@pytest.fixture
async def journal(tmp_path: Path) -> Any:
    journal = await open_journal(tmp_path)
    yield journal
    await journal.close()


def session(*, is_present: bool = True, most: int = 100) -> FakeSession:
    return FakeSession(is_v5=False, is_present=is_present, limits=ServerLimits(receive_maximum=most))


async def test_no_more_is_sent_than_the_broker_allows(journal: Journal) -> None:
    bench = Bench(journal)
    await bench.connect(session(most=2))
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
    assert await waiting == 98
    assert bench.shown() == ["1", "2"]


async def test_after_a_lost_connection_all_is_sent_again_in_its_order(journal: Journal) -> None:
    bench = Bench(journal)
    await bench.connect(session(most=3))
    bench.send(1, 2, 3, 4, qos=1)
    bench.window.received([Ack(PUBACK, 2)])
    await bench.connect(session(most=2))
    assert bench.shown() == ["1+", "3+"]
    bench.window.received([Ack(PUBACK, 1)])
    assert bench.shown() == ["1+", "3+", "4+"]
    await bench.connect(session(is_present=False))
    assert bench.shown() == ["3", "4"]


async def test_with_qos_2_pubrel_follows_when_the_journal_has_the_pubrec(journal: Journal) -> None:
    bench = Bench(journal)
    await bench.connect(session())
    bench.send(1, 2, qos=2)
    releasing = asyncio.create_task(bench.window.release())
    bench.window.received([Ack(PUBREC, 1)])
    assert bench.shown() == ["1", "2"]
    await bench.session.until(3)
    assert bench.shown() == ["1", "2", "r1"]
    assert journal.published[place(1)] == Published(1, State.RELEASED)
    bench.window.received([Ack(PUBCOMP, 2), Ack(PUBCOMP, 1)])  # the first is of no message on its way
    assert [each.packet_id for each in bench.finished] == [1]
    assert journal.published[place(1)] == Published(0, State.DONE)
    bench.window.received([Ack(PUBREC, 2, 0x97)])
    assert [(each.packet_id, each.reason) for each in bench.finished] == [(1, 0), (2, 0x97)]
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
        bench.ids.reserve(number)
    await bench.connect(session())
    assert bench.shown() == ["r2"]
    bench.window.received([Ack(PUBCOMP, 2), Ack(PUBCOMP, 1)])
    assert journal.published[place(2)].state is State.DONE
    assert journal.published[place(1)].state is State.PUBLISHED
    assert bench.finished == []


async def test_it_is_told_when_nothing_is_on_its_way(journal: Journal) -> None:
    bench = Bench(journal)
    await bench.connect(session())
    bench.send(1, qos=1)
    draining = asyncio.create_task(bench.window.drain())
    await asyncio.sleep(0)
    assert not draining.done()
    bench.window.received([Ack(PUBACK, 1)])
    await draining


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
