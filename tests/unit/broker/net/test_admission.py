"""Requests that wait for the disk hold a bounded amount of memory: beyond that the broker stops reading from
connections. No request is refused for it, and all are answered in the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from duemq.broker.errors import NotNow
from duemq.broker.net.limits.admission import CONNECTION_BYTES, OWN_BYTES, Admission
from duemq.protocol.codes import RequestCode
from duemq.protocol.frames import codec
from duemq.protocol.requests.headers import QueueOfTopic, TopicName
from duemq.storage.config_file import ConfigFile
from duemq.storage.queues.pull import ColdRead
from tests.support.broker import UnboundBroker, running
from tests.support.loop import turns
from tests.support.wire import pull, request, send

LIMIT = 8 * 1024 * 1024
BODY = 200_000


class Gate:
    """Holds up a method that runs in a thread, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self._open = threading.Event()
        method: Callable[..., Any] = getattr(owner, name)

        def gated(*arguments: Any) -> Any:
            assert self._open.wait(60)
            return method(*arguments)

        monkeypatch.setattr(owner, name, gated)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[UnboundBroker]:
    async with running(tmp_path, f"maxWaitingRequestBytes={LIMIT}") as started:
        assert (await started.connect().ask(send("T", bytes(BODY)))).code == 0
        yield started


