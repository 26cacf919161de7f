"""Registering with external name servers: each on its own, independent of the state of the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from duemq.broker.names.registration import ANSWER_SECONDS, CONNECT_SECONDS, Address, Registrar
from duemq.broker.net.connection import Connection, FrameHandler
from duemq.broker.net.limits.input_budget import InputBudget
from duemq.broker.net.limits.output_budget import OutputBudget
from duemq.broker.net.request_turns import IsOver
from duemq.broker.tables.topics import Topics
from duemq.protocol.codes import FLAG_RESPONSE, RequestCode, ResponseCode
from duemq.protocol.frames import codec
from duemq.protocol.frames.command import Command
from duemq.protocol.frames.frame import Frame
from duemq.protocol.requests.headers import BrokerIdentity
from duemq.protocol.requests.registration import decode_registration
from duemq.protocol.requests.signature import Signer
from tests.support.access import signature
from tests.support.broker import Peer
from tests.support.loop import SteppedLoop, request_turns, turns

PERIOD = 30.0
ADDRESSES = [("10.0.0.1", 1), ("10.0.0.2", 2), ("10.0.0.3", 3)]


class FakeTopics:
    """A table of topics."""

    def __init__(self) -> None:
        self.names = ["T"]
        self.size = 0
        self.told = 0

    def announcement(self) -> dict[str, Any]:
        self.told += 1
        fields = {"readQueueNums": 1, "writeQueueNums": 1, "perm": 6, "padding": "x" * self.size}
        return {"topicConfigTable": dict.fromkeys(self.names, fields)}


class Handler:
    """The broker's handling of frames from a name server: they are responses."""

    def handle(self, connection: Connection, frames: list[Frame], position: int, is_over: IsOver) -> int:
        for frame in frames[position:]:
            connection.take_response(codec.decode(frame))
        return len(frames)

    def connection_made(self, connection: Connection) -> None:
        pass

    def connection_lost(self, connection: Connection) -> None:
        pass


class NameServers:
    """Some name servers. One may refuse connections, never answer an attempt to connect, or never answer a request."""

    def __init__(self) -> None:
        self.how: dict[Address, str] = {}
        self.attempts: list[Address] = []
        self.peers: dict[Address, Peer] = {}
        self._answered: dict[Address, int] = {}

    async def connect(self, address: Address) -> Connection:
        self.attempts.append(address)
        how = self.how.get(address)
        if how == "refuses":
            raise ConnectionRefusedError(111, "Connection refused")
        if how == "hangs":
            await asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()
        handler = cast("FrameHandler", Handler())
        connection = Connection(handler, loop, InputBudget(loop), OutputBudget(loop), request_turns(loop))
        self.peers[address] = Peer(connection, address)
        self._answered[address] = 0
        return connection

    def answer(self) -> None:
        """Answer the requests since the last call, except for silent servers."""
        for address, peer in self.peers.items():
            if self.how.get(address) == "silent" or peer.connection.is_closed:
                continue
            for command in peer.requests[self._answered[address] :]:
                code = ResponseCode.SYSTEM_ERROR if self.how.get(address) == "complains" else ResponseCode.SUCCESS
                peer.post(Command(code=code, opaque=command.opaque, flag=FLAG_RESPONSE, remark="so it is"))
            self._answered[address] = len(peer.requests)

    def registered(self, address: Address) -> list[set[str]]:
        """Return the topics of each registration received."""
        peer = self.peers.get(address)
        requests = [each for each in peer.requests if each.code == RequestCode.REGISTER_BROKER] if peer else []
        return [set(decode_registration(each.body, compressed=False).topics) for each in requests]

    async def turns(self, count: int = 3) -> None:
        for _ in range(count):
            await turns(3)
            self.answer()
        await turns(3)


@pytest.fixture
def topics() -> FakeTopics:
    return FakeTopics()


@pytest.fixture
def servers() -> NameServers:
    return NameServers()


@pytest.fixture
async def registration(servers: NameServers, topics: FakeTopics) -> AsyncIterator[Registrar]:
    identity = BrokerIdentity("broker-a", "10.0.0.1:10911", "DefaultCluster", 0)
    made = Registrar(identity, ADDRESSES, cast("Topics", topics), period=PERIOD, connect=servers.connect)
    yield made
    for server in made._servers:
        if server._task is not None:
            server._task.cancel()


@pytest.mark.parametrize("how", ["refuses", "hangs", "silent", "complains"])
async def test_one_name_server_holds_up_no_other(
    registration: Registrar, servers: NameServers, loop: SteppedLoop, how: str, logged: list[Any]
) -> None:
    """One failing name server does not delay the others: the broker registers with each once a period, and logs a
    failure once, and its end once."""
    servers.how[ADDRESSES[1]] = how
    registration.start()
    await servers.turns()
    for _ in range(10):
        for _ in range(int(PERIOD)):
            loop.advance(1)
            await servers.turns(1)
    for address in (ADDRESSES[0], ADDRESSES[2]):
        assert len(servers.registered(address)) == 11
    lost = [line for line in logged if line["event"] == "name_server_lost"]
    assert [line["name_server"] for line in lost] == ["10.0.0.2:2"]
    tries = servers.registered(ADDRESSES[1]) if how == "complains" else servers.attempts
    assert len(tries) >= 8, "it is tried again all the time"
    servers.how.clear()
    for _ in range(2 * int(PERIOD)):
        loop.advance(1)
        await servers.turns(1)
    assert [line["event"] for line in logged] == ["name_server_lost", "name_server_found"]


