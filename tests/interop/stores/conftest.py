"""Fixtures of the tests of stores that change hands, which run some at a time."""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from tests.interop.at_once import BEGAN, AtOnce, Fixtures, names, parameters, tests_of
from tests.interop.environment import ClientPool, Peers, SharedBroker, make_broker
from tests.interop.stores.apache_stores import ApacheStores
from tests.interop.stores.restarts import PROPERTIES, Witness, restart

_HERE = Path(__file__).parent
_ROOM = 6
"""Each has one broker of Apache's at a time, which takes a processor for some seconds when it starts."""


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def apache_stores(clients: ClientPool, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ApacheStores]:
    """Stores of Apache's brokers, each written on first use. Tests work on copies."""
    directory = tmp_path_factory.mktemp("apache_stores")
    yield ApacheStores(directory, clients)
    shutil.rmtree(directory)


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def restarts(
    request: pytest.FixtureRequest,
    shared_broker: SharedBroker,
    clients: ClientPool,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[dict[str, asyncio.Task[dict[str, Witness]]]]:
    """Restarts of brokers, each started if a test is about it."""
    items = tests_of(request, _HERE, "test_restart")
    for item in items:
        item.stash[BEGAN] = time.time()
    hows = {str(parameters(item)["witnesses"]) for item in items}
    await shared_broker.make_room()
    brokers = {how: make_broker(shared_broker.target, tmp_path_factory.mktemp(how), PROPERTIES) for how in hows}
    tasks = {how: asyncio.create_task(restart(broker, clients, how)) for how, broker in brokers.items()}
    yield tasks
    for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    for broker in brokers.values():
        if broker.running:
            await broker.kill()


@pytest_asyncio.fixture(scope="package", loop_scope="session", autouse=True)
async def _at_once(
    request: pytest.FixtureRequest,
    shared_broker: SharedBroker,
    peers: Peers,
    clients: ClientPool,
    apache_stores: ApacheStores,
    restarts: dict[str, asyncio.Task[dict[str, Witness]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[None]:
    """Start the tests whose brokers are their own, beside the restarts. Those with timers are the longest, so they come
    first."""
    await shared_broker.make_room()
    await peers.close()  # brokers of Apache's that nobody uses any more take a fifth of a processor
    fixtures = Fixtures(shared_broker, clients, others={"apache_stores": apache_stores})
    able = [item for item in tests_of(request, _HERE) if not names(item.function) & {"filled", "witness"}]
    async with AtOnce(_ROOM, partial(tmp_path_factory.mktemp, "stores"), fixtures.make) as at_once:
        at_once.start(sorted(able, key=lambda item: item.path.stem != "test_timer_store"))
        yield
