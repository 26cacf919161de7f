from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from tests.support import canary
from tests.support.broker import Peer, UnboundBroker, running
from tests.support.loop import SteppedLoop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run every test here in a loop whose time the test advances."""
    return {"stepped": SteppedLoop}


@pytest.fixture
async def loop() -> SteppedLoop:
    return cast("SteppedLoop", asyncio.get_running_loop())


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[UnboundBroker]:
    async with running(tmp_path) as started:
        yield started


@pytest.fixture
async def peer(broker: UnboundBroker) -> Peer:
    return broker.connect()


@pytest.fixture
def logged() -> Any:
    """The logged lines."""
    with capture_logs() as lines:
        yield lines
    canary.look("the log", str(lines))