async def test_who_waits_for_a_registration_does_not_wait_for_a_server_that_is_down(
    registration: Registrar, servers: NameServers, loop: SteppedLoop, topics: FakeTopics
) -> None:
    servers.how[ADDRESSES[1]] = "hangs"
    registration.start()
    await servers.turns()
    topics.names.append("U")
    told = registration.register_now()
    await servers.turns()
    assert servers.registered(ADDRESSES[0])[-1] == {"T", "U"}
    assert not told.done(), "it may just be slow"
    loop.advance(CONNECT_SECONDS + 0.1)
    await servers.turns()
    loop.advance(CONNECT_SECONDS + 0.1)
    await servers.turns()
    assert told.done()
    topics.names.append("V")
    told = registration.register_now()
    await servers.turns()
    assert told.done()
    assert servers.registered(ADDRESSES[2])[-1] == {"T", "U", "V"}


async def test_changes_that_come_meanwhile_are_told_all_at_once(
    registration: Registrar, servers: NameServers, topics: FakeTopics
) -> None:
    registration.start()
    await turns()
    waiting = []
    for number in range(100):
        topics.names.append(f"T{number}")
        waiting.append(registration.register_now())
    assert topics.told == 3
    await servers.turns()
    assert all(told.done() for told in waiting)
    assert topics.told == 6
    assert all(servers.registered(address)[-1] == set(topics.names) for address in ADDRESSES)


async def test_a_large_table_is_not_told_again_at_once(
    registration: Registrar, servers: NameServers, topics: FakeTopics, loop: SteppedLoop
) -> None:
    """A large table is not registered again at once: encoding and sending it takes time in which no other work is
    done."""
    topics.size = 4_000_000
    registration.start()
    await servers.turns()
    for _ in range(20):
        registration.register_now()
        loop.advance(0.01)
        await servers.turns(1)
    assert {len(servers.registered(address)) for address in ADDRESSES} <= {2, 3}


async def test_what_does_not_fit_into_a_frame_ends_nothing(
    registration: Registrar, servers: NameServers, topics: FakeTopics, loop: SteppedLoop, logged: list[Any]
) -> None:
    topics.size = 17_000_000
    registration.start()
    await servers.turns()
    for _ in range(3):
        loop.advance(PERIOD + 1)
        await servers.turns()
    assert [line["event"] for line in logged] == ["name_server_lost"] * 3
    assert all("the largest has" in line["reason"] for line in logged)
    topics.size = 10
    loop.advance(PERIOD + 1)
    await servers.turns()
    assert all(servers.registered(address) for address in ADDRESSES)
    for peer in servers.peers.values():
        assert peer.connection._in_flight is not None
        assert len(peer.connection._in_flight) == 0


async def test_any_surprise_is_said_once_and_ends_nothing(
    registration: Registrar, servers: NameServers, loop: SteppedLoop, logged: list[Any], monkeypatch: Any
) -> None:
    surprised = registration._servers[0]

    async def surprise() -> Connection:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(surprised, "_connected", surprise)
    registration.start()
    await servers.turns()
    for _ in range(3):
        loop.advance(PERIOD + 1)
        await servers.turns()
    assert [(line["name_server"], line["reason"]) for line in logged] == [("10.0.0.1:1", "ZeroDivisionError: by zero")]
    assert len(servers.registered(ADDRESSES[1])) == 4
    monkeypatch.undo()
    loop.advance(PERIOD + 1)
    await servers.turns()
    assert servers.registered(ADDRESSES[0])


async def test_a_connection_over_which_no_answer_came_is_not_used_again(
    registration: Registrar, servers: NameServers, loop: SteppedLoop
) -> None:
    servers.how[ADDRESSES[0]] = "silent"
    registration.start()
    await servers.turns()
    first = servers.peers[ADDRESSES[0]]
    loop.advance(ANSWER_SECONDS + 0.1)
    await servers.turns()
    assert first.transport.is_closing()
    servers.how.clear()
    loop.advance(PERIOD)
    await servers.turns()
    assert servers.peers[ADDRESSES[0]] is not first


async def test_those_that_can_be_reached_are_told_of_the_end(
    registration: Registrar, servers: NameServers, loop: SteppedLoop
) -> None:
    servers.how[ADDRESSES[1]] = "hangs"
    registration.start()
    await servers.turns()
    waiting = registration.register_now()
    stopping = asyncio.ensure_future(registration.stop())
    await servers.turns()
    assert stopping.done()
    assert waiting.done()
    for address in (ADDRESSES[0], ADDRESSES[2]):
        assert servers.peers[address].requests[-1].code == RequestCode.UNREGISTER_BROKER
        assert servers.peers[address].transport.is_closing()


async def test_with_keys_the_requests_to_name_servers_are_signed(servers: NameServers, topics: FakeTopics) -> None:
    keys = ("inner", "canary-secret-of-inner")
    identity = BrokerIdentity("broker-a", "10.0.0.1:10911", "DefaultCluster", 0)
    made = Registrar(
        identity,
        ADDRESSES[:1],
        cast("Topics", topics),
        period=PERIOD,
        connect=servers.connect,
        signer=Signer(*keys),
    )
    made.start()
    await servers.turns()
    stopping = asyncio.ensure_future(made.stop())
    await servers.turns()
    await stopping
    received = servers.peers[ADDRESSES[0]].requests
    assert [each.code for each in received] == [RequestCode.REGISTER_BROKER, RequestCode.UNREGISTER_BROKER]
    for each in received:
        assert each.ext["AccessKey"] == "inner"
        assert each.ext["Signature"] == signature(each.ext, bytes(each.body), keys[1])
