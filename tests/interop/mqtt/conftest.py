"""Fixtures of the tests of the MQTT bridge."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.interop.mqtt.environment import World


@pytest_asyncio.fixture(loop_scope="session")
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """Mosquitto, a broker and a bridge of the test's own, not started."""
    made = World(tmp_path)
    yield made
    await made.close()
