"""What keeps a client going: tasks that begin anew, peers that stop answering, starts that are tried again."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from duemq import (
    Admin,
    BrokerFailureError,
    ClosedError,
    ConnectError,
    Producer,
    ReceivedMessage,
    RequestTimeoutError,
)
from duemq._net.client import Client, Tasks
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.frames.command import Command
from duemq.protocol.requests.bodies import HeartbeatData
from tests.unit.duemq.conftest import INTERVALS
from tests.unit.duemq.consuming.test_consumer import MEMBERS, bodies, make_consumer, take
from tests.unit.duemq.fake import HANDLERS, FakeBroker, Request, failure

BEAT, ROUTE = RequestCode.HEART_BEAT, RequestCode.GET_ROUTEINFO_BY_TOPIC
OFTEN = replace(INTERVALS, heartbeat=0.01, silence=0.01, lock=0.01, rebalance=0.01)


class Once:
    """Fails the first call of a method, and passes the others on."""

    def __init__(self, owner: Any, name: str, error: BaseException) -> None:
        self._error: BaseException | None = error
        self._method = getattr(owner, name)
        self.calls = 0
        setattr(owner, name, self)

    def __call__(self, *args: Any, **options: Any) -> Any:
        error, self._error = self._error, None
        if error is not None:
            raise error
        self.calls += 1
        return self._method(*args, **options)


WORK: dict[str, tuple[Callable[[Any], Any], str]] = {
    "duemq rebalance": (lambda consumer: consumer._member._change, "clear"),
    "duemq commits": (lambda consumer: consumer._member, "commit"),
    "duemq locks": (lambda consumer: consumer._member._locks, "lock"),
    "duemq heartbeats": (lambda consumer: consumer._member._client.routes, "refresh"),
    "duemq looks for silent brokers": (lambda consumer: consumer._member._client._brokers, "silent"),
    "duemq reader demo@broker-a:0": (lambda consumer: next(iter(consumer._member._readers.values()))[0], "_step"),
    "duemq g": (lambda consumer: consumer._inbox, "get"),
}


class Failed(BaseException):
    """As pytest.fail raises it: no Exception."""


@pytest.mark.parametrize(
    "error", [RuntimeError("injected"), asyncio.CancelledError(), Failed()], ids=["error", "cancelled", "failed"]
)
@pytest.mark.parametrize("name", WORK)
async def test_no_background_task_dies_silently(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture, name: str, error: BaseException
) -> None:
    """Whatever a background task fails with is logged, and the task is restarted. A task that something else cancels,
    which it awaits, must not end with it."""
    broker.topics["demo"] = 1
    seen: asyncio.Queue[bytes] = asyncio.Queue()

    async def on_message(message: ReceivedMessage) -> None:
        seen.put_nowait(message.body)

    async with make_consumer(broker, on_message, ordered=True, concurrency=1, _intervals=OFTEN) as consumer:
        await broker.store("demo", b"before")
        assert await seen.get() == b"before"
        find, method = WORK[name]
        injected = Once(find(consumer), method, error)
        async with asyncio.timeout(10):
            number = 0
            while injected.calls < 3:
                await broker.store("demo", b"%d" % number)
                assert await seen.get() == b"%d" % number
                number += 1
        running = {task.get_name() for task in asyncio.all_tasks()}
        assert name in running
    assert f"the task {name} failed, and is restarted" in caplog.text or "cannot read" in caplog.text


async def test_a_supervised_task_begins_anew_until_it_returns(caplog: pytest.LogCaptureFixture) -> None:
    tasks, times, done = Tasks(), 0, asyncio.Event()

    async def fail() -> None:
        nonlocal times
        times += 1
        if times == 4:
            done.set()
            return
        raise RuntimeError("broken")

    tasks.supervise(fail, "a name", INTERVALS)
    await done.wait()
    await tasks.close()
    assert caplog.text.count("the task a name failed, and is restarted") == 3


# --- peers that stop answering and close nothing ----------------------------------------------------------------


def fall_silent(broker: FakeBroker) -> None:
    """Answer nothing more over the present connections, as a machine that is gone, or a process that hangs."""
    deaf = list(broker.connections)
    for code, handler in list(HANDLERS.items()):

        def answer(request: Request, handler: Any = handler) -> Any:
            return None if request.connection in deaf else handler(broker, request)

        broker.overrides[code] = answer


async def test_a_broker_that_stops_answering_is_connected_anew_within_moments(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """Held pulls are answered late at best: without another sign of life the reading would wait for their time-out,
    a minute here, and a request of another kind would find out only when it is made."""
    broker.topics["demo"] = 1
    await broker.store("demo", b"a")
    async with make_consumer(broker, _intervals=replace(INTERVALS, silence=0.02, request_timeout=0.5)) as consumer:
        await (await take(consumer, 1))[0].ack()
        fall_silent(broker)
        await broker.store("demo", b"b")
        assert bodies(await take(consumer, 1)) == [b"b"]
    assert "dropping the connection" in caplog.text


async def test_a_silent_broker_of_which_nothing_is_asked_is_left_alone(broker: FakeBroker) -> None:
    client = Client(broker.address, codec="auto", heartbeat=HeartbeatData, intervals=replace(INTERVALS, silence=0.001))
    await client.start()
    connection = await client.broker(broker.address)
    await asyncio.sleep(0.02)
    assert len(broker.requests_of(BEAT)) == 1
    assert connection.silence == 0
    await client.close()


async def test_a_name_server_that_stops_answering_is_connected_anew(broker: FakeBroker) -> None:
    broker.topics["demo"] = 1
    client = Client(
        broker.address, codec="auto", heartbeat=HeartbeatData, intervals=replace(INTERVALS, request_timeout=0.5)
    )
    await client.start()
    await client.routes.find("demo")
    fall_silent(broker)
    with pytest.raises(RequestTimeoutError):
        await client.routes.find("other")
    broker.topics["other"] = 1
    await client.routes.find("other")
    await client.close()


async def test_idle_connections_are_kept_alive_by_the_system(broker: FakeBroker) -> None:
    client = Client(broker.address, codec="auto", heartbeat=HeartbeatData, intervals=INTERVALS)
    await client.start()
    connection = await client.broker(broker.address)
    assert connection._transport is not None
    found = connection._transport.get_extra_info("socket")
    assert found.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 10
    await client.close()


# --- starts -----------------------------------------------------------------------------------------------------


async def test_a_start_without_a_name_server_can_be_tried_again() -> None:
    async with FakeBroker() as gone:
        port = int(gone.address.rpartition(":")[2])
    consumer = make_consumer(gone)
    with pytest.raises(ConnectError):
        await consumer.start()
    with pytest.raises(ClosedError, match="start the consumer first"):
        await consumer.receive()
    async with FakeBroker(port=port) as broker:
        await broker.store("demo", b"a")
        async with consumer:
            assert bodies(await take(consumer, 1)) == [b"a"]


async def test_a_start_that_failed_half_way_leaves_nothing_behind(broker: FakeBroker) -> None:
    await broker.store("demo", b"a")
    before = asyncio.all_tasks()
    broker.on(ROUTE, failure(ResponseCode.SYSTEM_ERROR))
    consumer = make_consumer(broker)
    with pytest.raises(BrokerFailureError):
        await consumer.start()
    await broker.until(lambda: not broker.connections)
    assert asyncio.all_tasks() - broker.tasks == before - broker.tasks
    del broker.overrides[ROUTE]
    async with consumer:
        assert bodies(await take(consumer, 1)) == [b"a"]
        assert broker.requests_of(MEMBERS)


async def test_a_start_that_is_cancelled_can_be_tried_again(broker: FakeBroker) -> None:
    await broker.store("demo", b"a")
    asked = asyncio.Event()

    async def never(_: Request) -> Command | None:
        asked.set()
        await asyncio.Event().wait()
        return None

    broker.on(ROUTE, never)
    consumer = make_consumer(broker)
    starting = asyncio.create_task(consumer.start())
    await asked.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    del broker.overrides[ROUTE]
    async with consumer:
        assert bodies(await take(consumer, 1)) == [b"a"]


@pytest.mark.parametrize("kind", [Producer, Admin])
async def test_what_is_closed_while_it_starts_does_not_run(broker: FakeBroker, kind: type[Producer | Admin]) -> None:
    before = asyncio.all_tasks()
    client = kind(broker.address, _intervals=INTERVALS)
    check, began, go_on = client._client._nameservers.check, asyncio.Event(), asyncio.Event()

    async def check_later(*, timeout: float) -> None:
        await check(timeout=timeout)
        began.set()
        await go_on.wait()

    client._client._nameservers.check = check_later  # type: ignore[method-assign]
    starting = asyncio.create_task(client.start())
    await began.wait()
    await client.close()
    go_on.set()
    with pytest.raises(ClosedError):
        await starting
    await broker.until(lambda: not broker.connections)
    assert asyncio.all_tasks() - broker.tasks == before - broker.tasks
