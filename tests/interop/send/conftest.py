"""Fixtures of the tests of producers and delays, which run some at a time."""

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from tests.interop.at_once import AtOnce, Fixtures, tests_of
from tests.interop.environment import LEVELS, ClientPool, MqAdmins, Peers, SharedBroker

_HERE = Path(__file__).parent
_ROOM = 8


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def peers(shared_broker: SharedBroker, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Peers]:
    """A broker of each kind, for tests of duemq's own client."""
    await shared_broker.make_room()
    peers = Peers(tmp_path_factory.mktemp("peers"), {"messageDelayLevel": LEVELS, "recallMessageEnable": "true"})
    yield peers
    await peers.close()


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
    run = AtOnce(_ROOM, partial(tmp_path_factory.mktemp, "send"), fixtures.make)
    # A broker of Apache's under test has to make room for others.
    if shared_broker.target == "duemq":
        run.start(tests_of(request, _HERE))
    yield
    await run.close()
