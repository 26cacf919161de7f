from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from msgspec.structs import replace

from duemq import BrokerError, ClosedError, PeerError
from duemq._net.client import Client, Tasks, typed_body, typed_header
from duemq._net.pool import Pool
from duemq._values.intervals import Intervals
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames.command import Command
from duemq.protocol.requests.bodies import HeartbeatData, TopicRoute
from duemq.protocol.requests.headers import OffsetResponse
from tests.unit.duemq.conftest import INTERVALS
from tests.unit.duemq.fake import FakeBroker, failure, success

BEAT = RequestCode.HEART_BEAT
ROUTE = RequestCode.GET_ROUTEINFO_BY_TOPIC
CONFIG = RequestCode.GET_BROKER_CONFIG

Open = Callable[..., Any]


@pytest.fixture
async def open_(broker: FakeBroker) -> AsyncIterator[Open]:
    """Start clients, and close them at the end."""
    clients: list[Client] = []

    async def open_one(intervals: Intervals = INTERVALS) -> Client:
        client = Client(broker.address, codec="auto", heartbeat=HeartbeatData, intervals=intervals)
        clients.append(client)
        await client.start()
        return client

    yield open_one
    for client in clients:
        await client.close()


async def test_clients_have_ids_of_their_own(open_: Open) -> None:
    assert len({(await open_()).client_id for _ in range(3)}) == 3


async def test_from_time_to_time_brokers_get_a_heartbeat_and_routes_are_refreshed(
    broker: FakeBroker, open_: Open
) -> None:
    broker.topics["demo"] = 1
    client = await open_(replace(INTERVALS, heartbeat=0.001))
    await client.routes.find("demo")
    await client.broker(broker.address)
    await broker.until(lambda: len(broker.requests_of(BEAT)) >= 3 and len(broker.requests_of(ROUTE)) >= 3)


async def test_a_broker_that_does_not_answer_a_heartbeat_is_connected_anew(broker: FakeBroker, open_: Open) -> None:
    broker.on(BEAT, success(), None, success())
    client = await open_(replace(INTERVALS, request_timeout=1.0))
    first = await client.broker(broker.address)
    await client.beat([broker.address])
    assert not first.is_open
    assert await client.broker(broker.address) is not first


async def test_a_heartbeat_that_is_refused_fails_the_connecting_but_not_the_others(
    broker: FakeBroker, open_: Open, caplog: pytest.LogCaptureFixture
) -> None:
    broker.on(BEAT, failure(ResponseCode.SYSTEM_ERROR, "no access"))
    client = await open_()
    with pytest.raises(BrokerError, match="no access"):
        await client.broker(broker.address)
    for _ in range(3):
        await client.beat([broker.address])
    assert caplog.text.count(f"heartbeats to {broker.address}: ") == 1
    assert "no access" in caplog.text
    assert client.broker_addresses == []
    broker.on(BEAT, success())
    await client.beat([broker.address])
    assert f"heartbeats to {broker.address}: resolved" in caplog.text


async def test_a_call_gives_the_answers_that_were_expected(broker: FakeBroker, open_: Open) -> None:
    client = await open_()
    broker.on(CONFIG, failure(ResponseCode.QUERY_NOT_FOUND))
    assert (await client.call(broker.address, CONFIG, expected=(22,))).code == 22
    with pytest.raises(BrokerError):
        await client.call(broker.address, CONFIG)


async def test_a_closed_client_opens_no_connection(broker: FakeBroker, open_: Open) -> None:
    client = await open_()
    await client.close()
    with pytest.raises(ClosedError):
        await client.broker(broker.address)


async def test_a_connection_that_is_being_opened_at_the_close_is_closed(broker: FakeBroker) -> None:
    go_on = asyncio.Event()
    client = Client(broker.address, codec="json", heartbeat=HeartbeatData)

    async def open_slowly(address: str) -> Any:
        await go_on.wait()
        return await client._connect(address)

    pool = Pool(open_slowly)
    opening = asyncio.create_task(pool.get(broker.address))
    await asyncio.sleep(0)
    await pool.close()
    go_on.set()
    with pytest.raises(ClosedError):
        await opening
    await broker.until(lambda: not broker.connections)


async def test_a_task_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise RuntimeError("broken")

    tasks = Tasks()
    with caplog.at_level(logging.ERROR):
        task = tasks.start(fail(), "a name")
        await asyncio.wait([task])
        await asyncio.sleep(0)
    assert "the task a name failed" in caplog.text
    await tasks.close()


def test_answers_of_the_wrong_form_are_the_peers_fault() -> None:
    with pytest.raises(PeerError, match="h:1 broke the protocol: the header field offset"):
        typed_header(Command(code=0, ext={"offset": "x"}), OffsetResponse, "h:1")
    with pytest.raises(PeerError, match="h:1 broke the protocol: a TopicRoute body"):
        typed_body(Command(code=0, body=b"{}"), TopicRoute, "h:1")
