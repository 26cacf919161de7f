"""Fixtures of the tests of the MQTT bridge."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.interop.mqtt.environment import World, mosquitto_program

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if mosquitto_program() is None:
        for item in items:
            if _HERE in item.path.parents:
                item.add_marker(pytest.mark.skip("no Mosquitto here: apt-get install mosquitto mosquitto-clients"))


@pytest_asyncio.fixture(loop_scope="session")
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """Mosquitto, a broker and a bridge of the test's own, not started."""
    made = World(tmp_path)
    yield made
    await made.close()
