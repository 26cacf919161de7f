"""Tests that run at the same time, since they spend most of their time waiting: for processes, for timers, for clients
that try again.

A fixture of a folder, in its conftest.py, starts the folder's tests as soon as pytest comes to the first of them, a few
at a time, each with fixtures of its own. Each test then awaits its own outcome. They may share a broker and clients if
each has topics and groups of its own; a test that changes more has the decorator `alone`.
"""

import asyncio
import inspect
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import pytest
import pytest_asyncio

from duemq import Producer
from tests.interop.environment import BrokerFactory, ClientPool, MqAdmins, Peers, SharedBroker, Together
from tests.interop.support import make_topic
from tests.peers.brokers.broker import Broker
from tests.peers.clients import unique

Test = TypeVar("Test", bound=Callable[..., Awaitable[None]])
MakeFixtures = Callable[[set[str], Mapping[str, Any], Path], AbstractAsyncContextManager[Mapping[str, object]]]
"""Makes the fixtures of one test that have these names. It gets the test's parameters, and a directory that nobody else
uses."""

BEGAN = pytest.StashKey[float]()
"""The time at which a test began, seconds since the epoch, if that was not when pytest came to it."""
_ROOM = 8
"""Most tests with the shared broker that run at the same time."""
_ALONE = set[Callable[..., Awaitable[None]]]()


def alone(test: Test) -> Test:
    """Let a test run when the others that run at the same time have ended, since it changes what they use."""
    _ALONE.add(test)
    return test


class AtOnce:
    """Runs tests at the same time, `room` of them at most, in the order in which they were given. As a context manager
    it ends with none running."""

    def __init__(self, room: int, new_directory: Callable[[], Path], fixtures: MakeFixtures) -> None:
        self._room = asyncio.Semaphore(room)
        self._new_directory = new_directory
        self._fixtures = fixtures
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, items: Iterable[pytest.Function]) -> None:
        """Start the tests. When pytest comes to one, it awaits the outcome."""
        for item in items:
            if item.function in _ALONE:
                item.obj = partial(self._when_others_have_ended, item.obj)
            else:
                task = asyncio.create_task(self._run(item, item.obj))
                self._tasks.append(task)
                item.obj = partial(_outcome, task)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancel the tests whose outcome nobody awaited."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, item: pytest.Function, test: Callable[..., Awaitable[None]]) -> None:
        async with self._room:
            item.stash[BEGAN] = time.time()
            directory = self._new_directory()
            async with self._fixtures(names(test), parameters(item), directory) as made:
                await test(**{name: made[name] for name in names(test)})
            shutil.rmtree(directory)

    async def _when_others_have_ended(self, test: Callable[..., Awaitable[None]], **given: object) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await test(**given)


async def _outcome(task: asyncio.Task[None], **_: object) -> None:
    await task


def names(test: Callable[..., object]) -> set[str]:
    """The names of a test's fixtures and parameters."""
    return set(inspect.signature(test).parameters)


def parameters(item: pytest.Function) -> dict[str, Any]:
    """The parameters of a test, by name."""
    return dict(item.callspec.params) if hasattr(item, "callspec") else {}


def tests_of(request: pytest.FixtureRequest, folder: Path, *modules: str) -> list[pytest.Function]:
    """The tests of modules in a folder, or of all, that are coroutines."""
    return [
        item
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and folder in item.path.parents
        and (not modules or item.path.stem in modules)
        and inspect.iscoroutinefunction(item.obj)
    ]


@dataclass
class Fixtures:
    """Makes the fixtures of tests with the shared broker and with brokers of their own. `others`: further fixtures, of
    which the tests have none to themselves."""

    shared_broker: SharedBroker
    clients: ClientPool
    mqadmins: MqAdmins | None = None
    peers: Peers | None = None
    others: Mapping[str, object] = field(default_factory=dict)

    @asynccontextmanager
    async def make(
        self, wanted: set[str], given: Mapping[str, Any], directory: Path
    ) -> AsyncIterator[Mapping[str, object]]:
        """Make the fixtures of a test."""
        java = await self.clients.java("4.9.7")
        made: dict[str, object] = {
            "target": self.shared_broker.target,
            "clients": self.clients,
            "mqadmins": self.mqadmins,
            "java": java,
            "tmp_path": directory,
            **self.others,
            **given,
        }
        if "client" in wanted:
            made["client"] = await self.clients.get(given["client"])
        if "client_name" in wanted:
            made["together"] = Together([given["client_name"]])
        async with AsyncExitStack() as stack:
            if "brokers" in wanted:
                brokers = made["brokers"] = BrokerFactory(self.shared_broker.target, directory)
                stack.push_async_callback(brokers.close)
            if wanted & {"broker", "topic", "new_topic", "admin", "peer"}:
                broker = await self._broker(given)
                admin = java.admin(broker.nameserver)
                new_topic = partial(make_topic, admin, broker)
                made |= {"broker": broker, "peer": broker, "admin": admin, "new_topic": new_topic}
                topic = made["topic"] = await new_topic() if wanted & {"topic", "consumer"} else ""
                if "producer" in wanted:
                    made["producer"] = await stack.enter_async_context(Producer(broker.nameserver))
                if "consumer" in wanted:
                    consumer = await java.consumer(broker.nameserver, unique("group"), topic)
                    made["consumer"] = await stack.enter_async_context(consumer)
            yield made

    async def _broker(self, given: Mapping[str, Any]) -> Broker:
        if "peer" in given:
            assert self.peers is not None
            return await self.peers.get(given["peer"])
        return await self.shared_broker.running()


def at_once_with_shared_broker(folder: Path, *modules: str) -> Callable[..., AsyncIterator[None]]:
    """Return the fixture for the conftest.py of a folder that starts its tests, or those of some modules in it, with
    the shared broker and brokers of their own."""

    @pytest_asyncio.fixture(scope="package", loop_scope="session", autouse=True)
    async def at_once(
        request: pytest.FixtureRequest,
        shared_broker: SharedBroker,
        clients: ClientPool,
        mqadmins: MqAdmins,
        peers: Peers,
        tmp_path_factory: pytest.TempPathFactory,
    ) -> AsyncIterator[None]:
        fixtures = Fixtures(shared_broker, clients, mqadmins, peers)
        async with AtOnce(_ROOM, partial(tmp_path_factory.mktemp, folder.name), fixtures.make) as running:
            if shared_broker.target == "duemq":  # one of Apache's has to make room for other brokers
                running.start(tests_of(request, folder, *modules))
            yield
        await peers.close()

    return at_once
