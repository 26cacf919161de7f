"""Runs the tests of producers and delays some at a time."""

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from tests.interop.at_once import AtOnce, Fixtures, tests_of
from tests.interop.environment import ClientPool, MqAdmins, Peers, SharedBroker

_ROOM = 8


@pytest_asyncio.fixture(scope="package", loop_scope="session", autouse=True)
async def _at_once(
    request: pytest.FixtureRequest,
    shared_broker: SharedBroker,
    clients: ClientPool,
    mqadmins: MqAdmins,
    peers: Peers,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[None]:
    fixtures = Fixtures(shared_broker, clients, mqadmins, peers)
    async with AtOnce(_ROOM, partial(tmp_path_factory.mktemp, "send"), fixtures.make) as at_once:
        if shared_broker.target == "duemq":  # one of Apache's has to make room for other brokers
            at_once.start(tests_of(request, Path(__file__).parent))
        yield
    await peers.close()
