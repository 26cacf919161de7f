from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from duemq import ArgumentError, BrokerError, ConnectError, MessageQueue, NoRouteError, PeerError, RequestTimeoutError
from duemq._net.connection import ClientConnection, connect
from duemq._net.pool import Pool
from duemq._net.routes import NameServers, RoundRobin, Route, Routes, build_route, parse_nameservers
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.requests.bodies import BrokerData, QueueData, TopicRoute
from tests.unit.duemq.fake import FakeBroker, failure, success

ROUTE = RequestCode.GET_ROUTEINFO_BY_TOPIC


async def open_one(address: str) -> ClientConnection:
    return await connect(address, codec="json", on_request=lambda command: None, timeout=5)


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    pool = Pool(open_one)
    yield pool
    await pool.close()


def answer() -> TopicRoute:
    return TopicRoute(
        broker_datas=[
            BrokerData({0: "b:1", 1: "b:2"}, "b"),
            BrokerData({1: "c:1"}, "c"),
            BrokerData({0: "a:1"}, "a"),
            BrokerData({0: "d:1"}, "d"),
        ],
        queue_datas=[
            QueueData("b", perm=6, read_queue_nums=3, write_queue_nums=2),
            QueueData("c", perm=6, read_queue_nums=1, write_queue_nums=1),
            QueueData("a", perm=4, read_queue_nums=1, write_queue_nums=1),
            QueueData("d", perm=2, read_queue_nums=1, write_queue_nums=1),
        ],
    )


def names(queues: tuple[MessageQueue, ...]) -> list[str]:
    return [f"{queue.broker}{queue.queue_id}" for queue in queues]


def test_a_route_says_where_to_write_and_where_to_read() -> None:
    route = build_route("t", answer())
    assert names(route.write_queues) == ["b0", "b1", "d0"]  # c has no primary, a cannot be written to
    assert names(route.read_queues) == ["a0", "b0", "b1", "b2", "c0"]
    assert route.addresses == {"a:1", "b:1", "b:2", "c:1", "d:1"}


def test_a_topic_to_be_created_has_few_queues() -> None:
    assert names(build_route("t", answer(), most_queues=2).write_queues) == ["b0", "b1", "d0"]


def test_a_replica_is_asked_where_it_is_suggested_or_the_primary_is_gone() -> None:
    route = build_route("t", answer())
    assert [route.address("b"), route.address("b", 1), route.address("b", 7)] == ["b:1", "b:2", "b:1"]
    assert [route.address("c"), route.primary("c"), route.address("x")] == ["c:1", None, None]


def test_queues_are_taken_in_turn() -> None:
    turn, queues = RoundRobin(lambda _: 1), tuple(MessageQueue("t", "b", number) for number in range(3))
    assert [turn.choose(queues).queue_id for _ in range(4)] == [1, 2, 0, 1]


def test_the_broker_that_failed_is_passed_over_if_there_is_another() -> None:
    queues = build_route("t", answer()).write_queues
    turn = RoundRobin(lambda _: 0)
    assert [turn.choose(queues, "b").broker for _ in range(3)] == ["d"] * 3
    assert turn.choose(queues[:2], "b").broker == "b"


def test_name_servers_are_joined_by_semicolons() -> None:
    assert parse_nameservers("a:1;b ;[::1]:5") == ["a:1", "b:9876", "[::1]:5"]
    with pytest.raises(ArgumentError):
        parse_nameservers(" ; ")


async def test_a_route_is_asked_for_once(broker: FakeBroker, pool: Pool) -> None:
    broker.topics["demo"] = 2
    routes = Routes(NameServers(broker.address, pool), 5)
    first = await routes.find("demo")
    assert await routes.find_to_send("demo") is first
    assert len(broker.requests_of(ROUTE)) == 1
    assert routes.known() == [first]


async def test_an_unknown_topic_is_sent_to_the_brokers_that_will_create_it(broker: FakeBroker, pool: Pool) -> None:
    routes = Routes(NameServers(broker.address, pool), 5)
    with pytest.raises(NoRouteError, match="it does not exist"):
        await routes.find("new")
    route = await routes.find_to_send("new")
    assert names(route.write_queues) == ["broker-a0", "broker-a1", "broker-a2", "broker-a3"]
    assert not route.read_queues
    broker.topics["new"] = 1
    assert await routes.find_to_send("new") is route
    await routes.refresh()
    assert len((await routes.find_to_send("new")).write_queues) == 1


async def test_an_unknown_topic_is_an_error_where_nobody_creates_topics(broker: FakeBroker, pool: Pool) -> None:
    broker.auto_create = False
    with pytest.raises(NoRouteError, match="no broker creates topics automatically") as caught:
        await Routes(NameServers(broker.address, pool), 5).find_to_send("new")
    assert caught.value.topic == "new"


