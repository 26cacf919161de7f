"""Fixtures of the interop tests: the broker under test, the clients, and brokers of a test's own.

`--target duemq` (the default) tests duemq. `--target apache-4.9.7` and `--target apache-5.3.3` run the same tests on
Apache's brokers, which shows that they state RocketMQ's behaviour and not duemq's.

All tests and fixtures share one event loop, since broker and clients live for the session.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from duemq import Producer
from tests.interop.at_once import BEGAN
from tests.interop.environment import TARGETS, BrokerFactory, ClientPool, MqAdmins, Peers, SharedBroker, Together
from tests.interop.support import make_topic
from tests.peers.admin import Admin
from tests.peers.brokers.broker import Broker
from tests.peers.brokers.process import Process
from tests.peers.capabilities import CLIENTS
from tests.peers.clients import Client, JavaClient

_HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--target", choices=TARGETS, default="duemq", help="the broker that the interop tests test")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.interop)
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


_began: dict[Path, float] = {}
"""Time at which the first test of a file began, seconds since the epoch."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    _began.setdefault(item.path, time.time())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show, for a failing test, the logs of the brokers that ran since the first test of its file began: some tests
    share brokers. For one that began before pytest came to it, those since then."""
    report = yield
    if report.failed and item.path in _began and _HERE in item.path.parents:
        report.sections += list(Process.logs_since(item.stash.get(BEGAN, _began[item.path])))
    return report


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> str:
    """The kind of broker under test."""
    return str(request.config.getoption("--target", default="duemq"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_broker(target: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SharedBroker]:
    """The broker of the session, not necessarily running."""
    shared = SharedBroker(target, tmp_path_factory.mktemp("broker"))
    yield shared
    await shared.close()


@pytest_asyncio.fixture(loop_scope="session")
async def broker(shared_broker: SharedBroker) -> Broker:
    """The broker of the session, running."""
    return await shared_broker.running()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def peers(shared_broker: SharedBroker, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Peers]:
    """A broker of each kind, each started on first use."""
    peers = Peers(shared_broker, tmp_path_factory.mktemp("peers"))
    yield peers
    await peers.close()


@pytest_asyncio.fixture(loop_scope="session", params=TARGETS)
async def peer(peers: Peers, request: pytest.FixtureRequest) -> Broker:
    """A broker of each kind in turn."""
    return await peers.get(str(request.param))


@pytest_asyncio.fixture(loop_scope="session")
async def producer(peer: Broker) -> AsyncIterator[Producer]:
    """duemq's own producer."""
    async with Producer(peer.nameserver) as producer:
        yield producer


@pytest_asyncio.fixture(loop_scope="session")
async def brokers(shared_broker: SharedBroker, tmp_path: Path) -> AsyncIterator[BrokerFactory]:
    """A factory for brokers of this test's own."""
    await shared_broker.make_room()
    factory = BrokerFactory(shared_broker.target, tmp_path)
    yield factory
    await factory.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def clients(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ClientPool]:
    """The client processes, each started on first use."""
    pool = ClientPool(tmp_path_factory.mktemp("clients"))
    yield pool
    await pool.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def mqadmins(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MqAdmins]:
    """mqadmin of both versions, each started with its first command."""
    tools = MqAdmins(tmp_path_factory.mktemp("mqadmin"))
    yield tools
    await tools.close()


@pytest_asyncio.fixture(loop_scope="session", params=CLIENTS)
async def client(clients: ClientPool, request: pytest.FixtureRequest) -> Client:
    """Each client in turn."""
    return await clients.get(str(request.param))


@pytest.fixture(params=CLIENTS)
def client_name(request: pytest.FixtureRequest) -> str:
    """Each client's name in turn, for tests whose scenarios run together."""
    return str(request.param)


@pytest_asyncio.fixture(loop_scope="session")
async def java(clients: ClientPool) -> JavaClient:
    """The Java client 4.9.7, for inspecting a broker from outside."""
    return await clients.java("4.9.7")


@pytest_asyncio.fixture(loop_scope="session")
async def admin(java: JavaClient, broker: Broker) -> Admin:
    """The admin API of the broker of the session."""
    return java.admin(broker.nameserver)


@pytest.fixture
def new_topic(admin: Admin, broker: Broker) -> Callable[[int], Awaitable[str]]:
    """Makes a topic with a number of queues."""
    return partial(make_topic, admin, broker)


@pytest_asyncio.fixture(loop_scope="session")
async def topic(new_topic: Callable[[int], Awaitable[str]]) -> str:
    """A topic of this test's own, with four queues."""
    return await new_topic(4)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def together(request: pytest.FixtureRequest) -> AsyncIterator[Together]:
    """Scenarios that run for all clients at once; see Together."""
    names = {str(item.callspec.params["client_name"]) for item in _items_of(request)}
    run = Together([name for name in CLIENTS if name in names])
    yield run
    await run.close()


def _items_of(request: pytest.FixtureRequest) -> list[pytest.Function]:
    return [
        item
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == request.path
        and "client_name" in getattr(getattr(item, "callspec", None), "params", {})
    ]
