"""The clock of a cluster, moved by a test of an application with delayed messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from click.testing import CliRunner

from duemq import cli
from duemq.errors import ArgumentError, ConnectError, NoPermissionError, NotSupportedError
from duemq.protocol.codes import RequestCode, ResponseCode
from duemq.protocol.requests import bodies
from duemq.protocol.requests.bodies import BrokerData
from duemq.protocol.requests.headers import MoveClockResponse, response
from duemq.testing import TestClock
from tests.unit.duemq.cli.test_cli import Threaded
from tests.unit.duemq.fake import NOW_MS, FakeBroker, Request


class Clocked(FakeBroker):
    """A broker of a cluster with these `brokers`, whose clock can be moved."""

    ahead_ms = 0

    def move_as_told(self) -> None:
        def cluster(_: Request) -> Any:
            brokers = [BrokerData({0: broker.address}, broker.name, "c") for broker in self.brokers]
            return response(
                ResponseCode.SUCCESS, body=bodies.cluster_info(brokers, {"c": [b.name for b in self.brokers]})
            )

        def move(request: Request) -> Any:
            self.ahead_ms += int(request.ext["advanceMillis"])
            return response(ResponseCode.SUCCESS, None, MoveClockResponse(NOW_MS + self.ahead_ms))

        self.on(RequestCode.GET_BROKER_CLUSTER_INFO, cluster)
        self.on(RequestCode.MOVE_CLOCK, move)


@pytest.fixture
async def cluster() -> AsyncIterator[list[Clocked]]:
    async with Clocked(name="broker-b") as second, Clocked(name="broker-a") as first:
        first.brokers = [first, second]
        for broker in first, second:
            broker.move_as_told()
        yield [first, second]


@pytest.fixture
def clock(cluster: list[Clocked]) -> TestClock:
    return TestClock(cluster[0].address)


@pytest.mark.parametrize(
    ("arguments", "ms"),
    [
        ({"by": "2h"}, 7_200_000),
        ({"by": "1h30m"}, 5_400_000),
        ({"by": timedelta(minutes=1)}, 60_000),
        ({"ms": 250}, 250),
        ({"ms": 0}, 0),
    ],
)
async def test_all_brokers_are_moved(
    cluster: list[Clocked], clock: TestClock, arguments: dict[str, Any], ms: int
) -> None:
    now = await clock.advance(**arguments)
    assert [broker.ahead_ms for broker in cluster] == [ms, ms]
    assert now == datetime.fromtimestamp((NOW_MS + ms) / 1000, UTC)
    assert await clock.now() == now


async def test_the_earliest_of_their_times_is_told(cluster: list[Clocked], clock: TestClock) -> None:
    cluster[1].ahead_ms = 5
    assert await clock.now() == datetime.fromtimestamp(NOW_MS / 1000, UTC)


async def test_where_one_cannot_be_moved_none_is(cluster: list[Clocked], clock: TestClock) -> None:
    cluster[1].on(RequestCode.MOVE_CLOCK, response(ResponseCode.NO_PERMISSION, "it cannot be moved"))
    with pytest.raises(NoPermissionError, match="it cannot be moved"):
        await clock.advance("2h")
    assert cluster[0].ahead_ms == 0


async def test_a_broker_that_is_no_duemq_is_told_so(cluster: list[Clocked], clock: TestClock) -> None:
    cluster[1].on(RequestCode.MOVE_CLOCK, response(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, "request type 30001"))
    with pytest.raises(NotSupportedError):
        await clock.advance("2h")


async def test_a_name_server_without_brokers_is_said_to_be(cluster: list[Clocked], clock: TestClock) -> None:
    cluster[0].brokers = []
    with pytest.raises(ConnectError, match="knows no broker"):
        await clock.now()


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"by": "2h", "ms": 1},
        {"by": "2"},
        {"by": 7200},
        {"by": timedelta(seconds=-1)},
        {"ms": -1},
        {"ms": 1.5},
        {"ms": True},
    ],
)
async def test_a_time_span_has_a_unit_and_goes_forward(
    cluster: list[Clocked], clock: TestClock, arguments: dict[str, Any]
) -> None:
    with pytest.raises(ArgumentError):
        await clock.advance(**arguments)
    assert cluster[0].requests == []


# --- the command line


@pytest.fixture
def nameserver() -> Iterator[Clocked]:
    broker = Clocked()
    with Threaded(broker):
        broker.move_as_told()
        yield broker


def test_the_command_moves_the_clock_and_tells_the_time(nameserver: Clocked) -> None:
    result = CliRunner().invoke(cli.main, ["clock", "advance", "2h", "--nameserver", nameserver.address])
    assert (result.exit_code, result.stderr) == (0, "")
    assert nameserver.ahead_ms == 7_200_000
    told = datetime.strptime(result.stdout.removeprefix("the brokers' clock is now ").strip(), "%Y-%m-%d %H:%M:%S.%f")
    assert told.astimezone() == datetime.fromtimestamp((NOW_MS + 7_200_000) / 1000, UTC)


def test_the_command_says_in_one_line_why_it_could_not(nameserver: Clocked) -> None:
    nameserver.on(RequestCode.MOVE_CLOCK, response(ResponseCode.NO_PERMISSION, "start one with --set testClock=true"))
    result = CliRunner().invoke(cli.main, ["clock", "advance", "2h", "--nameserver", nameserver.address])
    assert result.exit_code == 1
    assert "testClock=true" in result.stderr
    assert result.stderr.count("\n") == 1
    assert CliRunner().invoke(cli.main, ["clock", "advance", "soon"]).exit_code == 2