async def test_a_topic_without_a_writable_queue_cannot_be_sent_to(broker: FakeBroker, pool: Pool) -> None:
    route = TopicRoute(broker_datas=[BrokerData({0: "a:1"}, "a")], queue_datas=[QueueData("a", 4, 1, 1)])
    broker.on(ROUTE, success(body=route.to_json(strict=True)))
    with pytest.raises(NoRouteError, match="none of its queues can be written to"):
        await Routes(NameServers(broker.address, pool), 5).find_to_send("demo")


async def test_a_refresh_drops_a_deleted_topic_and_keeps_what_cannot_be_asked(broker: FakeBroker, pool: Pool) -> None:
    broker.topics |= {"one": 1, "two": 1}
    routes = Routes(NameServers(broker.address, pool), 5)
    await routes.find("one")
    broker.on(ROUTE, failure(ResponseCode.SYSTEM_ERROR))
    await routes.refresh()
    assert [route.topic for route in routes.known()] == ["one"]
    broker.on(ROUTE, failure(ResponseCode.TOPIC_NOT_EXIST))
    await routes.refresh()
    assert routes.known() == []


async def test_other_answers_of_a_name_server_are_errors(broker: FakeBroker, pool: Pool) -> None:
    routes = Routes(NameServers(broker.address, pool), 5)
    broker.on(ROUTE, failure(ResponseCode.SYSTEM_ERROR, "not ready"), success(body=b"[]"))
    with pytest.raises(BrokerError, match="not ready"):
        await routes.find("demo")
    with pytest.raises(PeerError):
        await routes.find("demo")


@pytest.mark.parametrize("side", ["readQueueNums", "writeQueueNums"])
async def test_a_route_of_more_queues_than_there_can_be_is_an_error(broker: FakeBroker, pool: Pool, side: str) -> None:
    """A route with an impossible number of queues is an error: each queue is an object, and thousands of millions would
    exhaust the client's memory."""
    queues = {"brokerName": "b", "perm": 6, "readQueueNums": 1, "writeQueueNums": 1, side: 2**31 - 1}
    route = {"brokerDatas": [{"brokerName": "b", "brokerAddrs": {"0": "b:1"}}], "queueDatas": [queues]}
    broker.on(ROUTE, success(body=json.dumps(route).encode()))
    with pytest.raises(PeerError, match="2147483647 queues"):
        await Routes(NameServers(broker.address, pool), 5).find("demo")


async def test_the_next_name_server_is_asked_when_one_is_gone(broker: FakeBroker, pool: Pool) -> None:
    broker.topics["demo"] = 1
    async with FakeBroker() as gone:
        servers = NameServers(f"{gone.address};{broker.address}", pool)
        await servers.check(timeout=5)
    routes = Routes(servers, 5)
    assert isinstance(await routes.find("demo"), Route)
    assert servers.addresses[servers._preferred] == broker.address


async def test_the_next_name_server_is_asked_when_one_does_not_answer(broker: FakeBroker, pool: Pool) -> None:
    broker.topics["demo"] = 1
    async with FakeBroker() as silent:
        silent.on(ROUTE, None)
        await Routes(NameServers(f"{silent.address};{broker.address}", pool), 1.0).find("demo")
        # From now on the one that answered is asked first.
        await Routes(NameServers(f"{broker.address};{silent.address}", pool), 1.0).find("demo")
        assert len(silent.requests) == 1


async def test_the_next_name_server_is_asked_when_one_speaks_another_protocol(broker: FakeBroker, pool: Pool) -> None:
    broker.topics["demo"] = 1

    async def greets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()
        writer.close()

    async with await asyncio.start_server(greets, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        await Routes(NameServers(f"127.0.0.1:{port};{broker.address}", pool), 5).find("demo")


async def test_no_name_server_at_all_is_the_last_ones_error(broker: FakeBroker, pool: Pool) -> None:
    broker.on(ROUTE, None)
    async with FakeBroker() as gone:
        address = gone.address
    with pytest.raises(ConnectError):
        await NameServers(f"{address};{address}", pool).check(timeout=5)
    await pool.get(broker.address)  # so that the short time is not that of a connection
    with pytest.raises(RequestTimeoutError):
        await Routes(NameServers(f"{address};{broker.address}", pool), 0.05).find("demo")


async def test_a_pool_opens_one_connection_for_all_and_another_after_a_loss(broker: FakeBroker, pool: Pool) -> None:
    first = await pool.get(broker.address)
    assert await pool.get(broker.address) is first
    assert pool.addresses == [broker.address]
    pool.drop(broker.address)
    assert pool.addresses == []
    assert await pool.get(broker.address) is not first
