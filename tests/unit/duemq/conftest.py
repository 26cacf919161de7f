from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from duemq._values.intervals import Intervals
from tests.unit.duemq.fake import FakeBroker

# No test here waits for time to pass: the client's periodic work either happens at once here, or not within a test.
INTERVALS = Intervals(
    request_timeout=5.0,
    missing_topic=0.01,
    commit=0.01,
    suspend=60.0,
    pull_timeout=60.0,
    first_pause=0.001,
    longest_pause=0.002,
    retry_here=0.001,
)


@pytest.fixture
async def broker() -> AsyncIterator[FakeBroker]:
    async with FakeBroker() as fake:
        yield fake
