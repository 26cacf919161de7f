"""Fixtures for tests of programs that use duemq: a broker for each test, in the test's process, and its clock.

    @pytest.mark.asyncio
    async def test_a_reminder(duemq_broker, duemq_clock):
        async with Producer(duemq_broker.nameserver) as producer:
            await producer.send("reminders", b"call back", delay="2h")
        duemq_clock.advance("2h")
        ...

pytest loads this module automatically if duemq is installed. `pip install 'duemq[test]'` installs a broker's packages,
and pytest-asyncio for tests that are coroutines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from duemq.testing import BrokerClock, TestBroker


@pytest.fixture
def duemq_settings() -> Mapping[str, object]:
    """Settings of the broker, by RocketMQ's names. Override this fixture, or parametrize it, to change them."""
    return {}


@pytest.fixture
def duemq_broker(duemq_settings: Mapping[str, object]) -> Iterator[TestBroker]:
    """A broker with its name server, on free ports and with an empty store, which is removed after the test."""
    # Imported here, since pytest loads this module in every run.
    from duemq.testing import TestBroker

    with TestBroker(duemq_settings) as broker:
        yield broker


@pytest.fixture
def duemq_clock(duemq_broker: TestBroker) -> BrokerClock:
    """The clock of `duemq_broker`."""
    return duemq_broker.clock
