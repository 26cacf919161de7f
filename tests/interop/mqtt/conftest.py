"""Fixtures of the tests of the MQTT bridge, which run some at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from tests.interop.at_once import AtOnce, tests_of
from tests.interop.mqtt.environment import World

_ROOM = 4


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Mosquitto, a broker and a bridge of the test's own, not started; they end with the test."""
    return World(tmp_path)


@pytest_asyncio.fixture(scope="package", loop_scope="session", autouse=True)
async def _at_once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[None]:
    async with AtOnce(_ROOM, partial(tmp_path_factory.mktemp, "mqtt"), _fixtures) as at_once:
        at_once.start(tests_of(request, Path(__file__).parent))
        yield


@asynccontextmanager
async def _fixtures(_: set[str], given: Mapping[str, object], directory: Path) -> AsyncIterator[Mapping[str, object]]:
    world = World(directory)
    try:
        yield {**given, "tmp_path": directory, "world": world}
    finally:
        await world.close()