@pytest.fixture
def cold(broker: UnboundBroker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """No message is in memory, and the disk does not answer before the gate is open."""
    monkeypatch.setattr(broker.store, "read", lambda _: None)
    gate = Gate(monkeypatch, ColdRead, "run")
    yield gate
    gate.open()


@pytest.fixture
def tables(broker: UnboundBroker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """No table is saved before the gate is open."""
    gate = Gate(monkeypatch, ConfigFile, "write")
    yield gate
    gate.open()


def under_way(broker: UnboundBroker) -> int:
    return len(broker.router._tasks)


async def test_cold_pulls_of_a_client_that_does_not_read(broker: UnboundBroker, cold: Gate) -> None:
    consumer, other = broker.connect(), broker.connect()
    pulls = [pull("T", 0, count=1) for _ in range(500)]
    consumer.transport.block()
    consumer.post(*pulls)
    await turns(10)
    assert under_way(broker) == CONNECTION_BYTES // (BODY + OWN_BYTES) + 1
    assert not consumer.transport.takes_data
    assert (await other.ask(request(RequestCode.GET_MAX_OFFSET, QueueOfTopic("T", 0)))).code == 0
    cold.open()
    while under_way(broker):
        await turns(1)
    assert consumer.transport.most_held < CONNECTION_BYTES + 2 * BODY
    assert broker.running.net.output.used == consumer.transport.get_write_buffer_size(), (
        "all of it counts, not only the first"
    )
    while len(consumer.responses) < len(pulls):
        consumer.transport.unblock()
        await turns(1)
    assert {answer.code for answer in consumer.responses} == {0}
    assert {answer.opaque for answer in consumer.responses} == {command.opaque for command in pulls}
    assert consumer.transport.takes_data
    assert broker.router._admission.used == consumer.connection.under_way == 0


async def test_cold_pulls_of_many_clients(broker: UnboundBroker, cold: Gate) -> None:
    """Cold pulls of many clients share one limit; waiting ones go on as others end, also past those of clients that are
    gone."""
    consumers = [broker.connect() for _ in range(100)]
    for consumer in consumers:
        consumer.post(*(pull("T", 0, count=1) for _ in range(10)))
    await turns(10)
    assert under_way(broker) == LIMIT // (BODY + OWN_BYTES) + 1
    for consumer in consumers[40:60]:
        consumer.transport.abort()
    await turns()
    cold.open()
    stay = consumers[:40] + consumers[60:]
    while any(len(consumer.responses) < 10 for consumer in stay):
        await turns(1)
        assert broker.router._admission.used <= LIMIT + BODY + OWN_BYTES
    assert {answer.code for consumer in stay for answer in consumer.responses} == {0}
    assert broker.router._admission.used == 0
    assert all(consumer.transport.takes_data for consumer in stay)


async def test_sends_that_wait_for_their_topic(broker: UnboundBroker, tables: Gate) -> None:
    """Sends that wait for their topic are stored in their order, followed by later ones; other clients go on
    meanwhile."""
    producer, other = broker.connect(), broker.connect()
    commands = [send("New", b"%d" % number + bytes(50_000)) for number in range(300)]
    producer.feed(b"".join(codec.encode(command) for command in commands))
    await turns(10)
    assert under_way(broker) <= CONNECTION_BYTES // (50_000 + OWN_BYTES) + 1
    assert not producer.transport.takes_data
    assert (await other.ask(send("T"))).code == 0
    tables.open()
    while len(producer.responses) < len(commands):
        await turns(1)
    answers = {answer.opaque: answer for answer in producer.responses}
    assert [int(answers[command.opaque].ext["queueOffset"]) for command in commands] == list(range(300))
    assert {answer.code for answer in producer.responses} == {0}


async def test_a_topic_that_is_being_saved_is_not_saved_once_more_for_each_who_waits(
    broker: UnboundBroker, tables: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[str] = []
    write = ConfigFile.write

    def noted(file: ConfigFile, table: dict[str, Any]) -> None:
        writes.append(file.path)
        write(file, table)

    monkeypatch.setattr(ConfigFile, "write", noted)
    peers = [broker.connect() for _ in range(5)]
    for peer in peers:
        peer.post(send("New"), send("New"))
        await turns(3)
    tables.open()
    while any(len(peer.responses) < 2 for peer in peers):
        await turns(1)
    assert [path for path in writes if path.endswith("topics.json")] == [writes[0]]


async def test_requests_of_administrators_that_take_their_time(broker: UnboundBroker, tables: Gate) -> None:
    peer = broker.connect()
    commands = [request(RequestCode.DELETE_TOPIC_IN_BROKER, TopicName(f"missing{number}")) for number in range(2000)]
    peer.post(*commands)
    await turns(10)
    assert under_way(broker) == CONNECTION_BYTES // OWN_BYTES
    tables.open()
    while len(peer.responses) < len(commands):
        await turns(1)
    assert {answer.code for answer in peer.responses} == {0}


async def test_sends_before_a_request_that_has_to_wait_are_written_and_answered(
    broker: UnboundBroker, cold: Gate
) -> None:
    peer = broker.connect()
    full = [pull("T", 0, count=1) for _ in range(CONNECTION_BYTES // (BODY + OWN_BYTES) + 1)]
    before, after = [send("T") for _ in range(5)], send("T")
    peer.post(*full, *before, pull("T", 0, count=1), after)
    await turns()
    assert [answer.opaque for answer in peer.responses] == [command.opaque for command in before]
    cold.open()
    while len(peer.responses) < len(full) + 7:
        await turns(1)
    assert peer.answer_of(after).ext["queueOffset"] == "6"  # type: ignore[union-attr]


async def test_a_pull_that_has_to_wait_is_counted_once(broker: UnboundBroker, cold: Gate) -> None:
    peer = broker.connect()
    peer.post(*(pull("T", 0, count=1) for _ in range(100)))
    await turns(10)
    cold.open()
    while len(peer.responses) < 100:
        await turns(1)
    stats = broker.running.pulls._stats
    assert (stats.found, stats.transferred) == (100, 100)


# --- the counting itself


class FakeGuest:
    def __init__(self) -> None:
        self.under_way = 0
        self.is_held = False

    def hold_back(self) -> None:
        self.is_held = True

    def go_on(self) -> None:
        self.is_held = False


async def test_those_who_wait_go_on_in_their_order_and_not_all_at_once() -> None:
    admission = Admission(asyncio.get_running_loop(), 1000)
    first = FakeGuest()
    admission.begin(first, 1000)
    waiting = [FakeGuest() for _ in range(30)]
    for guest in waiting:
        with pytest.raises(NotNow):
            admission.begin(guest, 10)
    await turns()
    assert all(guest.is_held for guest in waiting)
    admission.end(first, 1000)
    await turns(1)
    going = [guest for guest in waiting if not guest.is_held]
    assert going == waiting[: len(going)]
    assert 0 < len(going) < 20
    admission.begin(first, 1000)
    await turns(5)
    assert [guest for guest in waiting if not guest.is_held] == going, "the room is taken again"
    admission.end(first, 1000)
    await turns(10)
    assert not any(guest.is_held for guest in waiting), "though none of them used it"


async def test_one_request_is_always_possible() -> None:
    """One request is always possible, however large it is."""
    admission = Admission(asyncio.get_running_loop(), 1000)
    guest = FakeGuest()
    admission.begin(guest, 10**9)
    with pytest.raises(NotNow):
        admission.begin(guest, 1)
    with pytest.raises(NotNow):
        admission.begin(FakeGuest(), 1)
    admission.begin(guest, 5, at_once=True)
    admission.end(guest, 10**9)
    await turns()
    assert not guest.is_held
    assert admission.used == 5


async def test_a_lost_connection_is_not_asked_to_go_on() -> None:
    admission = Admission(asyncio.get_running_loop(), 10**9)
    guest = FakeGuest()
    admission.begin(guest, CONNECTION_BYTES)
    with pytest.raises(NotNow):
        admission.begin(guest, 1)
    admission.lost(guest)
    admission.end(guest, CONNECTION_BYTES)
    await turns()
    assert guest.is_held
    assert (admission.used, guest.under_way) == (0, 0)
