from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.live import LiveBroker, seed
from tests.fuzz.witness import Witness


@pytest.fixture
def rng() -> random.Random:
    return random.Random(seed())


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[LiveBroker]:
    """A broker of the test's own. It must log nothing unexpected, and stop cleanly."""
    live = LiveBroker(tmp_path)
    try:
        live.wait_until_listening()
        yield live
        live.check_log()
    finally:
        code = live.stop()
    assert code == 0
    live.check_log()


@pytest.fixture
def witness(broker: LiveBroker) -> Iterator[Witness]:
    """A well-behaved client that runs beside the test and must not be affected by it."""
    with Witness(broker) as running:
        yield running
        running.wait_rounds(2)
